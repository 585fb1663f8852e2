//! What a boot does with the memory of earlier boots, which may be what they died of.

/// An engine that lived this long is healthy; earlier boots without health no longer count. Milliseconds.
pub const HEALTHY_AFTER_MS: u64 = 60_000;
/// After this many boots without health the next one starts cold.
const UNHEALTHY_BOOTS_MAX: u32 = 3;
/// After this many, cold starts in the kept memory did not help.
const UNHEALTHY_BOOTS_OF_MEMORY_MAX: u32 = 2 * UNHEALTHY_BOOTS_MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlierMemory {
    /// Kept with its content.
    Warm,
    /// Kept without its content.
    Cold,
    /// Not used, even if a connector returns it. A boot that finds such memory drops it and ends; it does not count.
    Dropped,
}

impl EarlierMemory {
    /// For the boot after this many boots without health.
    pub fn after(unhealthy_boots: u32) -> Self {
        match unhealthy_boots {
            0..UNHEALTHY_BOOTS_MAX => Self::Warm,
            UNHEALTHY_BOOTS_MAX..UNHEALTHY_BOOTS_OF_MEMORY_MAX => Self::Cold,
            _ => Self::Dropped,
        }
    }
}
