//! Domains: the model that KV values belong to, their layout, and their division into sections. The connector writes the descriptors as
//! JSON; unknown keys are kept and hashed like all others.

mod canonical;
mod numbers;
mod opaque;
mod plan;
mod portable;
mod register;

pub use canonical::{BadDescriptor, Descriptor, MAX_DESCRIPTOR_BYTES, MAX_DESCRIPTOR_DEPTH};
pub use opaque::opaque;
pub use plan::{
    BadPlan, GroupKind, GroupPlan, MAX_GROUPS, MAX_OPAQUE_BYTES, MAX_SECTIONS, SectionPlan,
    slot_rows,
};
pub use portable::{MAX_PORTABLE_BYTES, Portable, PortableGroup};
pub use register::{Domain, RankPart, Refused, SchedulerPart, join, model_identity};
