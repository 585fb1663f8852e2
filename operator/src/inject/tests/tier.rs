//! Pods whose vLLM offloads KV itself: into this project's tier, or into other caches.

use super::*;

/// A pod whose vLLM has the config of docs/guides/vllm-tier.md, with this module of the tier.
fn offloading(module: &str) -> Value {
    let guide = include_str!("../../../../docs/guides/vllm-tier.md");
    let (_, config) = guide.split_once("--kv-transfer-config '").unwrap();
    let (config, _) = config.split_once('\'').unwrap();
    with_config(&config.replace("kvcachepool.vllm_tier", module))
}

fn with_config(config: &str) -> Value {
    let mut pod = pod("plain");
    let args = json::list_mut(&mut pod["spec"]["containers"][0], "args");
    args.extend(["--kv-transfer-config".into(), config.into()]);
    pod
}

#[test]
fn a_vllm_with_this_projects_tier_gets_a_sidecar_and_no_connector() {
    let before = offloading("kvcachepool.vllm_tier");
    for settings in [settings(), compose()] {
        let after = injected(&before, &settings);
        assert_sound(&before, &after, "vllm");
        assert_eq!(inject(&after, &settings), Outcome::Unchanged);
        assert_eq!(Report::of(&after).unwrap().reason, "");
    }
    let mut hooked = before.clone();
    hooked["metadata"]["annotations"] = json!({names::HOOK: "args"});
    assert_eq!(refused(&hooked, &settings()).0, Reason::HookUnsupported);
}

#[test]
fn a_vllm_that_offloads_elsewhere_is_refused() {
    let tier = r#"{"type": "KVCachePoolTier", "module_path": "kvcachepool.vllm_tier"}"#;
    let beside = |connector: &str| {
        format!(
            r#"{{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {{"connectors": [
            {{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {{"secondary_tiers": [{tier}]}}}},
            {{"kv_connector": "{connector}"}}]}}}}"#
        )
    };
    for pod in [
        offloading("their.tier"),
        offloading("kvcachepool.vllm_tiers"),
        with_config(r#"{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}"#),
        with_config(&beside("LMCacheConnectorV1")),
    ] {
        for settings in [settings(), compose()] {
            let (reason, _) = refused(&pod, &settings);
            assert_eq!(reason, Reason::OtherCachePresent, "{pod}");
        }
    }
    injected(&with_config(&beside("NixlConnector")), &settings());
}
