//! Two files of a config: the pod's, and the pool's, which comes later and may be missing.

use crate::harness::{Sidecar, wait_for};

fn write_pool(sidecar: &Sidecar, text: &str) {
    // As Kubernetes does it: a link to a folder is swapped for one to another.
    let mount = sidecar.pool_config().with_file_name("");
    std::fs::create_dir_all(&mount).unwrap();
    let fresh = tempfile::Builder::new()
        .prefix("..")
        .tempdir_in(&mount)
        .unwrap()
        .keep();
    std::fs::write(fresh.join("config.v1.yaml"), text).unwrap();
    let link = mount.join("..data_tmp");
    std::os::unix::fs::symlink(fresh.file_name().unwrap(), &link).unwrap();
    std::fs::rename(&link, mount.join("..data")).unwrap();
    let file = sidecar.pool_config();
    if !file.is_symlink() {
        std::os::unix::fs::symlink("..data/config.v1.yaml", file).unwrap();
    }
}

fn wait_generation(sidecar: &Sidecar, generation: u64) {
    wait_for(&format!("generation {generation}"), || {
        (sidecar.status()["config_generation"] == generation).then_some(())
    });
}

#[test]
fn the_newer_file_is_taken_in_at_once_and_the_size_of_the_memory_stays_the_pods() {
    let sidecar = Sidecar::start("pool: {generation: 2}\nmemory: {size: 64Mi}\n");
    sidecar.wait_populated();
    wait_generation(&sidecar, 2);
    write_pool(
        &sidecar,
        "managed: true\nsocket: /elsewhere\npool: {generation: 3}\nmemory: {size: 1Gi, evictionPolicy: LRU}\ncache: {minLoadTokens: 1024}\nlog: {format: text}\nlater: 1\n",
    );
    wait_generation(&sidecar, 3);
    let status = sidecar.status();
    assert_eq!(
        status["restart_needed"],
        serde_json::json!(["memory.evictionPolicy"])
    );
    assert_eq!(
        (&status["config_error"], &status["state"]),
        (&"".into(), &"ready".into())
    );
    assert_eq!(sidecar.metric("config_generation"), 3.0);
    assert_eq!(sidecar.metric("config_unknown_keys{key=\"later\"}"), 1.0);

    // The pod's file is newer again: the way without a minute's delay.
    sidecar.configure("pool: {generation: 4}\nmemory: {size: 64Mi}\n");
    wait_generation(&sidecar, 4);
    assert_eq!(sidecar.status()["restart_needed"], serde_json::json!([]));
    assert_eq!(sidecar.metric("engine_starts_total"), 1.0);
}

#[test]
fn a_pools_file_that_is_wrong_is_named_and_the_pods_counts_alone() {
    let mut sidecar = Sidecar::prepare("pool: {generation: 2}\nmemory: {size: 64Mi}\n");
    write_pool(
        &sidecar,
        "pool: {generation: 3}\nmemory: {verify: Perhaps}\n",
    );
    sidecar.run();
    sidecar.wait_socket();
    wait_for("the named reason", || {
        let status = sidecar.status();
        let error = status["config_error"].as_str()?.to_owned();
        (error.contains("memory.verify") && sidecar.reasons().contains(&"ConfigInvalid".into()))
            .then_some(())
    });
    wait_generation(&sidecar, 2);
    assert_eq!(sidecar.get("/readyz", None).0, 200, "it serves");
    write_pool(&sidecar, "pool: {generation: 3}\n");
    wait_generation(&sidecar, 3);
    assert_eq!(sidecar.status()["config_error"], "");
    assert!(!sidecar.reasons().contains(&"ConfigInvalid".into()));

    std::fs::remove_file(sidecar.pool_config()).unwrap();
    wait_generation(&sidecar, 2);
    assert_eq!(
        sidecar.status()["config_error"],
        "",
        "an optional file is missing"
    );
}
