//! Converts the config file's types to the config of the sans-I/O core.

use kvcachepool_engine::config as core;
use kvcachepool_protocol::config::{
    Admission, Config, EvictionPolicy, LoadOrRecompute, TransferMode, Verify, WritePolicy,
};
use kvcachepool_tiers::kinds;

pub fn core_config(config: &Config) -> core::Config {
    let defaults = core::Config::default();
    let bounds = &config.limits.tiers;
    let tier = |kind| core::TierConfig {
        kind,
        write: match config.write.policy {
            WritePolicy::WriteThrough => core::WritePolicy::WriteThrough,
            WritePolicy::WriteBack => core::WritePolicy::WriteBack,
            WritePolicy::None => core::WritePolicy::None,
        },
        admission: match config.write.admission {
            Admission::All => core::Admission::All,
            Admission::Reused => core::Admission::Reused,
        },
        lookups_max: bounds.lookups,
        fetches_max: bounds.fetches,
        fetch_bytes_max: bounds.fetch_bytes.0,
        fetch_queue_max: bounds.fetch_queue,
        puts_max: bounds.writes,
        put_bytes_max: bounds.write_bytes.0,
        put_queue_bytes_max: bounds.write_queue_bytes.0,
        put_wait_ms: config.write.back_after.ms,
        put_age_ms_max: bounds.write_queue_age.ms,
    };
    core::Config {
        settings: config.settings(),
        arena_bytes: config.memory.size.0,
        policy: match config.memory.eviction_policy {
            EvictionPolicy::S3Fifo => core::PolicyKind::S3Fifo,
            EvictionPolicy::Lru => core::PolicyKind::Lru,
            EvictionPolicy::Lfu => core::PolicyKind::Lfu,
            EvictionPolicy::Fifo => core::PolicyKind::Fifo,
        },
        verify: match config.memory.verify {
            Verify::Background => core::Verify::Background,
            Verify::Always => core::Verify::Always,
        },
        verify_age_ms: config.memory.verify_age.ms,
        limits: core::Limits {
            sessions_max: config.limits.sessions,
            requests_max: config.limits.requests,
            granted_bytes_max: config.limits.granted_bytes.0,
            index_entries_max: config.limits.index_entries,
            soft_pin_percent_max: u32::from(config.limits.pinned_share.0),
            events_max: config.limits.events,
            ..defaults.limits
        },
        read_bytes_per_s: config.pacing.read_bytes_per_second.0,
        write_bytes_per_s: config.pacing.write_bytes_per_second.0,
        load_or_recompute: match config.cache.load_or_recompute {
            LoadOrRecompute::Auto => core::LoadOrRecompute::Auto,
            LoadOrRecompute::AlwaysLoad => core::LoadOrRecompute::AlwaysLoad,
        },
        fidelity: config.write.codec.of_objects().fidelity(),
        transfer: match config.transfer.mode {
            TransferMode::Auto => core::Transfer::Auto,
            TransferMode::Engine => core::Transfer::Engine,
            TransferMode::CudaWindow => core::Transfer::CudaWindow,
        },
        window_bytes: config.transfer.window_size.0,
        tiers: kinds(config).map(tier).collect(),
        ..defaults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_config_leaves_out_is_what_the_core_has_anyway() {
        let text = "disk: {path: /d}\nredis: {urls: ['redis://a']}\ns3: {bucket: abc}\n";
        let (config, _) = Config::parse(text, false).unwrap();
        for tier in core_config(&config).tiers {
            assert_eq!(tier, core::TierConfig::new(tier.kind));
        }
    }
}
