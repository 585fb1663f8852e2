//! Remote access by the real binary: requests over TLS that move objects, and clients, keys, certificates and sidecars that go wrong.

use crate::harness::{DEADLINE, Sidecar, binary, dies_with_us, wait_for};
use crate::testing::free_port;
use crate::testing::tls::Certificates;
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::{
    FLAG_DATA, FLAG_ERROR, HEADER_BYTES, Header, MAX_BODY, Op, frame,
};
use kvcachepool_protocol::message::{
    CHUNK_ABSENT, CHUNK_READY, ErrorBody, ErrorCode, GRANT_EXISTS, GRANT_GRANTED, GRANT_NO_ROOM,
    Grant, GrantChunk, Objects, ObjectsOp, ObjectsReply, Probe, Release, decode, encode,
};
use kvcachepool_protocol::remote::{
    GrantReply, Hello, HelloReply, Parts, ProbeReply, ReadReply, WRITE_COMPLETE, WRITE_LOST,
    WRITE_MORE, WriteReply, front, split,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

const KEY: &str = "0123456789abcdef0123456789abcdef";

/// A running `serve` beside a sidecar.
struct Remote {
    folder: tempfile::TempDir,
    certificates: Certificates,
    admin: u16,
    address: SocketAddr,
    process: Child,
}

impl Remote {
    fn start(sidecar: &Sidecar) -> Self {
        Self::start_with(sidecar, &[])
    }

    fn start_with(sidecar: &Sidecar, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let certificates = Certificates::local();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let admin = free_port();
        let address_file = folder.path().join("address");
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let mut command = Command::new(binary());
        command
            .args(["serve", "--listen", "[::]:0", "--log-level", "debug"])
            .args(["--admin", &format!("[::]:{admin}")])
            .args(options)
            .arg("--socket")
            .arg(sidecar.socket())
            .arg("--certificate")
            .arg(certificates.path("tls.crt"))
            .arg("--private-key")
            .arg(certificates.path("tls.key"))
            .arg("--key-file")
            .arg(file("keys", KEY))
            .arg("--address-file")
            .arg(&address_file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        dies_with_us(&mut command);
        let process = command.spawn().unwrap();
        let address = wait_for("the address of the server", || {
            std::fs::read_to_string(&address_file)
                .ok()?
                .trim()
                .parse()
                .ok()
        });
        Self {
            folder,
            certificates,
            admin,
            address,
            process,
        }
    }

    /// Waits until the server uses a sidecar.
    fn attached(self) -> Self {
        self.wait_ready();
        self
    }

    fn wait_ready(&self) {
        wait_for("a server that is ready", || {
            (self.get("/readyz").0 == 200).then_some(())
        });
    }

    fn get(&self, path: &str) -> (u16, String) {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.admin))?;
            stream.set_read_timeout(Some(DEADLINE))?;
            write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        let text = wait_for("an HTTP answer", || ask().ok());
        let code = text.split(' ').nth(1).unwrap().parse().unwrap();
        (code, text)
    }

    fn wait_metric(&self, line: &str) {
        wait_for(line, || self.get("/metrics").1.contains(line).then_some(()));
    }

    fn connect(&self) -> Client {
        let tcp = TcpStream::connect(self.address).unwrap();
        tcp.set_read_timeout(Some(DEADLINE)).unwrap();
        let authority = CertificateDer::from_pem_file(self.certificates.path("ca.crt")).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(authority).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::aws_lc_rs::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let tls = ClientConnection::new(Arc::new(config), name).unwrap();
        Client {
            stream: StreamOwned::new(tls, tcp),
            tag: 0,
        }
    }

    /// A client after HELLO.
    fn client(&self) -> Client {
        let mut client = self.connect();
        client.hello(KEY).unwrap();
        client
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // Either fails only if the process has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Client {
    stream: StreamOwned<ClientConnection, TcpStream>,
    tag: u64,
}

/// A reply, or the error in its place.
type Answer<T> = Result<T, ErrorBody>;

impl Client {
    fn hello(&mut self, key: &str) -> Answer<HelloReply> {
        let hello = Hello {
            version: PROTOCOL_VERSION,
            engine: "test".into(),
            engine_version: "1".into(),
            instance: "test".into(),
            key: key.into(),
        };
        self.ask(Op::Hello, &hello)
    }

    fn send(&mut self, op: Op, flags: u16, body: &[u8]) {
        self.tag += 1;
        self.stream
            .write_all(&frame(op, flags, self.tag, body))
            .unwrap();
        self.stream.flush().unwrap();
    }

    /// The next frame; `None` when the server closed the connection.
    fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).ok()?;
        let header = Header::decode(&head).unwrap();
        let mut body = vec![0; header.length as usize];
        self.stream.read_exact(&mut body).ok()?;
        Some((header, body))
    }

    fn reply(&mut self) -> Answer<(u16, Vec<u8>)> {
        let (header, body) = self.next().expect("the server closed the connection");
        assert_eq!(header.tag, self.tag);
        match header.flags & FLAG_ERROR {
            0 => Ok((header.flags, body)),
            _ => Err(decode(&body).unwrap()),
        }
    }

    fn ask<B: Serialize, T: DeserializeOwned>(&mut self, op: Op, body: &B) -> Answer<T> {
        self.send(op, 0, &encode(body).unwrap());
        self.reply().map(|(_, body)| decode(&body).unwrap())
    }

    fn code<B: Serialize>(&mut self, op: Op, body: &B) -> ErrorCode {
        self.ask::<B, serde::de::IgnoredAny>(op, body)
            .unwrap_err()
            .code
    }

    fn grant(&mut self, request: &str, sizes: &[(u8, u64)]) -> Vec<u8> {
        let chunk = |&(key, bytes): &(u8, u64)| GrantChunk {
            hash: vec![key; 32],
            parent: Vec::new(),
            first_token: 0,
            tokens: 1,
            groups: 1,
            block_hashes: Vec::new(),
            bytes,
        };
        let grant = Grant {
            request: request.into(),
            namespace: Vec::new(),
            chunks: sizes.iter().map(chunk).collect(),
            ttl_s: 0,
        };
        self.ask::<_, GrantReply>(Op::Grant, &grant)
            .unwrap()
            .results
    }

    fn write(&mut self, request: &str, parts: &[(u32, u64, u32)], data: &[u8]) -> Answer<Vec<u8>> {
        let mut body = front(&parts_of(request, parts)).unwrap();
        body.extend(data);
        self.send(Op::Write, FLAG_DATA, &body);
        let reply = self.reply()?.1;
        Ok(decode::<WriteReply>(&reply).unwrap().written)
    }

    /// Stores an object with these bytes.
    fn put(&mut self, key: u8, bytes: &[u8]) {
        assert_eq!(
            self.grant("put", &[(key, bytes.len() as u64)]),
            [GRANT_GRANTED]
        );
        let mut at = 0;
        for part in bytes.chunks(4 << 20) {
            let done = at + part.len() as u64 == bytes.len() as u64;
            let written = self
                .write("put", &[(0, at, part.len() as u32)], part)
                .unwrap();
            assert_eq!(written, [if done { WRITE_COMPLETE } else { WRITE_MORE }]);
            at += part.len() as u64;
        }
    }

    fn probe(&mut self, request: &str, keys: &[u8], leases: bool) -> ProbeReply {
        self.ask(Op::Probe, &probe_of(request, keys, leases))
            .unwrap()
    }

    /// Waits until an object is readable, and leases it.
    fn lease(&mut self, request: &str, key: u8) -> u64 {
        wait_for("an object", || {
            let reply = self.probe(request, &[key], true);
            match reply.states[0] {
                CHUNK_READY => Some(reply.bytes[0]),
                _ => {
                    self.release(request);
                    None
                }
            }
        })
    }

    fn release(&mut self, request: &str) {
        let release = Release {
            requests: vec![request.into()],
        };
        let _: serde::de::IgnoredAny = self.ask(Op::Release, &release).unwrap();
    }

    fn read(&mut self, request: &str, parts: &[(u32, u64, u32)]) -> Answer<(Vec<u8>, Vec<u8>)> {
        self.send(Op::Read, 0, &encode(&parts_of(request, parts)).unwrap());
        let (flags, body) = self.reply()?;
        let (reply, data) = split::<ReadReply>(flags, &body).unwrap();
        Ok((reply.found, data.to_vec()))
    }
}

