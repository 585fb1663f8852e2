//! Pods of SGLang: what its container gets, what its arguments must say, and which other caches it may not have.

use super::*;

const CONFIG: &str = "--hicache-storage-backend-extra-config";

/// The pod of SGLang with these arguments.
fn with(args: &[&str]) -> Value {
    let mut pod = pod("sglang");
    pod["spec"]["containers"][0]["args"] = json!(args);
    pod
}

/// The shortfall that the annotation of the injected pod has, as reason and message.
fn lacks(pod: &Value, settings: &Settings) -> (String, String) {
    let after = injected(pod, settings);
    assert_eq!(
        inject(&after, settings),
        Outcome::Unchanged,
        "a second call"
    );
    let report = Report::of(&after).unwrap();
    assert_eq!(report.result, Verdict::Injected);
    (report.reason, report.message)
}

#[test]
fn an_sglang_without_its_arguments_gets_a_sidecar_and_a_shortfall() {
    let complete = lacks(&pod("sglang"), &settings());
    assert_eq!(complete, (String::new(), String::new()));
    let missing = [
        (
            with(&["--model-path", "m"]),
            "--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{",
        ),
        (
            with(&[
                "--enable-hierarchical-cache",
                "--hicache-storage-backend=dynamic",
            ]),
            "add --hicache-storage-backend-extra-config '{",
        ),
        (
            with(&[
                "--hicache_storage_backend",
                "dynamic",
                CONFIG,
                "@/etc/hicache.json",
            ]),
            "add --enable-hierarchical-cache",
        ),
    ];
    for (pod, expected) in missing {
        let (reason, message) = lacks(&pod, &settings());
        assert_eq!(reason, "SglangArgumentsMissing", "{message}");
        assert!(message.contains(expected), "{message}");
    }
    for config in [
        r#"{"module_path": "kvcachepool.sglang"}"#,
        "@/etc/hicache.json",
        "$(HICACHE)",
    ] {
        let args = [
            "--enable-hierarchical-cache",
            "--hicache-storage-backend",
            "$BACKEND",
            CONFIG,
            config,
        ];
        assert_eq!(lacks(&with(&args), &settings()).0, "", "{config}");
    }
}

#[test]
fn arguments_that_a_pod_does_not_show_are_no_shortfall() {
    assert_eq!(
        lacks(&with(&["--config", "/etc/sglang.yaml"]), &settings()).0,
        ""
    );
    let mut bare = with(&[]);
    json::object(&mut bare["spec"]["containers"][0]).remove("command");
    assert_eq!(lacks(&bare, &settings()).0, "");
}

#[test]
fn a_missing_cache_is_reported_before_a_missing_gpu() {
    let mut settings = settings();
    settings.gpu_access = GpuAccess::ResourceClaim;
    assert_eq!(lacks(&pod("sglang"), &settings).0, "NoResourceClaim");
    assert_eq!(
        lacks(&with(&["--model-path", "m"]), &settings).0,
        "SglangArgumentsMissing"
    );
}

#[test]
fn the_args_hook_adds_only_what_is_missing() {
    let hooked = |args: &[&str]| {
        let mut pod = with(args);
        pod["metadata"]["annotations"] = json!({names::HOOK: "args"});
        pod
    };
    let args = |pod: &Value| {
        let (reason, _) = lacks(pod, &settings());
        assert_eq!(reason, "");
        let after = injected(pod, &settings());
        let args = json::list(&after["spec"]["containers"][0], "args").iter();
        args.map(|arg| arg.as_str().unwrap().to_string())
            .collect::<Vec<_>>()
    };
    let all = args(&hooked(&["--model-path", "m"]));
    assert_eq!(
        all[2..6],
        [
            "--enable-hierarchical-cache",
            "--hicache-storage-backend",
            "dynamic",
            CONFIG
        ]
    );
    let config: Value = serde_json::from_str(&all[6]).unwrap();
    let guide = include_str!("../../../../docs/guides/sglang.md");
    let (_, of_guide) = guide.split_once("extra-config '").unwrap();
    let (of_guide, _) = of_guide.split_once('\'').unwrap();
    assert_eq!(config, serde_json::from_str::<Value>(of_guide).unwrap());
    let own = [
        "--enable-hierarchical-cache",
        "--hicache-storage-backend",
        "dynamic",
        CONFIG,
        "@f",
    ];
    assert_eq!(args(&hooked(&own)), own);
    let mut shell = hooked(&["x"]);
    shell["spec"]["containers"][0]["command"] =
        json!(["sh", "-c", "python -m sglang.launch_server"]);
    assert_eq!(refused(&shell, &settings()).0, Reason::HookUnsupported);
}

#[test]
fn an_sglang_with_another_cache_is_refused() {
    for args in [
        vec!["--enable-lmcache"],
        vec![
            "--enable-hierarchical-cache",
            "--hicache-storage-backend",
            "mooncake",
        ],
        vec!["--hicache-storage-backend=file"],
        vec![
            "--hicache-storage-backend",
            "dynamic",
            CONFIG,
            r#"{"module_path": "their.backend"}"#,
        ],
    ] {
        let (reason, _) = refused(&with(&args), &settings());
        assert_eq!(reason, Reason::OtherCachePresent, "{args:?}");
    }
    let several = with(&["--nnodes", "2", "--node-rank", "0"]);
    let Outcome::Refuse {
        reason, message, ..
    } = inject(&several, &settings())
    else {
        panic!("not refused");
    };
    assert_eq!(reason, Reason::MultiNodeUnsupported);
    assert!(
        message.starts_with("SGLang is started with --nnodes 2"),
        "{message}"
    );
}

#[test]
fn the_args_hook_is_refused_where_sglang_would_not_start_or_lose_an_argument() {
    for (args, why) in [
        (&["--disable-radix-cache"][..], "--disable-radix-cache"),
        (&["--enable-unified-cache-external-linker"], "linker"),
        (&["--disaggregation-mode", "decode"], "decode without"),
        (&["--config", "/etc/sglang.yaml"], "--config"),
        (&[CONFIG, r#"{"prefetch_threshold": 256}"#], "extra config"),
        (&["--", "bash", "-c", "x"], "a shell"),
    ] {
        let mut pod = with(args);
        pod["metadata"]["annotations"] = json!({names::HOOK: "args"});
        let (reason, patch) = refused(&pod, &settings());
        assert_eq!(reason, Reason::HookUnsupported, "{patch:?}");
        assert!(format!("{patch:?}").contains(why), "{patch:?}");
    }
    let decode = [
        "--disaggregation-mode",
        "decode",
        "--disaggregation-decode-enable-radix-cache",
    ];
    let mut pod = with(&decode);
    pod["metadata"]["annotations"] = json!({names::HOOK: "args"});
    injected(&pod, &settings());
}

#[test]
fn a_shortfall_advises_nothing_that_sglang_refuses() {
    for (args, said) in [
        (&["--disable-radix-cache"][..], "has no hierarchical cache"),
        (
            &[
                "--enable-hierarchical-cache",
                CONFIG,
                r#"{"prefetch_threshold": 256}"#,
            ],
            "does not name kvcachepool.sglang",
        ),
    ] {
        let (reason, message) = lacks(&with(args), &settings());
        assert_eq!(reason, "SglangArgumentsMissing");
        assert!(message.contains(said), "{message}");
        assert!(!message.contains("add --"), "{message}");
    }
}
