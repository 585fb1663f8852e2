//! The S3 tier of a real sidecar over a real server: what one sidecar wrote, another one on another machine finds.

use crate::harness::{Sidecar, wait_for};
use crate::s3_server::Server;
use crate::vllm::{CHUNK_BYTES, Vllm, content, hashes};
use kvcachepool_protocol::message::{CHUNK_READY, Probe, ProbeReply};
use kvcachepool_protocol::refs::unpack;

/// Number of the S3 tier in answers to PROBE.
const S3: u8 = 4;

fn with_bucket(server: &Server) -> String {
    let config = server.config();
    let (bucket, endpoint, auth) = (config.bucket, config.endpoint, server.auth());
    let auth = auth.display();
    format!(
        "memory: {{size: 64Mi}}\ns3: {{bucket: {bucket}, endpoint: \"{endpoint}\", auth: {auth}, prefix: pool/a}}\n"
    )
}

fn start(server: &Server) -> Sidecar {
    let sidecar = Sidecar::start(&with_bucket(server));
    sidecar.wait_populated();
    sidecar
}

fn tier(sidecar: &Sidecar) -> serde_json::Value {
    let tiers = sidecar.status()["tiers"].clone();
    let mut tiers = tiers.as_array().unwrap().iter();
    tiers.find(|t| t["name"] == "s3").unwrap().clone()
}

fn wait_tier(sidecar: &Sidecar, state: &str) -> serde_json::Value {
    wait_for("the S3 tier's state", || {
        let tier = tier(sidecar);
        (tier["state"] == state).then_some(tier)
    })
}

/// The final answer to the PROBE of a request that holds nothing itself.
fn probe(vllm: &mut Vllm, request: &str, hashes: &[[u8; 32]]) -> ProbeReply {
    let message = Probe {
        local_tokens: Some(0),
        ..vllm.probe_message(request, hashes)
    };
    vllm.probe_with(&message).1
}

#[test]
fn what_was_stored_is_found_in_the_bucket_by_another_sidecar_and_another_vllm() {
    let server = Server::start();
    {
        let sidecar = start(&server);
        wait_tier(&sidecar, "ready");
        let mut vllm = Vllm::attach(&sidecar.socket());
        vllm.store("r", &hashes(1, 4));
        wait_for("the chunks to be in the bucket", || {
            let used = tier(&sidecar)["used_bytes"].as_u64();
            (used >= Some(4 * CHUNK_BYTES)).then_some(())
        });
    }
    let sidecar = start(&server);
    wait_tier(&sidecar, "ready");
    let mut vllm = Vllm::attach(&sidecar.socket());
    let wanted = hashes(1, 6);
    let reply = probe(&mut vllm, "warm", &wanted);
    let ready = reply.states.iter().take_while(|s| **s == CHUNK_READY);
    assert_eq!(ready.count(), 4, "{:?}", reply.states);
    assert_eq!(reply.tiers.get(..4), Some(&[S3; 4][..]));
    let refs = unpack(&reply.refs).unwrap();
    for (slot, hash) in refs.iter().zip(&wanted) {
        assert_eq!(vllm.read(slot), content(hash));
    }
}

#[test]
fn a_file_that_is_missing_and_wrong_keys_are_named_and_the_tier_comes_when_they_are_right() {
    let server = Server::start();
    std::fs::remove_file(server.auth().join("AWS_SECRET_ACCESS_KEY")).unwrap();
    let sidecar = start(&server);
    let reason = |wanted: &str| {
        wait_for(wanted, || {
            let tier = tier(&sidecar);
            let reason = tier["reason"].as_str().unwrap().to_string();
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
    server.write_right_auth();
    wait_tier(&sidecar, "ready");
    let log = std::fs::read_to_string(sidecar.folder().join("log")).unwrap();
    assert!(!log.contains("not-the-one"));
}
