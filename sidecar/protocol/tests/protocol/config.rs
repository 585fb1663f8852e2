//! The config file: what it takes, what it says about what it does not take, and what a reload changes.

use kvcachepool_protocol::config::*;
use kvcachepool_protocol::message::Save;
use proptest::prelude::*;

fn problems(text: &str) -> Vec<String> {
    let error = Config::parse(text, false).unwrap_err();
    error.problems.iter().map(ToString::to_string).collect()
}

#[test]
fn nothing_gives_the_defaults() {
    for text in ["", "{}", "memory:\n", "# a comment\n"] {
        let (config, unknown) = Config::parse(text, false).unwrap();
        assert_eq!(config, Config::default());
        assert!(unknown.is_empty());
    }
}

#[test]
fn the_printed_defaults_read_back_and_explain_every_key() {
    let text = Config::default_yaml();
    assert_eq!(Config::parse(&text, false).unwrap().0, Config::default());
    for (path, _) in Config::default().entries() {
        let name = path.rsplit('.').next().unwrap();
        let lines: Vec<_> = text.lines().collect();
        let at = lines
            .iter()
            .position(|l| l.trim_start().starts_with(&format!("{name}:")));
        let above = lines[at.unwrap() - 1].trim_start();
        assert!(above.starts_with("# "), "{path} has no comment");
    }
    assert!(text.contains("  size: 4Gi\n"), "{text}");
    assert!(text.contains("  evictionPolicy: S3FIFO\n"), "{text}");
    assert!(text.contains("  verifyAge: 1m\n"), "{text}");
}

/// Path, default, range and `reloads` of every key in `docs/reference/configuration.md`.
fn documented() -> Vec<[String; 4]> {
    let page = include_str!("../../../../docs/reference/configuration.md");
    let keys = page.split("\n## Keys\n").nth(1).unwrap();
    let (mut rows, mut section) = (Vec::new(), String::new());
    for line in keys.split("\n## ").next().unwrap().lines() {
        if let Some(name) = line.strip_prefix("### ") {
            section = match name {
                "Top level" => String::new(),
                name => format!("{name}."),
            };
        } else if line.starts_with("| `") {
            let cells: Vec<_> = line.split('|').map(|c| c.trim().replace('`', "")).collect();
            let path = format!("{section}{}", cells[1]);
            let reloads = cells[4].trim_start_matches('[').split(']').next();
            let [default, range] = [&cells[2], &cells[3]].map(String::clone);
            rows.push([path, default, range, reloads.unwrap().to_string()]);
        }
    }
    rows
}

#[test]
fn the_documentation_has_default_range_and_reload_of_every_key() {
    let yaml = Config::default_yaml();
    let comments = yaml
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("# "));
    let row = |((path, default), comment): ((&str, String), &str)| {
        let (rest, reloads) = match comment.strip_suffix(" Needs a restart.") {
            Some(rest) => (rest, "no"),
            None => match comment.rsplit_once(']') {
                Some((rest, why)) if why.ends_with(" need a restart.") => {
                    (&comment[..=rest.len()], "some")
                }
                _ if comment.ends_with(" need a restart.") => (comment, "some"),
                _ => (comment, "yes"),
            },
        };
        let range = rest
            .strip_suffix(']')
            .and_then(|rest| rest.rsplit_once(" ["));
        let range = range.map_or("", |(_, range)| range);
        [path, &default, range, reloads].map(str::to_string)
    };
    let entries = Config::default().entries();
    let known: Vec<_> = entries.into_iter().zip(comments).map(row).collect();
    assert_eq!(documented(), known);
}

