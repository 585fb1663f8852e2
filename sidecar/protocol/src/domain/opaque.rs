//! The domain of opaque objects: bytes of clients under their own keys. Each object is a chunk of one token. Its plan depends on its length
//! ([`SectionPlan::opaque`]), and all its sections are shards of group 0.

use super::plan::PIECE_BYTES_MIN;
use super::{Descriptor, Domain, MAX_SECTIONS, SectionPlan};
use crate::key::{LayoutId, ModelId};
use crate::object::Form;
use std::sync::{Arc, LazyLock};

/// Version of the bytes of an object (`docs/internals/protocol.md`, "Opaque objects"). Objects of another version are other objects.
const DESCRIPTOR: &str = r#"{"kind":"opaque","version":1}"#;

static DOMAIN: LazyLock<Option<Arc<Domain>>> = LazyLock::new(|| {
    let descriptor = Descriptor::parse(DESCRIPTOR).ok()?;
    let identity = descriptor.identity();
    Some(Arc::new(Domain {
        model_id: ModelId(identity),
        layout_id: LayoutId(identity),
        object_layout: LayoutId(identity),
        portable: None,
        model: descriptor.clone(),
        layout: descriptor,
        plan: SectionPlan::opaque(MAX_SECTIONS as u64 * PIECE_BYTES_MIN)?,
        form: Form::default(),
        not_shareable: None,
    }))
});

/// The domain of all opaque objects. Its plan has as many sections as any object, and only locates them.
pub fn opaque() -> Option<Arc<Domain>> {
    DOMAIN.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_of_the_domain_locates_every_piece() {
        let domain = opaque().unwrap();
        assert_eq!(domain.plan.sections() as usize, MAX_SECTIONS);
        assert_ne!(domain.layout_id, LayoutId::default());
    }
}
