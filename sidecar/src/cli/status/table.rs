//! The status as text: aligned lines.

use kvcachepool_protocol::config::ByteSize;
use kvcachepool_protocol::status::{State, Status};
use std::fmt::Write;

pub fn render(status: &Status) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, status);
    out
}

fn write(out: &mut String, s: &Status) -> std::fmt::Result {
    writeln!(out, "state      {}", name(s.state))?;
    for reason in &s.reasons {
        writeln!(out, "           {}: {}", reason.code, reason.message)?;
    }
    writeln!(
        out,
        "sidecar    {} (protocol {}), up {}, engine start {}",
        s.version,
        s.protocol,
        seconds(s.container_uptime_s),
        s.engine_starts
    )?;
    if !s.pool.name.is_empty() {
        writeln!(
            out,
            "pool       {}/{}, config of generation {}",
            s.pool.namespace, s.pool.name, s.config_generation
        )?;
    }
    if !s.restart_needed.is_empty() {
        writeln!(out, "restart    needed by {}", s.restart_needed.join(", "))?;
    }
    if !s.config_error.is_empty() {
        writeln!(out, "config     not in use: {}", s.config_error)?;
    }
    let m = &s.memory;
    writeln!(
        out,
        "memory     {} of {} used, {} populated, {} chunks ({} incomplete, {} unchecked){}",
        size(m.used_bytes),
        size(m.capacity_bytes),
        size(m.populated_bytes),
        m.chunks,
        m.incomplete_chunks,
        m.unchecked_chunks,
        note(&m.reason)
    )?;
    if !m.resize_waits.is_empty() {
        let target = size(m.target_bytes);
        writeln!(out, "resize     to {target} waits: {}", m.resize_waits)?;
    }
    writeln!(
        out,
        "slots      {} published, {} granted, {} committed, {} quarantined, {} free",
        m.slots.published, m.slots.granted, m.slots.committed, m.slots.quarantined, m.slots.free
    )?;
    writeln!(
        out,
        "held       {} leased, {} pinned",
        size(m.leased_bytes),
        size(m.pinned_bytes)
    )?;
    let c = &s.counters;
    let hits: u64 = c.hit_tokens.values().sum();
    writeln!(
        out,
        "tokens     {} requested, {} hit ({}), {} missed, {} failed to load",
        c.requested_tokens,
        hits,
        percent(hits, c.requested_tokens),
        c.miss_tokens.values().sum::<u64>(),
        c.load_failed_tokens
    )?;
    writeln!(
        out,
        "chunks     {} stored, {} evicted, {} adopted, {} corrupt",
        c.stored_chunks, c.evicted_chunks, c.adopted_chunks, c.corrupt_chunks
    )?;
    for (i, d) in s.domains.iter().enumerate() {
        let short = |id: &str| id.chars().take(16).collect::<String>();
        writeln!(
            out,
            "domain {i:<3} model {} layout {}, chunk of {} tokens, {}{}",
            short(&d.model_id),
            short(&d.object_layout),
            d.chunk_tokens,
            size(d.chunk_bytes),
            note(&d.reason)
        )?;
    }
    if s.sessions.is_empty() {
        writeln!(out, "sessions   none")?;
    } else {
        writeln!(
            out,
            "\n{:<5}{:<11}{:<16}{:<18}{:<6}{:<12}STATE",
            "ID", "ROLE", "ENGINE", "INSTANCE", "RANK", "GRANTED"
        )?;
    }
    for p in &s.sessions {
        let state = match (p.off.is_empty(), p.connected, p.ready, p.registered) {
            (false, ..) => format!("off: {}", p.off),
            (_, false, ..) => "disconnected".into(),
            (_, _, true, _) => "ready".into(),
            (_, _, _, true) => "registered, waits for other ranks".into(),
            _ => "connected".into(),
        };
        writeln!(
            out,
            "{:<5}{:<11}{:<16}{:<18}{:<6}{:<12}{state}",
            p.id,
            format!("{:?}", p.role).to_lowercase(),
            format!("{} {}", p.engine, p.version),
            p.instance.chars().take(16).collect::<String>(),
            p.rank,
            size(p.granted_bytes)
        )?;
    }
    Ok(())
}

fn name(state: State) -> String {
    format!("{state:?}").to_lowercase()
}

fn note(reason: &str) -> String {
    if reason.is_empty() {
        String::new()
    } else {
        format!(": {reason}")
    }
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "0 %".into();
    }
    format!("{:.1} %", 100.0 * part as f64 / whole as f64)
}

fn seconds(s: u64) -> String {
    match s {
        0..120 => format!("{s} s"),
        120..7200 => format!("{} min", s / 60),
        _ => format!("{} h", s / 3600),
    }
}

pub fn size(bytes: u64) -> String {
    ByteSize(bytes).short()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_status_renders_without_dividing_by_zero() {
        let text = render(&Status::default());
        assert!(text.contains("0 %") && text.contains("sessions   none"));
    }
}