#[test]
fn every_value_is_taken() {
    let text = r#"
socket: /run/pool/s.sock
managed: true
admin: {listen: "[::1]:1234", tokenFile: /var/token}
pool: {name: llama-70b, namespace: serving, generation: 9223372036854775807}
cache: {chunkTokens: 512, save: PromptAndDecode, skipLastTokens: 48, minLoadTokens: 0, loadTimeout: 250ms, loadOrRecompute: AlwaysLoad}
memory: {size: 64Gi, hugePages: 2Mi, evictionPolicy: LRU, verify: Always, verifyAge: 1h30m, verifyThreads: 4, verifyBytesPerSecond: 2Gi, populateThreads: 8}
redis: {urls: ["redis://a:6379", 'rediss://user:secret@[::1]:6380'], auth: /auth, ca: /ca.pem, ttl: 24h}
write: {policy: WriteBack, backAfter: 5s, admission: Reused}
pacing: {readBytesPerSecond: 2Gi, writeBytesPerSecond: 512Mi}
gpu: {contextMemory: 768Mi}
transfer: {mode: CudaWindow, windowSize: 64Mi}
limits: {connections: 10, sessions: 20, requests: 30, pinnedShare: 25%, grantedBytes: 512Mi, indexEntries: 1024, frameBytes: 1Mi, sendBytes: 2Mi, helloTimeout: 1s, events: 64, tierLookups: 1, tierFetches: 2, tierFetchBytes: 3Mi, tierFetchQueue: 4, tierWrites: 5, tierWriteBytes: 6Mi,
  tierWriteQueueBytes: 7Mi, tierWriteQueueAge: 8s}
log: {level: debug, format: text}
"#;
    let (c, _) = Config::parse(text, false).unwrap();
    assert_eq!(c.socket.to_str().unwrap(), "/run/pool/s.sock");
    assert_eq!(c.admin.listen.to_string(), "[::1]:1234");
    assert_eq!(
        c.admin.token_file.as_ref().unwrap().to_str().unwrap(),
        "/var/token"
    );
    assert_eq!(
        (c.pool.name.as_str(), c.pool.namespace.as_str()),
        ("llama-70b", "serving")
    );
    assert_eq!(c.pool.generation, i64::MAX as u64);
    assert_eq!(
        (c.cache.chunk_tokens, c.cache.save),
        (512, Save::PromptAndDecode)
    );
    assert_eq!(c.cache.skip_last_tokens, 48);
    assert_eq!((c.cache.min_load_tokens, c.cache.load_timeout.ms), (0, 250));
    assert_eq!(c.cache.load_or_recompute, LoadOrRecompute::AlwaysLoad);
    assert_eq!(c.memory.size, ByteSize(64 << 30));
    assert_eq!(c.memory.huge_pages, HugePages::Size2Mi);
    assert_eq!(c.memory.eviction_policy, EvictionPolicy::Lru);
    assert_eq!(
        (c.memory.verify, c.memory.verify_age.ms),
        (Verify::Always, 5_400_000)
    );
    assert_eq!((c.memory.verify_threads, c.memory.populate_threads), (4, 8));
    assert_eq!(c.memory.verify_bytes_per_second.0, 2 << 30);
    assert_eq!(
        c.redis.urls,
        ["redis://a:6379", "rediss://user:secret@[::1]:6380"]
    );
    let files = (&c.redis.auth, &c.redis.ca);
    assert_eq!(files, (&Some("/auth".into()), &Some("/ca.pem".into())));
    assert_eq!(c.redis.ttl.ms, 86_400_000);
    let paces = (
        &c.pacing.read_bytes_per_second,
        &c.pacing.write_bytes_per_second,
    );
    assert_eq!(paces, (&ByteSize(2 << 30), &ByteSize(512 << 20)));
    assert_eq!(c.gpu.context_memory, ByteSize(768 << 20));
    let transfer = (c.transfer.mode, c.transfer.window_size);
    assert_eq!(transfer, (TransferMode::CudaWindow, ByteSize(64 << 20)));
    assert_eq!(
        (c.write.policy, c.write.admission),
        (WritePolicy::WriteBack, Admission::Reused)
    );
    assert_eq!(
        (c.limits.connections, c.limits.sessions, c.limits.requests),
        (10, 20, 30)
    );
    assert_eq!(
        (c.limits.pinned_share, c.limits.granted_bytes),
        (Percent(25), ByteSize(512 << 20))
    );
    assert_eq!(
        (c.limits.index_entries, c.limits.frame_bytes),
        (1024, ByteSize(1 << 20))
    );
    assert_eq!(
        (c.limits.send_bytes, c.limits.hello_timeout.ms),
        (ByteSize(2 << 20), 1000)
    );
    assert_eq!(c.write.back_after.ms, 5_000);
    let tiers = TierLimits {
        lookups: 1,
        fetches: 2,
        fetch_bytes: ByteSize(3 << 20),
        fetch_queue: 4,
        writes: 5,
        write_bytes: ByteSize(6 << 20),
        write_queue_bytes: ByteSize(7 << 20),
        write_queue_age: Duration::from_ms(8_000),
    };
    assert_eq!(c.limits.tiers, tiers);
    assert_eq!(
        (c.limits.events, c.log.level, c.log.format),
        (64, LogLevel::Debug, LogFormat::Text)
    );
    assert!(c.managed);
    assert_eq!(Config::parse(&c.to_yaml(), false).unwrap().0, c);
    assert_eq!(c.settings().load_timeout_ms, 250);
}

