//! Any text gives a descriptor whose canonical form is stable, or a named error; any groups give a plan that adds up, or a named error.
#![no_main]

use kvcachepool_protocol::domain::{Descriptor, GroupKind, GroupPlan, SectionPlan, slot_rows};
use kvcachepool_protocol::layouts::LayoutTable;
use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;

type Groups = Vec<(u8, u32, u64, u8, u32)>;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        descriptor(text);
    }
    if let Ok((chunk_tokens, block, groups)) = Unstructured::new(bytes).arbitrary() {
        plan(chunk_tokens, block, groups);
    }
});

fn descriptor(text: &str) {
    let _ = LayoutTable::parse(text);
    if let Ok(descriptor) = Descriptor::parse(text) {
        let canonical = descriptor.canonical();
        let again = Descriptor::parse(&canonical).expect("the canonical form can be read");
        assert_eq!(again.canonical(), canonical);
        assert_eq!(again.identity(), descriptor.identity());
    }
}

fn plan(chunk_tokens: u32, block: u32, groups: Groups) {
    let groups = groups
        .into_iter()
        .map(
            |(kind, block_tokens, block_bytes, shards, window_tokens)| GroupPlan {
                kind: [GroupKind::Full, GroupKind::Window, GroupKind::State][usize::from(kind) % 3],
                block_tokens,
                block_bytes,
                shards: shards.into(),
                window_tokens,
            },
        )
        .collect();
    if let Ok(plan) = SectionPlan::new(chunk_tokens, block, groups) {
        for section in 0..plan.sections() {
            let (group, shard) = plan.locate(section).expect("every section has a group");
            assert_eq!(plan.section(group, shard), Some(section));
            let full = plan.section_bytes(section, chunk_tokens);
            assert!(full == plan.full_bytes(group) && full <= plan.longest_section_bytes());
            assert!(u64::from(slot_rows(full)[0]) * 65_536 >= full);
        }
        let map = plan.section_map(plan.all_groups());
        assert_eq!(map.count_ones(), plan.sections());
    }
}
