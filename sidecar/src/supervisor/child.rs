//! Starts the engine: the same binary, as the leader of its own process group, with the link as its standard input. The kernel kills
//! it when the supervisor dies.
#![allow(unsafe_code)]

use crate::config_file::Files;
use rustix::fd::OwnedFd;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};

/// Name of the hidden subcommand.
pub const SUBCOMMAND: &str = "engine";

/// Exit code of an engine that wants a restart (the config changed, or its memory must be dropped). It is not a failure, and does
/// not reset earlier ones.
pub const EXIT_RESTART: i32 = 75;

/// Settings of the engine's allocator: a thread of its own returns freed memory to the node after a quarter of a second. All threads
/// share two arenas, because memory freed in one is not available to the others. For the same reason thread caches hold nothing larger
/// than a page.
const ALLOCATOR: (&str, &str) = (
    "MALLOC_CONF",
    "narenas:2,background_thread:true,dirty_decay_ms:250,muzzy_decay_ms:0,tcache_max:4096",
);

/// Starts the engine. Its end is seen by reaping, so the handle is not kept.
pub fn spawn(config: &Files, link: OwnedFd) -> std::io::Result<Pid> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("kvcachepool-sidecar")
        .arg(SUBCOMMAND)
        .stdin(Stdio::from(link))
        .process_group(0);
    if std::env::var_os(ALLOCATOR.0).is_none() {
        command.env(ALLOCATOR.0, ALLOCATOR.1);
    }
    if let Some(pod) = &config.pod {
        command.arg("--config").arg(pod);
    }
    if let Some(pool) = &config.pool {
        command.arg("--pool-config").arg(pool);
    }
    let parent = rustix::process::getpid();
    // SAFETY: only system calls run between fork and exec; nothing is allocated and no lock is taken.
    unsafe {
        command.pre_exec(move || {
            // The mask of blocked signals is inherited; the engine handles its own.
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            if libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the line above.
            if getppid() != Some(parent) {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    let child = command.spawn()?;
    Pid::from_raw(child.id().cast_signed())
        .ok_or_else(|| std::io::Error::other("the kernel returned no process id"))
}

/// How an engine ended, for logs and status.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(EXIT_RESTART), _) => "restart requested".into(),
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown".into(),
    }
}