#[test]
fn urls_are_shown_without_what_may_be_secret() {
    let text = "redis: {urls: ['redis://u:secret@a:1/2', 'redis+unix:///s.sock']}";
    let (c, _) = Config::parse(text, false).unwrap();
    let entries = c.entries();
    let urls = entries.iter().find(|(path, _)| *path == "redis.urls");
    assert_eq!(
        urls.unwrap().1,
        "[\"redis://a:1/2\",\"redis+unix:///s.sock\"]"
    );
    assert!(!format!("{c:?}").contains("secret"));
    assert!(c.to_yaml().contains("secret") && !c.shown_yaml().contains("secret"));
    let whole = problems("redis: 'redis://u:secret@a:1'").concat();
    assert!(!whole.contains("secret"), "{whole}");
    for wrong in [
        "'redis://u:secret@a:1'",
        "[secret]",
        "[1]",
        "{a: secret}",
        "''",
    ] {
        let found = problems(&format!("redis: {{urls: {wrong}}}")).concat();
        assert!(found.contains("[\"redis://host:6379\"]"), "{found}");
        assert!(!found.contains("secret"), "{found}");
    }
    for none in ["[]", "~"] {
        let (c, _) = Config::parse(&format!("redis: {{urls: {none}}}"), false).unwrap();
        assert!(c.redis.urls.is_empty());
    }
}

#[test]
fn all_problems_are_named_at_once_with_what_to_write() {
    let found = problems(
        "memory: {size: 64GB, verify: Never, verifyThreads: 0}\nlog: loud\ncache: {loadTimeout: 2, chunkTokens: -1}\n",
    );
    assert_eq!(
        found,
        [
            "log: found \"loud\"; write keys of this section below it, indented",
            "cache.chunkTokens: found -1; write a whole number from 1 to 65536",
            "cache.loadTimeout: found 2; write a time such as 250ms, 2s, 10m or 24h",
            "memory.size: found \"64GB\"; write a size such as 64Gi, 512Mi or 65536 (bytes)",
            "memory.verify: found \"Never\"; write one of Always, Background",
            "memory.verifyThreads: found 0; write a value from 1 to 64",
        ]
    );
}

#[test]
fn odd_values_are_refused_by_name() {
    for (text, start) in [
        (
            "socket: relative.sock",
            "socket: found \"relative.sock\"; write an absolute path",
        ),
        ("socket: []", "socket: found a list; write an absolute path"),
        (
            "admin: {listen: 9797}",
            "admin.listen: found 9797; write an address with a port",
        ),
        (
            "admin: {tokenFile: x}",
            "admin.tokenFile: found \"x\"; write an absolute path",
        ),
        (
            "pool: {name: Llama}",
            "pool.name: found \"Llama\"; write a Kubernetes name",
        ),
        (
            "pool: {name: 5}",
            "pool.name: found 5; write a text, in quotes",
        ),
        (
            "pool: {generation: -1}",
            "pool.generation: found -1; write a whole number from 0",
        ),
        (
            "memory: {hugePages: ~}",
            "memory.hugePages: found nothing; write one of None, 2Mi, 1Gi",
        ),
        (
            "memory: {size: 1Mi}",
            "memory.size: found \"1Mi\"; write a value from 64Mi to 16Ti",
        ),
        (
            "limits: {pinnedShare: 0.5}",
            "limits.pinnedShare: found 0.5; write a share such as 50%",
        ),
        (
            "managed: maybe",
            "managed: found \"maybe\"; write true or false",
        ),
        ("[1, 2]", "document: found a list; write keys"),
        ("a: [", "not a YAML document"),
        ("memory: {size: 1Gi, size: 2Gi}", "not a YAML document"),
    ] {
        let found = problems(text);
        assert!(found[0].starts_with(start), "{text}: {found:?}");
    }
    assert!(problems(&"#".repeat(300_000))[0].contains("too many for a config"));
    let long = format!("socket: /{}", "x".repeat(107));
    assert!(problems(&long)[0].ends_with("at most 107 bytes long"));
}

