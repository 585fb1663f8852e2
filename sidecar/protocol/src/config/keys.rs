//! The table of all keys: path, description, range, and whether a change needs a restart. Parsing, printing and comparing iterate over it.

use super::{Choice, Config, s3, units::*};
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

/// How a changed value takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// Takes effect immediately.
    Live,
    /// Takes effect immediately if the list had Redis servers before, still has servers, and `redis.auth` and `redis.ca` are unchanged.
    /// Otherwise like [`Reload::Restart`].
    Servers,
    /// Takes effect at the next start of the sidecar.
    Restart,
}

/// Keys whose values differ between two configs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Paths that take effect immediately.
    pub live: Vec<&'static str>,
    /// Paths that wait for a restart.
    pub restart: Vec<&'static str>,
}

/// One key of a config, with mutable access to its value.
pub(super) struct Key<'a> {
    pub path: &'static str,
    pub about: &'static str,
    pub reload: Reload,
    pub slot: Slot<'a>,
}

/// The value of a key and its range.
pub(super) enum Slot<'a> {
    Size(&'a mut ByteSize, RangeInclusive<u64>),
    Time(&'a mut Duration, RangeInclusive<u64>),
    Share(&'a mut Percent, RangeInclusive<u8>),
    Count(&'a mut u32, RangeInclusive<u32>),
    Number(&'a mut u64, RangeInclusive<u64>),
    Flag(&'a mut bool),
    Name(&'a mut String),
    /// Text that must pass a check. The check returns what to write instead.
    Text(&'a mut String, fn(&str) -> Result<(), &'static str>),
    Listen(&'a mut SocketAddr),
    Socket(&'a mut PathBuf),
    File(&'a mut Option<PathBuf>),
    Urls(&'a mut Vec<String>),
    Choice(&'a mut dyn Choice),
}

/// Longest path of a Unix socket: `sun_path` without its terminator.
const SOCKET_PATH_BYTES: usize = 107;
/// Maximum number of URLs in a list.
const URLS: usize = 256;
const URL_BYTES: usize = 1024;
/// Longest name of a Kubernetes object.
const NAME_BYTES: usize = 253;

const KI: u64 = 1 << 10;
const MI: u64 = 1 << 20;
const TI: u64 = 1 << 40;
const HOUR_MS: u64 = 3_600_000;

/// The smallest and the largest value of a key: a number, bytes, milliseconds or percent. `None`: an unknown key, or one without a range.
pub fn range(path: &str) -> Option<RangeInclusive<u64>> {
    let mut config = Config::default();
    let key = keys(&mut config).into_iter().find(|key| key.path == path)?;
    match key.slot {
        Slot::Size(_, range) | Slot::Time(_, range) | Slot::Number(_, range) => Some(range),
        Slot::Count(_, range) => Some(u64::from(*range.start())..=u64::from(*range.end())),
        Slot::Share(_, range) => Some(u64::from(*range.start())..=u64::from(*range.end())),
        _ => None,
    }
}

/// All keys in the order of the printed file. Keys of one section are adjacent.
pub(super) fn keys(c: &mut Config) -> Vec<Key<'_>> {
    use Reload::{Live, Restart, Servers};
    let key = |path, reload, slot, about| Key {
        path,
        about,
        reload,
        slot,
    };
    vec![
        key(
            "socket",
            Restart,
            Slot::Socket(&mut c.socket),
            "Unix socket for vLLM's connector. An absolute path of at most 107 bytes. The lock file and the exported connector are in \
             the same folder.",
        ),
        key(
            "managed",
            Live,
            Slot::Flag(&mut c.managed),
            "Set by the operator. Unknown keys become warnings, so that an older sidecar starts under a newer operator.",
        ),
        key(
            "admin.listen",
            Restart,
            Slot::Listen(&mut c.admin.listen),
            "Address and port of /healthz, /readyz, /metrics and /v1/status.",
        ),
        key(
            "admin.tokenFile",
            Live,
            Slot::File(&mut c.admin.token_file),
            "File with the bearer token for /v1/config, /v1/objects and the ADMIN operations on the socket that need a token. Empty: \
             these are off.",
        ),
        key(
            "pool.name",
            Restart,
            Slot::Name(&mut c.pool.name),
            "Name of the pool in status and logs.",
        ),
        key(
            "pool.namespace",
            Restart,
            Slot::Name(&mut c.pool.namespace),
            "Kubernetes namespace of the pool.",
        ),
        key(
            "pool.generation",
            Live,
            Slot::Number(&mut c.pool.generation, 0..=i64::MAX as u64),
            "Generation of the pool's spec. Of two config files, the one with the higher number is in effect.",
        ),
        key(
            "cache.chunkTokens",
            Restart,
            Slot::Count(&mut c.cache.chunk_tokens, 1..=65_536),
            "Minimum tokens per chunk, rounded up to whole blocks of the engine. Another value is another domain: the cache starts \
             cold.",
        ),
        key(
            "cache.save",
            Live,
            Slot::Choice(&mut c.cache.save),
            "What is stored of a request: its prompt, or also the generated tokens.",
        ),
        key(
            "cache.minLoadTokens",
            Live,
            Slot::Count(&mut c.cache.min_load_tokens, 0..=1_000_000_000),
            "Shorter hits are recomputed. Lower tiers are not used if they add fewer tokens than this to the hit in memory.",
        ),
        key(
            "cache.loadTimeout",
            Live,
            Slot::Time(&mut c.cache.load_timeout, 1..=HOUR_MS),
            "Longest wait of a request for a load. Then vLLM computes the prompt.",
        ),
        key(
            "cache.loadOrRecompute",
            Live,
            Slot::Choice(&mut c.cache.load_or_recompute),
            "Auto: chunks in lower tiers are loaded if that is expected to be faster than computing them. AlwaysLoad: always.",
        ),
        key(
            "memory.size",
            Restart,
            Slot::Size(&mut c.memory.size, 64 * MI..=16 * TI),
            "Size of the memory tier. The container's memory limit must be larger.",
        ),
        key(
            "memory.hugePages",
            Restart,
            Slot::Choice(&mut c.memory.huge_pages),
            "Page size of the memory tier. The node must have reserved the pages.",
        ),
        key(
            "memory.evictionPolicy",
            Restart,
            Slot::Choice(&mut c.memory.eviction_policy),
            "Order of eviction. S3FIFO uses three FIFO queues and resists scans.",
        ),
        key(
            "memory.verify",
            Live,
            Slot::Choice(&mut c.memory.verify),
            "When the bytes of a hit are compared with their digest. Always: before the answer, by a check that began after the \
             request arrived. Background: beside the answer, if the last check is older than verifyAge; changed bytes may be served \
             until then.",
        ),
        key(
            "memory.verifyAge",
            Live,
            Slot::Time(&mut c.memory.verify_age, 0..=720 * HOUR_MS),
            "With Background: age of the last check after which a hit is checked again.",
        ),
        key(
            "memory.verifyThreads",
            Restart,
            Slot::Count(&mut c.memory.verify_threads, 1..=64),
            "Threads that compute and check digests.",
        ),
        key(
            "memory.verifyBytesPerSecond",
            Restart,
            Slot::Size(&mut c.memory.verify_bytes_per_second, MI..=TI),
            "Limit for background checks, all together.",
        ),
        key(
            "memory.populateThreads",
            Restart,
            Slot::Count(&mut c.memory.populate_threads, 1..=64),
            "Threads that populate the memory tier's pages before use.",
        ),
        key(
            "disk.path",
            Restart,
            Slot::File(&mut c.disk.path),
            "Folder that only this tier uses. Empty: no disk tier.",
        ),
        key(
            "disk.size",
            Restart,
            Slot::Size(&mut c.disk.size, 64 * MI..=16 * TI),
            "Bytes of the tier's files with objects. The least recently used objects are evicted.",
        ),
        key(
            "redis.urls",
            Servers,
            Slot::Urls(&mut c.redis.urls),
            "At most 256 URLs of at most 1024 bytes: independent servers, or one redis-sentinel:// or redis-cluster://. Empty: no \
             Redis tier.",
        ),
        key(
            "redis.auth",
            Restart,
            Slot::File(&mut c.redis.auth),
            "Folder with the files password and, for an ACL user, username. Read again for every new connection. It replaces \
             credentials in the URLs.",
        ),
        key(
            "redis.ca",
            Restart,
            Slot::File(&mut c.redis.ca),
            "PEM file with the trusted authorities for TLS. Empty: those of the system. A changed file is used for new connections.",
        ),
        key(
            "redis.ttl",
            Live,
            Slot::Time(&mut c.redis.ttl, 0..=8_784 * HOUR_MS),
            "Objects expire after this time without a read or a write. 0 disables expiry.",
        ),
        key(
            "write.policy",
            Live,
            Slot::Choice(&mut c.write.policy),
            "When chunks are written to lower tiers: as soon as they are readable, after backAfter (earlier if much waits), or never.",
        ),
        key(
            "write.backAfter",
            Live,
            Slot::Time(&mut c.write.back_after, 0..=24 * HOUR_MS),
            "With WriteBack: wait before a chunk is written.",
        ),
        key(
            "write.admission",
            Live,
            Slot::Choice(&mut c.write.admission),
            "Which chunks are written to lower tiers: all, or those that are used a second time.",
        ),
        key(
            "write.codec",
            Restart,
            Slot::Choice(&mut c.write.codec),
            "How chunks are packed in lower tiers. None and Lossless read each other's objects. Each lossy codec is its own domain.",
        ),
        key(
            "s3.bucket",
            Restart,
            Slot::Text(&mut c.s3.bucket, s3::bucket),
            "Name of the bucket: 3 to 63 lower-case letters, digits, - and .. Empty: no S3 tier.",
        ),
        key(
            "s3.region",
            Restart,
            Slot::Text(&mut c.s3.region, s3::region),
            "Region of the bucket. Empty: the region of the environment, or us-east-1 with an endpoint.",
        ),
        key(
            "s3.endpoint",
            Restart,
            Slot::Text(&mut c.s3.endpoint, s3::endpoint),
            "http(s)://host[:port] of a server other than AWS, without path, user or password.",
        ),
        key(
            "s3.prefix",
            Restart,
            Slot::Text(&mut c.s3.prefix, s3::prefix),
            "Prefix of all object names: at most 512 letters, digits, -, ., _, =, and single slashes between them.",
        ),
        key(
            "s3.addressingStyle",
            Restart,
            Slot::Choice(&mut c.s3.addressing_style),
            "Where the bucket's name is in URLs: in the path, in the host, or chosen by endpoint.",
        ),
        key(
            "s3.accelerate",
            Restart,
            Slot::Flag(&mut c.s3.accelerate),
            "Use AWS Transfer Acceleration. Not together with endpoint.",
        ),
        key(
            "s3.auth",
            Restart,
            Slot::File(&mut c.s3.auth),
            "Folder with the files AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, optionally, AWS_SESSION_TOKEN. Read again when they \
             change. Empty: the AWS default chain.",
        ),
        key(
            "s3.ca",
            Restart,
            Slot::File(&mut c.s3.ca),
            "PEM file with the trusted authorities. Empty: those of the system. A changed file needs a restart.",
        ),
        key(
            "s3.checksums",
            Restart,
            Slot::Choice(&mut c.s3.checksums),
            "When S3's own checksums are sent and checked. Older compatible servers refuse them. The digests of objects are compared \
             in any case.",
        ),
        key(
            "s3.httpVersion",
            Restart,
            Slot::Choice(&mut c.s3.http_version),
            "Auto is HTTP/1.1, with one connection per transfer. Http2 needs TLS, and falls back to HTTP/1.1 if the server does not \
             offer it.",
        ),
        key(
            "s3.maxConcurrency",
            Restart,
            Slot::Count(&mut c.s3.max_concurrency, 1..=4_096),
            "Requests that run at once, of every kind.",
        ),
        key(
            "s3.capacity",
            Restart,
            Slot::Size(&mut c.s3.capacity, 0..=1024 * TI),
            "Bytes below the prefix, including those of other sidecars. The oldest objects are removed. 0: no limit.",
        ),
        key(
            "s3.evictAtPercent",
            Restart,
            Slot::Count(&mut c.s3.evict_at_percent, 1..=100),
            "Percent of the capacity at which removal begins.",
        ),
        key(
            "s3.evictToPercent",
            Restart,
            Slot::Count(&mut c.s3.evict_to_percent, 1..=100),
            "Percent of the capacity at which removal ends. At most evictAtPercent.",
        ),
        key(
            "s3.expireAfter",
            Restart,
            Slot::Time(&mut c.s3.expire_after, 0..=87_600 * HOUR_MS),
            "Objects are removed this long after they were written. 0 disables expiry.",
        ),
        key(
            "pacing.readBytesPerSecond",
            Live,
            Slot::Size(&mut c.pacing.read_bytes_per_second, 0..=TI),
            "Limit for bytes from all lower tiers into memory. 0: no limit.",
        ),
        key(
            "pacing.writeBytesPerSecond",
            Live,
            Slot::Size(&mut c.pacing.write_bytes_per_second, 0..=TI),
            "Limit for bytes from memory to all lower tiers and for background checks. 0: no limit.",
        ),
        key(
            "gpu.contextMemory",
            Restart,
            Slot::Size(&mut c.gpu.context_memory, 0..=TI),
            "Container memory that is reserved for CUDA contexts of the sidecar. 0 if it has no GPU.",
        ),
        key(
            "transfer.mode",
            Live,
            Slot::Choice(&mut c.transfer.mode),
            "Who copies between vLLM's KV blocks and the memory tier: Engine (vLLM's worker) or CudaWindow (the sidecar, through a \
             window). Auto is Engine. Read when a worker registers.",
        ),
        key(
            "transfer.windowSize",
            Live,
            Slot::Size(&mut c.transfer.window_size, 16 * MI..=16 * 1024 * MI),
            "Size of each worker's window.",
        ),
        key(
            "limits.connections",
            Live,
            Slot::Count(&mut c.limits.connections, 4..=65_536),
            "Open connections on the socket.",
        ),
        key(
            "limits.sessions",
            Live,
            Slot::Count(&mut c.limits.sessions, 4..=65_536),
            "Sessions: one for each role of vLLM's processes.",
        ),
        key(
            "limits.requests",
            Live,
            Slot::Count(&mut c.limits.requests, 1..=1_000_000),
            "Requests with an open lookup (PROBE), pin or lease, per scheduler.",
        ),
        key(
            "limits.pinnedShare",
            Live,
            Slot::Share(&mut c.limits.pinned_share, 1..=90),
            "Share of the memory tier that soft pins may hold. Beyond it the oldest pin ends.",
        ),
        key(
            "limits.grantedBytes",
            Live,
            Slot::Size(&mut c.limits.granted_bytes, MI..=16 * TI),
            "Bytes that are granted for writing and not yet committed, all workers together.",
        ),
        key(
            "limits.indexEntries",
            Restart,
            Slot::Count(&mut c.limits.index_entries, 256..=16_777_216),
            "Chunks that the index can hold. Each takes 1Ki of the slot table once used.",
        ),
        key(
            "limits.frameBytes",
            Live,
            Slot::Size(&mut c.limits.frame_bytes, 64 * KI..=8 * MI),
            "Longest body of a frame.",
        ),
        key(
            "limits.sendBytes",
            Live,
            Slot::Size(&mut c.limits.send_bytes, MI..=1024 * MI),
            "Replies that may wait for one slow reader. Beyond it the connection is closed.",
        ),
        key(
            "limits.helloTimeout",
            Live,
            Slot::Time(&mut c.limits.hello_timeout, 100..=HOUR_MS),
            "A connection without HELLO is closed after this time.",
        ),
        key(
            "limits.events",
            Restart,
            Slot::Count(&mut c.limits.events, 16..=1_048_576),
            "Events that are kept for EVENTS. A reader that is further behind learns that it lost some.",
        ),
        key(
            "limits.tierLookups",
            Live,
            Slot::Count(&mut c.limits.tiers.lookups, 1..=4_096),
            "Per lower tier: lookups at once.",
        ),
        key(
            "limits.tierFetches",
            Live,
            Slot::Count(&mut c.limits.tiers.fetches, 1..=64),
            "Per lower tier: chunks that are fetched at once.",
        ),
        key(
            "limits.tierFetchBytes",
            Live,
            Slot::Size(&mut c.limits.tiers.fetch_bytes, MI..=256 * MI),
            "Per lower tier: bytes of those, or a quarter of grantedBytes if that is less. One chunk is always allowed.",
        ),
        key(
            "limits.tierFetchQueue",
            Live,
            Slot::Count(&mut c.limits.tiers.fetch_queue, 1..=1_000_000),
            "Per lower tier: chunks that wait to be fetched.",
        ),
        key(
            "limits.tierWrites",
            Live,
            Slot::Count(&mut c.limits.tiers.writes, 1..=64),
            "Per lower tier: chunks that are written at once.",
        ),
        key(
            "limits.tierWriteBytes",
            Live,
            Slot::Size(&mut c.limits.tiers.write_bytes, MI..=256 * MI),
            "Per lower tier: bytes of those, or a quarter of grantedBytes if that is less. One chunk is always allowed.",
        ),
        key(
            "limits.tierWriteQueueBytes",
            Live,
            Slot::Size(&mut c.limits.tiers.write_queue_bytes, MI..=16 * TI),
            "Per lower tier: bytes of chunks that wait to be written. Beyond it the oldest chunk is dropped. One chunk is always \
             allowed.",
        ),
        key(
            "limits.tierWriteQueueAge",
            Live,
            Slot::Time(&mut c.limits.tiers.write_queue_age, 100..=24 * HOUR_MS),
            "A chunk that could not be written for this time is dropped.",
        ),
        key(
            "log.level",
            Live,
            Slot::Choice(&mut c.log.level),
            "Minimum level of log lines.",
        ),
        key(
            "log.format",
            Restart,
            Slot::Choice(&mut c.log.format),
            "json: one JSON object per line. text: lines for people.",
        ),
    ]
}

impl Slot<'_> {
    /// The value as printed in a config file.
    pub fn text(&self) -> String {
        match self {
            Slot::Size(v, _) => v.to_string(),
            Slot::Time(v, _) => v.to_string(),
            Slot::Share(v, _) => v.to_string(),
            Slot::Count(v, _) => v.to_string(),
            Slot::Number(v, _) => v.to_string(),
            Slot::Flag(v) => v.to_string(),
            Slot::Name(v) | Slot::Text(v, _) => (*v).clone(),
            Slot::Listen(v) => v.to_string(),
            Slot::Socket(v) => v.display().to_string(),
            Slot::File(v) => v
                .as_ref()
                .map(|p| p.display().to_string())
                .unwrap_or_default(),
            // JSON is valid YAML.
            Slot::Urls(v) => serde_json::Value::from(v.as_slice()).to_string(),
            Slot::Choice(v) => v.name().to_string(),
        }
    }

    /// The value without secrets, for display.
    pub fn shown(&self) -> String {
        match self {
            Slot::Urls(v) => {
                let shown: Vec<String> = v.iter().map(|url| without_credentials(url)).collect();
                serde_json::Value::from(shown).to_string()
            }
            _ => self.text(),
        }
    }

    /// Parses and sets a value. The error says what to write instead.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let problem = |bad: BadUnit| bad.0.to_string();
        match self {
            Slot::Size(v, range) => {
                let size: ByteSize = text.parse().map_err(problem)?;
                **v = within(size, size.0, range, ByteSize)?;
            }
            Slot::Time(v, range) => {
                let time: Duration = text.parse().map_err(problem)?;
                **v = within(time, time.ms, range, Duration::from_ms)?;
            }
            Slot::Share(v, range) => {
                let share: Percent = text.parse().map_err(problem)?;
                **v = within(share, share.0, range, Percent)?;
            }
            Slot::Count(v, range) => **v = whole(text, range)?,
            Slot::Number(v, range) => **v = whole(text, range)?,
            Slot::Flag(v) => **v = text.parse().map_err(|_| "true or false".to_string())?,
            Slot::Name(v) => {
                let plain =
                    |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
                if text.len() > NAME_BYTES || !text.bytes().all(plain) {
                    return Err(format!(
                        "a Kubernetes name: lower-case letters, digits, - and ., at most {NAME_BYTES} of them"
                    ));
                }
                **v = text.to_string();
            }
            Slot::Text(v, rule) => {
                rule(text)?;
                **v = text.to_string();
            }
            Slot::Listen(v) => {
                **v = text.parse().map_err(|_| {
                    "an address with a port such as 0.0.0.0:9797 or [::]:9797".to_string()
                })?;
            }
            Slot::Socket(v) => {
                if !absolute(text) || text.len() > SOCKET_PATH_BYTES || text.ends_with('/') {
                    return Err(format!(
                        "an absolute path of a socket, at most {SOCKET_PATH_BYTES} bytes long"
                    ));
                }
                **v = PathBuf::from(text);
            }
            Slot::File(v) => {
                if !text.is_empty() && !absolute(text) {
                    return Err("an absolute path of a file, or \"\" for none".to_string());
                }
                **v = (!text.is_empty()).then(|| PathBuf::from(text));
            }
            Slot::Urls(v) => {
                let urls: Vec<String> = serde_json::from_str(text).unwrap_or_default();
                let is_url = |url: &String| url.len() <= URL_BYTES && url.contains("://");
                let none = text == "[]";
                if (urls.is_empty() && !none) || urls.len() > URLS || !urls.iter().all(is_url) {
                    return Err(format!(
                        "a list of at most {URLS} URLs such as [\"redis://host:6379\"], or [] for none"
                    ));
                }
                **v = urls;
            }
            Slot::Choice(v) => {
                if !v.choose(text) {
                    return Err(format!("one of {}", v.names().join(", ")));
                }
            }
        }
        Ok(())
    }

    /// The range, for the comment in the printed file. Empty if the value itself shows its form.
    pub fn range(&self) -> String {
        match self {
            Slot::Size(_, r) => format!("{} to {}", ByteSize(*r.start()), ByteSize(*r.end())),
            Slot::Time(_, r) => {
                let [least, most] = [r.start(), r.end()].map(|ms| Duration::from_ms(*ms));
                format!("{least} to {most}")
            }
            Slot::Share(_, r) => format!("{} to {}", Percent(*r.start()), Percent(*r.end())),
            Slot::Count(_, r) => format!("{} to {}", r.start(), r.end()),
            Slot::Number(_, r) => format!("{} to {}", r.start(), r.end()),
            Slot::Choice(v) => v.names().join(", "),
            Slot::Flag(_)
            | Slot::Name(_)
            | Slot::Text(..)
            | Slot::Listen(_)
            | Slot::Socket(_)
            | Slot::File(_)
            | Slot::Urls(_) => String::new(),
        }
    }
}

/// A URL without user and password.
fn without_credentials(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
            format!("{scheme}://{place}")
        }
        None => String::new(),
    }
}

fn absolute(text: &str) -> bool {
    text.starts_with('/') && !text.contains('\0')
}

fn whole<N: FromStr + PartialOrd + Copy + fmt::Display>(
    text: &str,
    range: &RangeInclusive<N>,
) -> Result<N, String> {
    let number = text
        .parse()
        .map_err(|_| format!("a whole number from {} to {}", range.start(), range.end()))?;
    within(number, number, range, |n| n)
}

fn within<V, N: PartialOrd + Copy, S: fmt::Display>(
    value: V,
    number: N,
    range: &RangeInclusive<N>,
    shown: impl Fn(N) -> S,
) -> Result<V, String> {
    if range.contains(&number) {
        return Ok(value);
    }
    Err(format!(
        "a value from {} to {}",
        shown(*range.start()),
        shown(*range.end())
    ))
}

impl Config {
    /// Whether a change to `newer` takes effect immediately for this kind of reload.
    fn takes(&self, reload: Reload, newer: &Config) -> bool {
        let (ours, theirs) = (&self.redis, &newer.redis);
        match reload {
            Reload::Live => true,
            Reload::Servers => {
                let both = !ours.urls.is_empty() && !theirs.urls.is_empty();
                both && (&ours.auth, &ours.ca) == (&theirs.auth, &theirs.ca)
            }
            Reload::Restart => false,
        }
    }

    /// The keys that differ in `newer`, by how they take effect.
    pub fn changes(&self, newer: &Config) -> Changes {
        let (mut a, mut b) = (self.clone(), newer.clone());
        let mut changes = Changes::default();
        for (old, new) in keys(&mut a).into_iter().zip(keys(&mut b)) {
            if old.slot.text() != new.slot.text() {
                match self.takes(old.reload, newer) {
                    true => changes.live.push(old.path),
                    false => changes.restart.push(old.path),
                }
            }
        }
        changes
    }

    /// The effective config of a sidecar with its pod's file (`self`) and its pool's: the one with the higher `pool.generation`, or the
    /// pod's if they are equal. Keys that the pod was created for always come from the pod's file: addresses, disk, and everything that
    /// determines its memory.
    pub fn or_newer(self, pool: Config) -> Config {
        if pool.pool.generation <= self.pool.generation {
            return self;
        }
        let mut newer = pool;
        newer.socket = self.socket;
        newer.admin.listen = self.admin.listen;
        newer.memory.size = self.memory.size;
        newer.memory.huge_pages = self.memory.huge_pages;
        newer.limits.index_entries = self.limits.index_entries;
        newer.disk = self.disk;
        newer.gpu = self.gpu;
        newer
    }

    /// This config with the values of `newer` that take effect immediately. It is in effect after a reload.
    pub fn with_live_from(&self, newer: &Config) -> Config {
        let (mut merged, mut from) = (self.clone(), newer.clone());
        for (mut old, new) in keys(&mut merged).into_iter().zip(keys(&mut from)) {
            if self.takes(old.reload, newer) {
                // A value of one config is within the range of the other.
                let _ = old.slot.set(&new.slot.text());
            }
        }
        merged
    }
}