fn probe_of(request: &str, keys: &[u8], leases: bool) -> Probe {
    Probe {
        request: request.into(),
        namespace: Vec::new(),
        hashes: keys.iter().flat_map(|key| [*key; 32]).collect(),
        tail_tokens: 0,
        local_tokens: leases.then_some(0),
        budget_ms: 5_000,
        max_load_tokens: None,
        prefill_tokens_per_s: 0,
        independent: true,
    }
}

fn parts_of(request: &str, parts: &[(u32, u64, u32)]) -> Parts {
    Parts {
        request: request.into(),
        parts: parts.to_vec(),
    }
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + i / 251) as u8).collect()
}

#[test]
fn an_object_is_written_found_and_read_over_tls() {
    let sidecar = Sidecar::small();
    let remote = Remote::start(&sidecar).attached();
    let mut client = remote.connect();
    let hello = client.hello(KEY).unwrap();
    assert_eq!(hello.arena_bytes, 64 << 20);
    assert_eq!(hello.features, ["objects"]);
    // Three pieces, written in frames that do not end where pieces do.
    let value = bytes((9 << 20) + 7);
    client.put(1, &value);
    assert_eq!(client.lease("r", 1), value.len() as u64);
    let piece = 4 << 20;
    let (found, data) = client
        .read("r", &[(0, piece - 3, 6), (0, 0, 5), (0, 9 << 20, 7)])
        .unwrap();
    let at = piece as usize;
    let wanted = [&value[at - 3..at + 3], &value[..5], &value[9 << 20..]].concat();
    assert_eq!((found, data), (vec![1, 1, 1], wanted));
    // Another client finds it; without a lease it cannot be read.
    let mut other = remote.client();
    assert_eq!(other.probe("e", &[1, 2], false).states[1], CHUNK_ABSENT);
    assert_ne!(other.probe("e", &[1, 2], false).states[0], CHUNK_ABSENT);
    assert_eq!(other.read("e", &[(0, 0, 5)]).unwrap(), (vec![0], vec![]));
    assert_eq!(other.grant("g", &[(1, 5)]), [GRANT_EXISTS]);
    client.release("r");
    assert_eq!(client.read("r", &[(0, 0, 5)]).unwrap(), (vec![0], vec![]));
    let remove = Objects {
        op: ObjectsOp::Remove,
        namespace: Vec::new(),
        hashes: vec![1; 32],
        ttl_s: 0,
    };
    let removed: ObjectsReply = client.ask(Op::Objects, &remove).unwrap();
    assert_eq!(removed.count, 1);
    assert_eq!(other.probe("e", &[1], false).states, [CHUNK_ABSENT]);
    remote.wait_metric("kvcachepool_remote_bytes_total{direction=\"written\"} 9437191");
}

