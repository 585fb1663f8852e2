//! `size`: the bytes of a model's KV, and what a pod of a pool holds of it.

use super::args::Size;
use super::settings::accepted;
use crate::api::KVCachePool;
use kvcachepool_protocol::sizing::Report;

pub fn size(args: &Size, pool: Option<&KVCachePool>) -> Result<Report, Box<dyn std::error::Error>> {
    let model = std::fs::read_to_string(&args.model)
        .map_err(|e| format!("{}: {e}", args.model.display()))?;
    // The image does not matter here.
    let settings = pool.map(|pool| accepted(pool, String::new())).transpose()?;
    let config = settings.map(|settings| settings.config);
    Ok(args.sizing.report(&model, config.as_ref())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Size as ApiSize;
    use crate::plugin::args::{Args, Command};
    use clap::Parser;
    use serde_json::json;

    fn args(arguments: &[&str]) -> Size {
        let all = [&["x", "size"], arguments].concat();
        match Args::try_parse_from(all).unwrap().command {
            Command::Size(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_tiers_of_a_pool_and_its_chunks_are_used() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("config.json");
        let llama = json!({"model_type": "llama", "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"});
        std::fs::write(&model, llama.to_string()).unwrap();
        let model = model.to_str().unwrap();
        let mut pool: KVCachePool = serde_json::from_value(json!({
            "apiVersion": "kvcachepool.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": "demo", "namespace": "n"},
            "spec": {"local": {"memory": {"perPod": "64Gi"}, "disk": {"perPod": "500Gi", "emptyDir": {}}}, "cache": {"chunkTokens": 512}},
        }))
        .unwrap();
        let report = size(&args(&[model]), Some(&pool)).unwrap();
        let tiers: Vec<_> = report
            .tiers
            .iter()
            .map(|tier| (tier.tier, tier.size_bytes, tier.chunks))
            .collect();
        assert_eq!(report.chunk_bytes, 64 << 20);
        assert_eq!(tiers[0], ("memory", 64 << 30, 1024));
        assert_eq!((tiers[1].0, tiers[1].1), ("disk", 500 << 30));
        let report = size(&args(&[model, "--memory", "1Gi"]), Some(&pool)).unwrap();
        assert_eq!(report.tiers[0].size_bytes, 1 << 30);
        assert!(size(&args(&[model]), None).unwrap().tiers.is_empty());
        pool.spec.local.memory.per_pod = ApiSize("much".to_owned());
        let refused = size(&args(&[model]), Some(&pool)).unwrap_err().to_string();
        assert!(refused.starts_with("NotAccepted: "), "{refused}");
    }

    #[test]
    fn an_unreadable_file_is_named() {
        let refused = size(&args(&["/nowhere.json"]), None).unwrap_err();
        assert!(refused.to_string().starts_with("/nowhere.json: "));
    }
}
