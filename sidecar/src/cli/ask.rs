//! Sends one request to a sidecar, with a deadline.

use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::{FLAG_ERROR, HEADER_BYTES, Header, Op, frame};
use kvcachepool_protocol::message::{Admin, ErrorBody, Hello, Role, decode, encode};
use kvcachepool_protocol::status::Status;
use serde::de::DeserializeOwned;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// `GET /v1/status`.
pub fn over_http(url: &str) -> Result<Status, String> {
    let authority = url
        .strip_prefix("http://")
        .ok_or(format!("{url}: write it as http://host:port"))?
        .trim_end_matches('/');
    let failed = |e: std::io::Error| {
        format!("{url}: {e}; is the sidecar running, and is this its admin.listen?")
    };
    let address = authority
        .to_socket_addrs()
        .map_err(failed)?
        .next()
        .ok_or(format!("{url}: the name has no address"))?;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(failed)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    write!(
        stream,
        "GET /v1/status HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n"
    )
    .map_err(failed)?;
    let mut answer = Vec::new();
    stream
        .take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer)
        .map_err(failed)?;
    let text = String::from_utf8_lossy(&answer);
    let (head, body) = text
        .split_once("\r\n\r\n")
        .ok_or(format!("{url}: the response is not HTTP"))?;
    let line = head.lines().next().unwrap_or_default();
    if line.split_whitespace().nth(1) != Some("200") {
        return Err(format!("{url}: {line}: {}", body.trim()));
    }
    serde_json::from_str(body).map_err(|e| format!("{url}: the response is not a status: {e}"))
}

/// Sends HELLO as a tool, then one ADMIN operation that needs no token.
pub fn over_socket<T: DeserializeOwned>(path: &Path, operation: &str) -> Result<T, String> {
    let shown = path.display();
    let failed = |e: std::io::Error| {
        format!("{shown}: {e}; is the sidecar running, and is this its `socket`?")
    };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    let hello = Hello {
        version: PROTOCOL_VERSION,
        role: Role::Admin,
        engine: "kvcachepool-sidecar".into(),
        engine_version: env!("CARGO_PKG_VERSION").into(),
        instance: String::new(),
        incarnation: incarnation(),
        number: 1,
        rank: 0,
        fds: Vec::new(),
        lock: None,
        region: None,
        grants: Vec::new(),
        requests: Vec::new(),
        watches_shrinks: false,
        off: None,
    };
    ask(
        &mut stream,
        Op::Hello,
        1,
        &encode(&hello).map_err(|e| e.to_string())?,
    )?;
    let question = Admin {
        op: operation.into(),
        keys: Vec::new(),
        ttl_s: 0,
        token: String::new(),
    };
    let body = encode(&question).map_err(|e| e.to_string())?;
    let answer = ask(&mut stream, Op::Admin, 2, &body)?;
    decode(&answer).map_err(|e| format!("{shown}: {e}"))
}

fn ask(stream: &mut UnixStream, op: Op, tag: u64, body: &[u8]) -> Result<Vec<u8>, String> {
    let io = |e: std::io::Error| format!("the sidecar did not answer {op:?}: {e}");
    stream.write_all(&frame(op, 0, tag, body)).map_err(io)?;
    loop {
        let mut head = [0u8; HEADER_BYTES];
        stream.read_exact(&mut head).map_err(io)?;
        let header = Header::decode(&head).map_err(|e| e.to_string())?;
        let mut body = vec![0u8; header.length as usize];
        stream.read_exact(&mut body).map_err(io)?;
        if header.flags & FLAG_ERROR != 0 {
            let error: ErrorBody = decode(&body).map_err(|e| e.to_string())?;
            return Err(format!("{:?}: {}", error.code, error.message));
        }
        if header.tag == tag {
            return Ok(body);
        }
    }
}

/// Unique enough for a tool.
fn incarnation() -> Vec<u8> {
    fastrand::u128(..).to_le_bytes().to_vec()
}