#[test]
fn aliases_do_not_swell_a_file() {
    for (named, aliases, right) in [
        (format!("[{}]", "0,".repeat(1000)), 1, true),
        (format!("[{}]", "0,".repeat(1000)), 5000, false),
        (format!("'{}'", "A".repeat(10_000)), 1, true),
        (format!("'{}'", "A".repeat(10_000)), 100, false),
        (format!("!{} 0", "A".repeat(10_000)), 100, false),
    ] {
        let aliases = "*a,".repeat(aliases);
        let text = format!("x: &a {named}\ny: [{aliases}]\n");
        match Config::parse(&text, true) {
            Ok((_, unknown)) => assert!(right && unknown.len() == 2),
            Err(e) => assert!(!right && e.to_string().contains("aliases"), "{e}"),
        }
    }
    for twice in ["a: 1\na: 1", "1: a\n1: a", "~: a\n~: b"] {
        let error = Config::parse(twice, true).unwrap_err().to_string();
        assert!(error.contains("the same key twice"), "{error}");
    }
}

#[test]
fn unknown_keys_are_errors_by_hand_and_warnings_when_managed() {
    let text = "memory: {szie: 8Gi, size: 8Gi}\nfuture: {depth: 1}\n";
    assert_eq!(
        problems(text),
        [
            "future: unknown key; `kvcachepool-sidecar config --defaults` lists all keys",
            "memory.szie: unknown key; did you mean memory.size?",
        ]
    );
    let (config, unknown) = Config::parse(text, true).unwrap();
    assert_eq!(config.memory.size, ByteSize(8 << 30));
    assert_eq!(unknown.len(), 2);
    let own = format!("managed: true\n{text}");
    assert_eq!(Config::parse(&own, false).unwrap().1, unknown);
    assert!(Config::parse("managed: true\nmemory: {size: x}", true).is_err());
}

#[test]
fn a_reload_takes_what_is_live_and_names_the_rest() {
    let old = Config::default();
    let text = "log: {level: warn}\nmemory: {verify: Background, evictionPolicy: LRU}\ncache: {loadTimeout: 1s}";
    let (new, _) = Config::parse(text, false).unwrap();
    let changes = old.changes(&new);
    assert_eq!(
        changes.live,
        ["cache.loadTimeout", "memory.verify", "log.level"]
    );
    assert_eq!(changes.restart, ["memory.evictionPolicy"]);
    let running = old.with_live_from(&new);
    assert_eq!(running.memory.eviction_policy, old.memory.eviction_policy);
    assert_eq!(running.memory.verify, Verify::Background);
    assert_eq!(running.changes(&new).live, [""; 0]);
    assert_eq!(old.changes(&old), Changes::default());
}

#[test]
fn the_size_of_the_memory_is_live_but_for_huge_pages_and_windows() {
    let of = |text: &str| Config::parse(text, false).unwrap().0;
    let waiting = |more: &str| {
        let old = of(&format!("memory: {{size: 4Gi{more}"));
        let new = of(&format!("memory: {{size: 8Gi{more}"));
        old.changes(&new).restart
    };
    assert_eq!(waiting("}"), [""; 0]);
    assert_eq!(waiting(", hugePages: 2Mi}"), ["memory.size"]);
    assert_eq!(waiting("}\ntransfer: {mode: CudaWindow}"), ["memory.size"]);
}

