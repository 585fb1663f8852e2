//! ADMIN operations on the Unix socket, with the same token as the HTTP API. The HTTP API only reads: `clear`, `pin`, `unpin` and
//! `flush` exist only here.

use super::token::{Access, check};
use crate::serve::Shell;
use crate::serve::daemon::Daemon;
use kvcachepool_engine::sessions::Frame;
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_REPLY, Op};
use kvcachepool_protocol::message::{Admin, ErrorBody, ErrorCode, encode};
use kvcachepool_protocol::status::Flush;
use serde::Serialize;
use serde_json::json;

/// Runs one operation and returns the reply. Takes the core's lock: the caller must not hold it.
pub fn answer(daemon: &Daemon, shell: &Shell, tag: u64, request: &Admin) -> Option<Frame> {
    let (flags, body) = match perform(daemon, shell, request) {
        Ok(body) => (FLAG_REPLY, body),
        Err(error) => {
            shell
                .metrics
                .add("admin_refusals_total", &[&format!("{:?}", error.code)], 1);
            (FLAG_REPLY | FLAG_ERROR, encode(&error).ok()?)
        }
    };
    Some(Frame {
        op: Op::Admin,
        flags,
        tag,
        body,
    })
}

fn perform(daemon: &Daemon, shell: &Shell, request: &Admin) -> Result<Vec<u8>, ErrorBody> {
    match request.op.as_str() {
        "status" => return body(&daemon.status()),
        "health" => return body(&json!({ "ready": daemon.is_ready() })),
        "flush" => {
            let lacks = shell.with_core(|core, now, out| core.flush_now(now, out));
            let chunks = lacks.iter().map(|l| l.chunks).sum();
            let tiers = lacks.iter().map(|l| l.tier.to_string()).collect();
            return body(&Flush { tiers, chunks });
        }
        "lookup" | "clear" | "pin" | "unpin" => {}
        other => {
            return Err(ErrorBody::new(
                ErrorCode::NotFound,
                format!(
                    "unknown operation {other:?}; expected status, health, flush, lookup, clear, pin or unpin"
                ),
            ));
        }
    }
    let file = daemon.config().effective.admin.token_file;
    if check(file.as_deref(), Some(&request.token)) != Access::Granted {
        return Err(ErrorBody::new(
            ErrorCode::Unauthorized,
            "the token must be that of the file admin.tokenFile; without the file these operations are off",
        ));
    }
    let keys = &request.keys;
    let count = match request.op.as_str() {
        "lookup" => {
            let found = daemon
                .lookup(keys)
                .map_err(|e| ErrorBody::new(e.code(), e.to_string()))?;
            return body(&found);
        }
        "clear" => shell.with_core(|core, now, out| core.clear(now, out)),
        "pin" => shell.with_core(|core, now, _| core.pin(now, keys, request.ttl_s)),
        _ => shell.with_core(|core, now, out| core.unpin(now, keys, out)),
    };
    let count = count.map_err(|e| ErrorBody::new(e.code(), e.to_string()))?;
    body(&json!({ "count": count }))
}

fn body<T: Serialize>(value: &T) -> Result<Vec<u8>, ErrorBody> {
    encode(value).map_err(|e| ErrorBody::new(ErrorCode::Internal, e.to_string()))
}
