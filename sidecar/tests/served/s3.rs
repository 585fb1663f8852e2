//! The S3 tier of a real sidecar over a real server: what one sidecar wrote, another one on another machine finds.

use crate::harness::{Sidecar, wait_for};
use crate::testing::s3_server::{ID, SECRET, Server};
use crate::tiers::{flushed_after_the_last_vllm, flushed_before_the_end, writing_back};
use crate::vllm::{CHUNK_BYTES, Vllm, hashes};
use std::process::{Command, Output};

/// Number of the S3 tier in answers to PROBE.
pub const S3: u8 = 4;

fn with_bucket(server: &Server) -> String {
    let config = server.config();
    let (bucket, endpoint, auth) = (config.bucket, config.endpoint, server.auth());
    let auth = auth.display();
    format!(
        "memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\ns3: {{bucket: {bucket}, endpoint: \"{endpoint}\", auth: {auth}, prefix: pool/a}}\n"
    )
}

/// The same, with the default chain of credentials.
fn with_chain(server: &Server) -> String {
    let auth = format!("auth: {}, ", server.auth().display());
    with_bucket(server).replace(&auth, "")
}

fn start(server: &Server) -> Sidecar {
    let sidecar = Sidecar::start(&with_bucket(server));
    sidecar.wait_populated();
    sidecar
}

#[test]
fn what_was_stored_is_found_in_the_bucket_by_another_sidecar_and_another_vllm() {
    let server = Server::start();
    {
        let sidecar = start(&server);
        sidecar.wait_tier("s3", "ready");
        let mut vllm = Vllm::attach(&sidecar.socket());
        vllm.store("r", &hashes(1, 4));
        wait_for("the chunks to be in the bucket", || {
            let used = sidecar.tier("s3")["used_bytes"].as_u64();
            (used >= Some(4 * CHUNK_BYTES)).then_some(())
        });
    }
    found_by_another(&server);
}

/// Another sidecar and another vLLM find four chunks of prompt 1 in the bucket.
fn found_by_another(server: &Server) {
    let sidecar = start(server);
    sidecar.wait_tier("s3", "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.finds_below(&hashes(1, 6), 4, S3);
}

#[test]
fn what_is_written_back_is_in_the_bucket_when_the_last_vllm_ended() {
    let server = Server::start();
    flushed_after_the_last_vllm(&writing_back(&with_bucket(&server), "s3"), "s3");
    found_by_another(&server);
}

#[test]
fn a_sidecar_without_a_vllm_that_is_told_to_end_writes_to_the_bucket_first_what_waits() {
    let server = Server::start();
    flushed_before_the_end(writing_back(&with_bucket(&server), "s3"));
    found_by_another(&server);
}

#[test]
fn a_file_that_is_missing_and_wrong_keys_are_named_and_the_tier_comes_when_they_are_right() {
    let server = Server::start();
    std::fs::remove_file(server.auth().join("AWS_SECRET_ACCESS_KEY")).unwrap();
    let sidecar = start(&server);
    let reason = |wanted: &str| {
        wait_for(wanted, || {
            let tier = sidecar.tier("s3");
            let reason = format!("{}: {}", tier["reason"], tier["message"]);
            reason.contains(wanted).then_some(reason)
        })
    };
    let missing = reason("AWS_SECRET_ACCESS_KEY");
    assert!(missing.contains("Unauthenticated"), "{missing}");
    server.write_auth("kvcachepool-test", "not-the-one");
    let wrong = reason("SignatureDoesNotMatch");
    assert!(wrong.contains("Unauthenticated"), "{wrong}");
    assert!(!wrong.contains("not-the-one"), "{wrong}");
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    vllm.check("r", &hashes(1, 2));
    sidecar.wait_off("s3", "Unauthenticated");
    server.write_right_auth();
    sidecar.wait_tier("s3", "ready");
    let log = std::fs::read_to_string(sidecar.folder().join("log")).unwrap();
    assert!(!log.contains("not-the-one"));
}

/// Runs a tool on the bucket, with credentials and endpoint in its environment.
fn tool(server: &Server, arguments: &[&str]) -> Output {
    let mut command = Command::new(crate::harness::binary());
    command
        .args(arguments)
        .env("AWS_ENDPOINT_URL_S3", server.config().endpoint)
        .env("AWS_ACCESS_KEY_ID", ID)
        .env("AWS_SECRET_ACCESS_KEY", SECRET);
    command.output().unwrap()
}

#[test]
fn tools_see_verify_and_remove_what_a_sidecar_wrote() {
    let server = Server::start();
    {
        let sidecar = start(&server);
        sidecar.wait_tier("s3", "ready");
        let mut vllm = Vllm::attach(&sidecar.socket());
        vllm.store("r", &hashes(1, 3));
        wait_for("the chunks to be in the bucket", || {
            let used = sidecar.tier("s3")["used_bytes"].as_u64();
            (used >= Some(3 * CHUNK_BYTES)).then_some(())
        });
    }
    let url = "s3://kv-bucket/pool/a";
    let json = |arguments: &[&str]| -> serde_json::Value {
        let output = tool(&server, arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|_| panic!("{output:?}"))
    };
    let seen = json(&["inspect", url, "--output", "json"]);
    assert_eq!(
        (seen["tier"].as_str(), seen["objects"].as_u64()),
        (Some("s3"), Some(3)),
        "{seen}"
    );
    let verified = json(&["verify", url, "--output", "json"]);
    assert_eq!(verified["ok"].as_u64(), Some(3), "{verified}");
    let other = "0123456789abcdef/fedcba9876543210";
    let gone = json(&["gc", url, "--all-but-domain", other, "--output", "json"]);
    assert_eq!(gone["removed"].as_u64(), Some(3), "{gone}");
    let left = json(&["inspect", url, "--output", "json"]);
    assert_eq!(left["objects"].as_u64(), Some(0), "{left}");
    let wrong = tool(&server, &["inspect", "s3://no-such-bucket/x"]);
    let text = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(!wrong.status.success() && text.contains("Gone"), "{text}");
}

#[test]
fn the_environment_has_credentials() {
    let server = Server::start();
    let plain =
        format!("export AWS_ACCESS_KEY_ID={ID} AWS_SECRET_ACCESS_KEY={SECRET}; exec \"$@\"");
    let mut sidecar = Sidecar::prepare(&with_chain(&server));
    sidecar.run_by(&plain);
    sidecar.wait_socket();
    sidecar.wait_tier("s3", "ready");
}