#[test]
fn a_wrong_key_another_version_and_a_frame_before_hello_are_refused_by_name() {
    let sidecar = Sidecar::small();
    let remote = Remote::start(&sidecar).attached();
    for key in ["", "0123456789abcdef", &format!("{KEY}0")] {
        let mut client = remote.connect();
        let error = client.hello(key).unwrap_err();
        assert_eq!(
            (error.code, error.retryable),
            (ErrorCode::Unauthorized, false)
        );
        assert!(client.next().is_none(), "the connection ends");
    }
    remote.wait_metric("kvcachepool_remote_closed_total{reason=\"wrong_key\"} 3");
    let mut client = remote.connect();
    assert_eq!(
        client.code(Op::Objects, &Release { requests: vec![] }),
        ErrorCode::HelloFirst
    );
    let mut client = remote.connect();
    let mut raw = frame(Op::Hello, 0, 1, &[]);
    raw[4] = 9;
    client.tag = 1;
    client.stream.write_all(&raw).unwrap();
    assert_eq!(client.reply().unwrap_err().code, ErrorCode::WrongVersion);
    // The file is read at each HELLO.
    let rotated = "fedcba9876543210fedcba9876543210";
    std::fs::write(remote.folder.path().join("keys"), rotated).unwrap();
    assert!(remote.connect().hello(rotated).is_ok());
    assert!(remote.connect().hello(KEY).is_err());
}

#[test]
fn bytes_that_are_no_tls_and_frames_that_are_too_long_end_only_their_connection() {
    let sidecar = Sidecar::small();
    let remote = Remote::start(&sidecar).attached();
    let mut served = remote.client();
    let mut plain = TcpStream::connect(remote.address).unwrap();
    plain.set_read_timeout(Some(DEADLINE)).unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // An alert or nothing, then the end.
    let _ = plain.read_to_end(&mut Vec::new());
    for (op, length) in [
        (Op::Probe, (256 << 10) + 1),
        (Op::Write, MAX_BODY as u32 + 1),
    ] {
        let mut client = remote.client();
        let header = Header {
            length,
            version: PROTOCOL_VERSION,
            opcode: op as u8,
            flags: 0,
            tag: 9,
        };
        client.stream.write_all(&header.encode()).unwrap();
        assert!(client.next().is_none(), "{op:?}");
    }
    remote.wait_metric("kvcachepool_remote_closed_total{reason=\"bad_frame\"} 2");
    assert_eq!(served.probe("e", &[1], false).states, [CHUNK_ABSENT]);
}

