//! A memory limit of a test's own, where this machine lets us set one.

use crate::harness::wait_for;
use crate::testing::skipped;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

pub struct Cgroup {
    folder: PathBuf,
    /// File of the limit.
    limit: PathBuf,
}

impl Cgroup {
    /// `None` with the reason on standard error where no cgroup can be made (no root, read-only mount, no memory controller).
    pub fn with_limit(bytes: u64) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvcachepool-test-{}-{nth}", std::process::id());
        let places = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        for (mount, file) in places {
            let folder = Path::new(mount).join(&name);
            if std::fs::create_dir(&folder).is_err() {
                continue;
            }
            let limit = folder.join(file);
            let this = Self { folder, limit };
            if std::fs::write(&this.limit, bytes.to_string()).is_ok() {
                return Some(this);
            }
        }
        skipped("no cgroup with a memory limit can be made here");
        None
    }

    pub fn set_limit(&self, bytes: u64) {
        std::fs::write(&self.limit, bytes.to_string()).unwrap();
    }

    /// File that a process is moved into the group by.
    pub fn procs(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A group can be removed once the kernel has let go of its last process.
        wait_for("the end of the cgroup", || {
            std::fs::remove_dir(&self.folder).ok()
        });
    }
}