#[test]
fn other_redis_servers_are_taken_at_once_but_not_the_first_the_last_or_with_other_files() {
    let redis = |text: &str| {
        let (config, _) = Config::parse(&format!("redis: {{{text}}}"), false).unwrap();
        config
    };
    let one = redis("urls: ['redis://a']");
    let three = redis("urls: ['redis://a', 'redis://b', 'redis://c'], ttl: 1h");
    let changes = one.changes(&three);
    assert_eq!(changes.live, ["redis.urls", "redis.ttl"]);
    assert!(changes.restart.is_empty());
    assert_eq!(one.with_live_from(&three), three);
    let with_file = |file: &str| redis(&format!("urls: ['redis://b'], {file}"));
    let files = ["auth: /auth", "ca: /ca.pem", "clientCertificate: /client"].map(with_file);
    let [auth, ca, client] = &files;
    for (old, new) in [
        (&Config::default(), &one),
        (&one, &Config::default()),
        (&one, auth),
        (&one, ca),
        (&one, client),
    ] {
        let changes = old.changes(new);
        assert_eq!(changes.live, [""; 0]);
        assert!(changes.restart.contains(&"redis.urls"), "{changes:?}");
        assert_eq!(old.with_live_from(new), *old);
    }
}

#[test]
fn the_newer_of_two_files_counts_but_what_the_pod_was_made_for_stays_the_pods() {
    let pod = "socket: /pod/s.sock\nadmin: {listen: \"[::]:1\"}\npool: {generation: 3}\nmemory: {size: 8Gi, hugePages: 2Mi}\n\
               gpu: {contextMemory: 512Mi}\nlimits: {indexEntries: 300}";
    let pod = Config::parse(pod, false).unwrap().0;
    let pool = |generation| {
        let text = format!(
            "pool: {{generation: {generation}}}\nmemory: {{size: 64Gi, evictionPolicy: LRU}}\n\
             disk: {{path: /disk, size: 9Gi}}\nlog: {{level: warn}}"
        );
        Config::parse(&text, false).unwrap().0
    };
    for generation in [0, 2, 3] {
        assert_eq!(pod.clone().or_newer(pool(generation)), pod);
    }
    let newer = pod.clone().or_newer(pool(4));
    let mut wanted = pod.clone();
    wanted.pool.generation = 4;
    wanted.memory.eviction_policy = EvictionPolicy::Lru;
    wanted.log.level = LogLevel::Warn;
    assert_eq!(newer, wanted);
    assert_eq!(newer.container_memory_bytes(), pod.container_memory_bytes());
}

#[test]
fn what_needs_more_memory_than_the_pod_has_waits_for_a_new_pod() {
    let of = |text: &str| Config::parse(text, false).unwrap().0;
    let redis = "redis: {urls: ['redis://a'], ttl: 1h}";
    let s3 = "s3: {bucket: first, maxConcurrency: 64}";
    let packed = format!("{redis}\nwrite: {{codec: FP8}}");
    for (pod, pool, wanted) in [
        (redis, packed.as_str(), redis),
        ("", redis, ""),
        ("", s3, ""),
        ("", "transfer: {mode: CudaWindow}", ""),
        (
            s3,
            "s3: {bucket: second, maxConcurrency: 128}",
            "s3: {bucket: second, maxConcurrency: 64}",
        ),
        (
            "write: {codec: FP8}",
            "write: {codec: INT8}",
            "write: {codec: INT8}",
        ),
        (redis, s3, s3),
        (redis, "", ""),
    ] {
        let live = "\nlog: {level: warn}\npool: {generation: 4}";
        let pod = of(pod);
        let newer = pod.clone().or_newer(of(&format!("{pool}{live}")));
        assert_eq!(newer, of(&format!("{wanted}{live}")), "{pool}");
        let needed = newer.container_memory_bytes();
        assert!(needed <= pod.container_memory_bytes(), "{pool}: {needed}");
    }
}

fn sized(bytes: u64, pages: HugePages, entries: u32) -> Config {
    let mut config = Config::default();
    config.memory.size = ByteSize(bytes);
    config.memory.huge_pages = pages;
    config.limits.index_entries = entries;
    config
}

