//! Metrics from a table. A program lists its families once, in a table of `Metric`s. `Metrics` exports those and nothing else, and the docs
//! list the same table. This crate makes no decisions.

mod groups;
mod label;
mod registry;
mod table;
mod totals;

pub use groups::Gauge;
pub use label::{VERBATIM, snake_case};
pub use registry::Metrics;
pub use table::{Kind, Metric, PREFIX, counter, gauge, kept_seconds, seconds};