#[test]
fn requests_that_contradict_themselves_are_refused_and_lose_nothing() {
    let sidecar = Sidecar::small();
    let remote = Remote::start(&sidecar).attached();
    let mut client = remote.client();
    assert_eq!(client.grant("g", &[(1, 100), (2, 200)]), [GRANT_GRANTED; 2]);
    let bad = |answer: Answer<Vec<u8>>| assert_eq!(answer.unwrap_err().code, ErrorCode::BadBody);
    bad(client.write("g", &[(0, 0, 10)], &[0; 9]));
    bad(client.write("g", &[(0, 1, 10)], &[0; 10]));
    bad(client.write("g", &[(0, 0, 101)], &[0; 101]));
    bad(client.write("g", &[(2, 0, 10)], &[0; 10]));
    bad(client.write("g", &[(0, 0, 0)], &[]));
    assert_eq!(
        client.write("other", &[(0, 0, 1)], &[0]).unwrap(),
        [WRITE_LOST]
    );
    // The same request again would lose its first grant.
    let again = Grant {
        request: "g".into(),
        namespace: Vec::new(),
        chunks: Vec::new(),
        ttl_s: 0,
    };
    assert_eq!(client.code(Op::Grant, &again), ErrorCode::BadBody);
    assert_eq!(client.code(Op::Commit, &again), ErrorCode::NotServed);
    client.send(Op::Write, 0, b"\x80");
    assert_eq!(client.reply().unwrap_err().code, ErrorCode::BadBody);
    // The granted objects can still be written.
    let both = client
        .write("g", &[(0, 0, 100), (1, 0, 200)], &[7; 300])
        .unwrap();
    assert_eq!(both, [WRITE_COMPLETE; 2]);
    assert_eq!(client.lease("r", 2), 200);
    let beyond = client.read("r", &[(0, 199, 2)]);
    assert_eq!(beyond.unwrap_err().code, ErrorCode::BadBody);
    let too_many = client.read("r", &[(0, 0, MAX_BODY as u32)]);
    assert_eq!(too_many.unwrap_err().code, ErrorCode::BadBody);
    assert_eq!(
        client.read("r", &[(1, 0, 1), (0, 0, 2)]).unwrap(),
        (vec![0, 1], vec![7, 7])
    );
}

#[test]
fn nothing_that_a_client_asks_ends_the_connection_of_another() {
    let sidecar = Sidecar::small();
    let remote = Remote::start(&sidecar).attached();
    let mut client = remote.client();
    client.put(1, &bytes(100));
    client.lease("r", 1);
    let mut other = remote.client();
    // A key twice, and what only vLLM's scheduler may say.
    let probe = Probe {
        tail_tokens: 1,
        local_tokens: Some(1),
        max_load_tokens: Some(0),
        prefill_tokens_per_s: 1,
        ..probe_of("r", &[1, 1], true)
    };
    let reply: ProbeReply = other.ask(Op::Probe, &probe).unwrap();
    assert_eq!(
        (reply.states, reply.bytes),
        (vec![CHUNK_READY; 2], vec![100; 2])
    );
    assert_eq!(
        other.code(Op::Probe, &probe_of("r", &[2], true)),
        ErrorCode::BadBody
    );
    let many = probe_of("m", &[1; 1025], true);
    assert_eq!(other.code(Op::Probe, &many), ErrorCode::LimitReached);
    let torn = Probe {
        hashes: vec![1; 33],
        ..probe_of("t", &[], true)
    };
    assert_eq!(other.code(Op::Probe, &torn), ErrorCode::BadHashes);
    assert_eq!(client.read("r", &[(0, 0, 100)]).unwrap().1, bytes(100));
    assert_eq!(other.read("r", &[(1, 0, 100)]).unwrap().1, bytes(100));
}

#[test]
fn connections_without_a_key_keep_nobody_out_and_those_with_one_are_bounded() {
    let sidecar = Sidecar::small();
    let remote = Remote::start_with(&sidecar, &["--connections", "1"]).attached();
    let _idle: Vec<TcpStream> = (0..300)
        .map(|_| TcpStream::connect(remote.address).unwrap())
        .collect();
    let mut client = remote.client();
    client.put(1, b"stored");
    remote.wait_metric("kvcachepool_remote_closed_total{reason=\"displaced\"}");
    let error = remote.connect().hello(KEY).unwrap_err();
    assert_eq!(
        (error.code, error.retryable),
        (ErrorCode::LimitReached, true)
    );
    drop(client);
    wait_for("the place of a client that ended", || {
        remote.connect().hello(KEY).ok()
    });
}

