//! Domains: which model's KV values, in which arrangement, cut into which sections. Descriptors are JSON made by the connector;
//! keys unknown here are kept and hashed like all others.

mod canonical;
mod numbers;
mod plan;
mod register;

pub use canonical::{
    BadDescriptor, Descriptor, MAX_DESCRIPTOR_BYTES, MAX_DESCRIPTOR_DEPTH, canonical_json,
};
pub use plan::{BadPlan, GroupKind, GroupPlan, MAX_GROUPS, MAX_SECTIONS, SectionPlan, slot_rows};
pub use register::{Domain, RankPart, Refused, SchedulerPart, join, model_identity};
