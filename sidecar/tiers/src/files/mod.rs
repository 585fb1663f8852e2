//! What the tiers with files share: threads for blocking calls, I/O at addresses of the arena, and the causes of the system's errors.

pub mod fault;
pub mod pool;
pub mod raw;
pub mod sections;
