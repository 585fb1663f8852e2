//! Metrics by table: a program lists its families once, in a table of `Metric`s; `Metrics` exports those and nothing else, and the docs list
//! the same table. Everything counts by a name of the table. Nothing here decides anything.

mod registry;
mod table;

pub use registry::Metrics;
pub use table::{Kind, Metric, PREFIX, counter, gauge, seconds};
