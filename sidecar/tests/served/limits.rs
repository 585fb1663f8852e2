//! Clients that take too much or give nothing.

use crate::client::Connection;
use crate::harness::Sidecar;
use crate::vllm::{Vllm, hashes, hello, incarnation};
use kvcachepool_protocol::frame::{Op, frame};
use kvcachepool_protocol::message::*;

#[test]
fn a_silent_client_is_closed_by_name_and_one_that_spoke_is_not() {
    let sidecar = Sidecar::start("memory: {size: 64Mi}\nlimits: {helloTimeout: 200ms}\n");
    sidecar.wait_populated();
    let mut spoke = Vllm::attach(&sidecar.socket());
    let mut silent = Connection::open(&sidecar.socket());
    let mut dripping = Connection::open(&sidecar.socket());
    dripping.send_raw(&[0], &[]);
    for client in [&mut silent, &mut dripping] {
        let answers = client.until_closed();
        assert_eq!(answers[0].code(), Some(ErrorCode::HelloFirst));
    }
    sidecar.wait_metric("connections_closed_total{reason=\"hello_timeout\"}", 2.0);
    spoke.store("r", &hashes(1, 1));
}

#[test]
fn one_connection_more_than_the_limit_is_refused_and_the_others_live() {
    let sidecar = Sidecar::start("memory: {size: 64Mi}\nlimits: {connections: 4}\n");
    sidecar.wait_populated();
    let mut vllm = Vllm::attach(&sidecar.socket());
    let _others: Vec<_> = (0..2)
        .map(|_| Connection::open(&sidecar.socket()))
        .collect();
    let mut beyond = Connection::open(&sidecar.socket());
    let answers = beyond.until_closed();
    assert_eq!(answers[0].code(), Some(ErrorCode::LimitReached));
    assert!(
        answers[0]
            .error()
            .unwrap()
            .message
            .contains("limits.connections")
    );
    sidecar.wait_metric(
        "connections_closed_total{reason=\"too_many_connections\"}",
        1.0,
    );
    vllm.store("r", &hashes(1, 1));
}

#[test]
fn a_client_that_does_not_read_its_answers_is_closed_by_name() {
    let sidecar = Sidecar::start("memory: {size: 64Mi}\nlimits: {sendBytes: 1Mi}\n");
    sidecar.wait_populated();
    let mut vllm = Vllm::attach(&sidecar.socket());
    let deaf = Connection::open(&sidecar.socket());
    let message = hello(Role::Admin, 1, &incarnation());
    deaf.send_raw(&frame(Op::Hello, 0, 1, &encode(&message).unwrap()), &[]);
    let question = Admin {
        op: "status".into(),
        keys: Vec::new(),
        ttl_s: 0,
        token: String::new(),
    };
    let body = encode(&question).unwrap();
    // Enough answers to fill the socket's buffer and the queue. The sidecar closes in the middle, so the writer gets EPIPE.
    let flood = std::thread::spawn(move || {
        let burst = frame(Op::Admin, 0, 2, &body).repeat(16);
        for _ in 0..100_000 {
            deaf.send_raw(&burst, &[]);
        }
    });
    sidecar.wait_metric("connections_closed_total{reason=\"slow_reader\"}", 1.0);
    assert!(flood.join().is_err(), "the flood met a closed connection");
    vllm.store("r", &hashes(1, 1));
}
