//! Every key of LMCache that the command knows, with what becomes of it: those of the process of vLLM, of 2024 to version 0.5, the
//! variables, and the fields of an `LMCacheEngine`. The migration guide has the same table.

mod cached;
mod local;
mod operation;
mod shared;

use super::keys::{Key, Outcome, Row};

/// Sections with their titles.
pub const SECTIONS: &[(&str, &[Row])] = &[
    ("What is cached", cached::CACHED),
    ("Memory", local::MEMORY),
    ("Disk", local::DISK),
    ("Redis and other servers", shared::REDIS),
    ("S3", shared::S3),
    ("Prefill and decode, peers, controller", operation::OTHERS),
    ("Operation", operation::OPERATION),
    ("Kubernetes", operation::KUBERNETES),
];

const fn row(keys: &'static [Key], outcome: Outcome) -> Row {
    Row { keys, outcome }
}