#[test]
fn a_container_needs_its_arena_and_what_stands_beside_it() {
    const GIB: u64 = 1 << 30;
    let needs = |bytes, entries| sized(bytes, HugePages::None, entries).container_memory_bytes();
    assert_eq!(
        needs(16 * GIB, 65_536),
        (16 * GIB) + (353 << 20),
        "the example of docs/internals/architecture.md, its header page rounded up"
    );
    assert_eq!(
        needs(512 * GIB, 1 << 16) - needs(256 * GIB, 1 << 16),
        256 * GIB + 256 * GIB / 128 + 256 * GIB / (64 << 10) * 128,
        "32 bytes a page, 64 a row in the table and 64 in its copy"
    );
    assert_eq!(
        needs(512 * GIB, 1 << 20) - needs(512 * GIB, 1 << 19),
        (1 << 19) * (1024 + CHUNK_BYTES),
        "a record and an entry each"
    );
}

#[test]
fn a_tier_below_memory_needs_memory_of_its_own() {
    const GIB: u64 = 1 << 30;
    let plain = Config::default();
    let needs = |config: &Config| config.container_memory_bytes() - plain.container_memory_bytes();
    let with_disk = |bytes| {
        let mut config = plain.clone();
        config.disk.path = Some("/disk".into());
        config.disk.size = ByteSize(bytes);
        config
    };
    let (small, large) = (with_disk(GIB), with_disk(512 * GIB));
    // Conversion, which all tiers share, and the tier's own.
    assert_eq!(needs(&small), (256 << 20) + (32 << 20) + 65_536 * 256);
    assert_eq!(needs(&large), (256 << 20) + (32 << 20) + 512 * 1024 * 256);
    let mut bucket = plain.clone();
    bucket.s3.bucket = "kv".into();
    assert_eq!(needs(&bucket), (256 << 20) + (32 << 20));
    bucket.redis.urls = vec!["redis://cache:6379".into()];
    assert_eq!(needs(&bucket), (256 << 20) + (64 << 20));

    assert_eq!(large.disk_volume_bytes(), (512 + 4 + 1) * GIB);
}

#[test]
fn an_arena_of_huge_pages_is_asked_for_apart() {
    let base = sized(16 << 30, HugePages::None, 65_536);
    let huge = sized(16 << 30, HugePages::Size2Mi, 65_536);
    assert_eq!(base.container_huge_page_bytes(), 0);
    assert_eq!(huge.container_huge_page_bytes(), 16 << 30);
    assert!(huge.container_memory_bytes() < 1 << 30);
}

proptest! {
    #[test]
    fn more_cache_never_needs_less_memory(a in (64u64 << 20)..=(16 << 40), b in (64u64 << 20)..=(16 << 40)) {
        let [a, b] = [a.min(b), a.max(b)].map(|n| sized(n, HugePages::None, 65_536).container_memory_bytes());
        prop_assert!(a <= b);
        prop_assert!(b % (1 << 20) == 0);
    }

    #[test]
    fn any_text_gives_a_config_or_problems(text in "\\PC{0,200}") {
        let _ = Config::parse(&text, false);
        let _ = text.parse::<ByteSize>();
        let _ = text.parse::<Duration>();
        let _ = text.parse::<Percent>();
    }

    #[test]
    fn any_prefix_of_a_file_gives_a_config_or_problems(cut in 0usize..6000) {
        let text = Config::default_yaml();
        let cut = cut.min(text.len());
        if text.is_char_boundary(cut) {
            let _ = Config::parse(&text[..cut], false);
        }
    }

    #[test]
    fn values_with_units_print_and_read_back(n: u64, small in 0u8..=100) {
        prop_assert_eq!(ByteSize(n).to_string().parse::<ByteSize>().unwrap(), ByteSize(n));
        let time = Duration::from_ms(n);
        prop_assert_eq!(time.to_string().parse::<Duration>().unwrap(), time);
        prop_assert_eq!(Percent(small).to_string().parse::<Percent>().unwrap(), Percent(small));
        prop_assert!(Percent(small).of(n) <= n);
    }

    #[test]
    fn any_config_in_range_prints_and_reads_back(
        size in (64u64 << 20)..=(16 << 40), timeout in 1u64..=3_600_000, name in "[a-z0-9.-]{0,30}", quoted in "/[ -~]{1,40}x",
        generation in 0..=i64::MAX as u64,
    ) {
        let mut config = Config::default();
        config.memory.size = ByteSize(size);
        config.cache.load_timeout = Duration::from_ms(timeout);
        config.pool.name = name;
        config.pool.generation = generation;
        config.socket = quoted.into();
        prop_assert_eq!(Config::parse(&config.to_yaml(), false).unwrap().0, config);
    }
}

