//! Fields that the schema has for later versions.

use crate::api::{Codec, KVCachePoolSpec};

/// The fields of a spec that this version does nothing for, with what to do instead.
pub(super) fn used(spec: &KVCachePoolSpec) -> Vec<(&'static str, String)> {
    let write = &spec.write;
    let fields = [(
        "spec.write.codec",
        write.codec == Codec::CacheGen,
        "None, Lossless, FP8, INT8 or INT4",
    )];
    let used = fields.into_iter().filter(|(_, used, _)| *used);
    used.map(|(field, _, instead)| (field, message(instead)))
        .collect()
}

fn message(instead: &str) -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("version {version} does not do this yet; write {instead}")
}
