//! A pod that runs the sidecar's program for one command. It reads the same config, credentials and certificates as the pool's sidecars,
//! through the same mounts. It has no memory tier, no disk tier and no vLLM.

use super::{Files, Settings, additions, json};
use crate::names;
use kvcachepool_protocol::config::FILE_NAME;
use serde_json::{Value, json};

/// Checking and listing tiers needs no more.
const CPU: &str = "100m";
const MEMORY: &str = "128Mi";
const MEMORY_MAX: &str = "512Mi";

/// The pod template that runs `kvcachepool-sidecar <command> --config ...` as this service account.
pub fn tool(settings: &Settings, command: &[&str], service_account: &str) -> Value {
    let mut config = settings.config.clone();
    config.disk.path = None;
    let file = format!("{}/pod/{FILE_NAME}", names::CONFIG_PATH);
    let command = [&[additions::PROGRAM], command, &["--config", &file]].concat();
    let mut container = additions::base(&Value::Null, settings, names::TOOL_CONTAINER);
    json::list_mut(&mut container, "volumeMounts")
        .retain(|mount| json::name(mount) != names::SHARED_VOLUME);
    json::list_mut(&mut container, "volumeMounts").push(additions::config_mount());
    json::list_mut(&mut container, "volumeMounts").extend(additions::claim_mount(settings));
    let own = json!({
        "command": command,
        "env": settings.env,
        "resources": {
            "requests": {"cpu": CPU, "memory": MEMORY},
            "limits": {"memory": MEMORY_MAX},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    additions::merge(&mut container, own);
    let secrets = settings.image_pull_secrets.iter();
    let secrets: Vec<Value> = secrets.map(|name| json!({"name": name})).collect();
    let mut volumes = vec![
        additions::config_volume(settings.files.iter().map(Files::source)),
        additions::no_token_volume(),
    ];
    volumes.extend(additions::claim_volume(settings));
    json!({
        "metadata": {
            "labels": {names::TOOL: settings.pool},
            "annotations": {names::CONFIG: config.to_yaml()},
        },
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": service_account,
            "automountServiceAccountToken": additions::reads_token(settings),
            "enableServiceLinks": false,
            "imagePullSecrets": secrets,
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": volumes,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inject::{Disk, Holder};
    use k8s_openapi::api::core::v1::PodTemplateSpec;
    use kvcachepool_protocol::config::Config;

    fn settings() -> Settings {
        let mut settings = Settings::new("llama", "serving", "kvcachepool:1", 1 << 30);
        settings.config.s3.bucket = "kv-cache".to_owned();
        settings.config.disk.path = Some(names::DISK_PATH.into());
        settings.disk = Some(Disk::NodeDirectory);
        settings.image_pull_secrets = vec!["regcred".to_owned()];
        settings.files = vec![Files {
            holder: Holder::Secret,
            name: "keys".to_owned(),
            keys: vec![("AWS_ACCESS_KEY_ID".into(), "s3/AWS_ACCESS_KEY_ID".into())],
        }];
        settings
    }

    #[test]
    fn a_tool_pod_mounts_only_what_a_sidecar_reads() {
        let mut pod = tool(&settings(), &["check"], "default");
        let config = pod["metadata"]["annotations"][names::CONFIG].take();
        insta::assert_yaml_snapshot!(pod);
        let (config, _) = Config::parse(config.as_str().unwrap(), true).unwrap();
        assert_eq!(
            (config.s3.bucket.as_str(), config.disk.path),
            ("kv-cache", None)
        );
    }

    #[test]
    fn a_tool_pod_mounts_the_shared_folder_where_the_config_has_it() {
        let mut settings = settings();
        settings.claim = Some("kv-cache".to_owned());
        let pod = tool(&settings, &["check"], "default");
        let mount =
            json!({"name": names::FILE_SYSTEM_VOLUME, "mountPath": names::FILE_SYSTEM_PATH});
        let container = &pod["spec"]["containers"][0];
        assert!(json::list(container, "volumeMounts").contains(&mount));
        let claim = json!({"claimName": "kv-cache"});
        let volume = json!({"name": names::FILE_SYSTEM_VOLUME, "persistentVolumeClaim": claim});
        assert!(json::list(&pod["spec"], "volumes").contains(&volume));
    }

    #[test]
    fn a_tool_pod_has_known_fields_and_is_not_injected() {
        let pod = tool(&settings(), &["check"], "default");
        let typed: PodTemplateSpec = serde_json::from_value(pod.clone()).unwrap();
        let spec = serde_json::to_value(typed).unwrap()["spec"].take();
        let (built, known) = (pod["spec"].as_object().unwrap(), spec.as_object().unwrap());
        let unknown: Vec<_> = built
            .keys()
            .filter(|key| !known.contains_key(*key))
            .collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        assert_eq!(crate::inject::requested_pool(&pod), None);
    }

    #[test]
    fn the_token_is_mounted_only_if_it_is_the_identity() {
        let mounts = |settings: &Settings| {
            let pod = tool(settings, &["check"], "vllm");
            let container = &pod["spec"]["containers"][0];
            let mounts = json::list(container, "volumeMounts").iter();
            let hidden = mounts.map(json::name).any(|m| m == names::NO_TOKEN_VOLUME);
            (hidden, pod["spec"]["automountServiceAccountToken"].clone())
        };
        let mut settings = settings();
        assert_eq!(mounts(&settings), (true, Value::Bool(false)));
        settings.own_identity = true;
        settings.env = serde_json::from_value(json!([{
            "name": "AWS_WEB_IDENTITY_TOKEN_FILE",
            "value": "/var/run/secrets/kubernetes.io/serviceaccount/token",
        }]))
        .unwrap();
        assert_eq!(mounts(&settings), (false, Value::Bool(true)));
    }
}