#[test]
fn sizes_and_times_have_the_forms_that_people_write() {
    for (text, bytes) in [
        ("0", 0),
        ("65536", 65536),
        ("1Ki", 1024),
        ("2M", 2_000_000),
        ("1k", 1000),
        ("16Ti", 16 << 40),
    ] {
        assert_eq!(text.parse::<ByteSize>().unwrap().0, bytes, "{text}");
    }
    for text in [
        "",
        "Gi",
        "1.5Gi",
        "-1",
        "1 Gi",
        "1KB",
        "99999999999999999999",
        "99999999999Ti",
        "+1",
    ] {
        assert!(text.parse::<ByteSize>().is_err(), "{text}");
    }
    for (text, ms) in [
        ("250ms", 250),
        ("2s", 2000),
        ("24h", 86_400_000),
        ("1h30m", 5_400_000),
        ("1d", 86_400_000),
        ("1m5ms", 60_005),
    ] {
        assert_eq!(text.parse::<Duration>().unwrap().ms, ms, "{text}");
    }
    for text in [
        "",
        "5",
        "s",
        "1.5s",
        "1s1m",
        "1s1s",
        "-1s",
        "1 s",
        "99999999999999999999s",
    ] {
        assert!(text.parse::<Duration>().is_err(), "{text}");
    }
}

#[test]
fn every_value_of_the_s3_tier_is_taken_and_is_printed_as_it_was() {
    let text = r#"
s3: {bucket: my.bucket-1, region: US-WEST-04A, endpoint: "https://[fd00::1]:9000", prefix: team/prod, addressingStyle: VirtualHost, accelerate: true, auth: /auth, ca: /ca.crt, checksums: WhenSupported, maxConcurrency: 8, capacity: 2Ti, evictAtPercent: 95, evictToPercent: 70, expireAfter: 7d, mode: Audit}
"#;
    let (c, _) = Config::parse(text, false).unwrap();
    let s3 = S3 {
        bucket: "my.bucket-1".into(),
        region: "US-WEST-04A".into(),
        endpoint: "https://[fd00::1]:9000".into(),
        prefix: "team/prod".into(),
        addressing_style: AddressingStyle::VirtualHost,
        accelerate: true,
        auth: Some("/auth".into()),
        ca: Some("/ca.crt".into()),
        checksums: Checksums::WhenSupported,
        max_concurrency: 8,
        capacity: ByteSize(2 << 40),
        evict_at_percent: 95,
        evict_to_percent: 70,
        expire_after: Duration::from_ms(7 * 86_400_000),
        mode: TierMode::Audit,
    };
    assert_eq!(c.s3, s3);
    assert_eq!(Config::parse(&c.to_yaml(), false).unwrap().0, c);
    assert_eq!(Config::default().s3.bucket, "");
}

#[test]
fn what_no_bucket_region_endpoint_or_prefix_can_be_is_refused() {
    for wrong in [
        "bucket: Upper",
        "bucket: ab",
        "bucket: a/b",
        "region: us east",
        "endpoint: minio:9000",
        "endpoint: \"ftp://minio\"",
        "endpoint: \"https://user:secret@minio\"",
        "endpoint: \"https://minio/path\"",
        "endpoint: \"https://\"",
        "prefix: /prod",
        "prefix: prod/",
        "prefix: a//b",
        "prefix: a/../b",
        "prefix: \"a b\"",
        "evictAtPercent: 101",
        "maxConcurrency: 0",
    ] {
        let found = problems(&format!("s3: {{{wrong}}}\n"));
        let key = format!("s3.{}", wrong.split(':').next().unwrap());
        assert_eq!(found.len(), 1, "{wrong}: {found:?}");
        assert!(found[0].starts_with(&key), "{wrong}: {found:?}");
    }
    for right in [
        "bucket: \"\"",
        "endpoint: \"http://minio.ns.svc:9000\"",
        "prefix: \"\"",
    ] {
        let text = format!("s3: {{{right}}}\n");
        assert!(Config::parse(&text, false).is_ok(), "{right}");
    }
}