#[test]
fn what_a_client_has_not_written_is_given_back_at_its_end() {
    let sidecar = Sidecar::small();
    let remote = Remote::start(&sidecar).attached();
    let mut client = remote.client();
    // The memory holds two of these.
    let size = 28 << 20;
    assert_eq!(
        client.grant("g", &[(1, size), (3, size)]),
        [GRANT_GRANTED; 2]
    );
    assert_eq!(
        client.write("g", &[(0, 0, 5)], b"begin").unwrap(),
        [WRITE_MORE]
    );
    let mut other = remote.client();
    assert_eq!(other.grant("g", &[(1, size)]), [GRANT_EXISTS]);
    assert_eq!(other.grant("g", &[(2, size)]), [GRANT_NO_ROOM]);
    drop(client);
    wait_for("the memory of a client that ended", || {
        (other.grant("g", &[(1, size)]) == [GRANT_GRANTED]).then_some(())
    });
}

#[test]
fn the_end_of_the_engine_ends_remote_connections_and_objects_stay() {
    let sidecar = Sidecar::small();
    let remote = Remote::start(&sidecar).attached();
    let mut client = remote.client();
    client.put(1, &bytes(100_000));
    client.lease("r", 1);
    assert_eq!(client.grant("g", &[(2, 1 << 20)]), [GRANT_GRANTED]);
    crate::harness::signal_to(sidecar.engine(), rustix::process::Signal::KILL);
    assert!(client.next().is_none(), "the connection ends");
    remote.wait_metric("kvcachepool_remote_closed_total{reason=\"sidecar_lost\"} 1");
    remote.wait_ready();
    let mut client = remote.client();
    assert_eq!(client.lease("r", 1), 100_000);
    let (_, data) = client.read("r", &[(0, 0, 100_000)]).unwrap();
    assert_eq!(data, bytes(100_000));
    // What was granted was given back.
    wait_for("the granted memory", || {
        (client.grant("g", &[(2, 1 << 20)]) == [GRANT_GRANTED]).then_some(())
    });
}

#[test]
fn without_a_sidecar_clients_are_told_so_until_there_is_one() {
    let mut sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    let remote = Remote::start(&sidecar);
    let (code, text) = wait_for("a reason", || {
        let (code, text) = remote.get("/readyz");
        text.contains("no sidecar at").then_some((code, text))
    });
    assert_eq!(code, 503, "{text}");
    assert_eq!(remote.get("/healthz").0, 200);
    let error = remote.connect().hello(KEY).unwrap_err();
    assert_eq!((error.code, error.retryable), (ErrorCode::NoArena, true));
    sidecar.run();
    sidecar.wait_populated();
    remote.wait_ready();
    remote.client().put(1, b"stored");
}

#[test]
fn sigterm_ends_the_server_and_what_its_clients_held() {
    let sidecar = Sidecar::small();
    let mut remote = Remote::start(&sidecar).attached();
    let mut client = remote.client();
    assert_eq!(client.grant("g", &[(1, 1 << 20)]), [GRANT_GRANTED]);
    let pid = remote.process.id();
    crate::harness::signal_to(pid, rustix::process::Signal::TERM);
    let status = wait_for("the server's end", || remote.process.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
    assert!(client.next().is_none());
    let next = Remote::start(&sidecar).attached();
    wait_for("the memory of a server that ended", || {
        (next.client().grant("g", &[(1, 1 << 20)]) == [GRANT_GRANTED]).then_some(())
    });
}

#[test]
fn files_that_cannot_be_used_are_named_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let certificates = Certificates::local();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let [certificate, key] = ["tls.crt", "tls.key"].map(|name| certificates.path(name));
    let keys = file("keys", KEY);
    let short = file("short", "short");
    let cases = [
        (&certificate, &key, &short, "needs 16 or more"),
        (&keys, &key, &keys, "expected a certificate in PEM"),
        (&certificate, &keys, &keys, "keys: "),
    ];
    for (certificate, private_key, keys, said) in cases {
        let output = Command::new(binary())
            .args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
            .arg("--certificate")
            .arg(certificate)
            .arg("--private-key")
            .arg(private_key)
            .arg("--key-file")
            .arg(keys)
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(said), "{error}");
    }
}
