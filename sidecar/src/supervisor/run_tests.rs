//! A supervisor over stand-ins for its engine.

use super::*;

fn stand_in() -> (std::process::Child, Pid) {
    let child = std::process::Command::new("sleep")
        .arg("600")
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    (child, pid)
}

#[test]
fn an_engine_that_gets_no_boot_message_is_ended_and_named() {
    let (ours, theirs) = link::pair().unwrap();
    drop(theirs);
    let (mut child, pid) = stand_in();
    let error = send_boot(pid, &ours, &Boot::default(), &[]).unwrap_err();
    assert!(
        error.to_string().contains("cannot send the boot message"),
        "{error}"
    );
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}

fn running(pid: Pid, link: OwnedFd, since: Instant) -> Engine {
    Engine {
        pid,
        link,
        since,
        serving: true,
        heartbeat: Heartbeat::new(since),
        ended_for: None,
    }
}

#[test]
fn the_last_words_of_an_engine_count_and_a_restart_on_request_mends_no_failures() {
    let now = Instant::now();
    let (ours, theirs) = link::pair().unwrap();
    let mut child = std::process::Command::new("sh")
        .args(["-c", &format!("exit {EXIT_RESTART}")])
        .spawn()
        .unwrap();
    let mut supervisor = Supervisor::new(&Files::default(), now);
    for _ in 0..100 {
        supervisor.starts.failed(now);
    }
    supervisor.held = Some(Held {
        region: 1,
        arena: ours.try_clone().unwrap(),
        table: ours.try_clone().unwrap(),
    });
    supervisor.engine = Some(running(Pid::from_child(&child), ours, now));
    link::send(&theirs, &FromEngine::LetGo, &[]).unwrap();
    drop(theirs);
    supervisor.ended(child.wait().unwrap());
    assert!(supervisor.held.is_none());
    assert!(supervisor.starts.due() <= Instant::now());
    let now = Instant::now();
    supervisor.starts.failed(now);
    assert!(supervisor.starts.due() > now + Duration::from_secs(1));
}

#[test]
fn an_engine_that_hangs_is_ended_and_named_and_one_that_answers_is_not() {
    let start = Instant::now();
    let (ours, theirs) = link::pair().unwrap();
    let (mut child, pid) = stand_in();
    let mut supervisor = Supervisor::new(&Files::default(), start);
    supervisor.engine = Some(running(pid, ours, start));
    let ended = |s: &Supervisor| s.engine.as_ref().unwrap().ended_for.clone();
    let second = |n: u64| start + Duration::from_secs(n);
    for n in 1..=100 {
        link::send(&theirs, &FromEngine::Alive, &[]).unwrap();
        supervisor.hear_engine(second(n));
    }
    // The whole container was frozen.
    supervisor.hear_engine(second(5_000));
    assert_eq!(ended(&supervisor), None);
    for n in 5_001..5_025 {
        supervisor.hear_engine(second(n));
    }
    assert_eq!(ended(&supervisor), None);
    let reads = FromEngine::Reads {
        rows: 60_000_000,
        chunks: 0,
    };
    link::send(&theirs, &reads, &[]).unwrap();
    for n in 5_025..5_115 {
        supervisor.hear_engine(second(n));
    }
    assert_eq!(ended(&supervisor), None);
    supervisor.hear_engine(second(5_115));
    assert!(ended(&supervisor).unwrap().starts_with("EngineSilent"));
    supervisor.ended(child.wait().unwrap());
    assert!(supervisor.standby.last_exit.starts_with("EngineSilent"));
    assert!(supervisor.engine.is_none());
}

#[test]
fn an_engine_that_flushes_after_it_was_told_to_end_gets_the_time_for_it() {
    let now = Instant::now();
    let (ours, theirs) = link::pair().unwrap();
    let (mut child, pid) = stand_in();
    let mut supervisor = Supervisor::new(&Files::default(), now);
    supervisor.engine = Some(running(pid, ours, now));
    link::send(&theirs, &FromEngine::Flushing, &[]).unwrap();
    supervisor.hear_engine(now);
    assert_eq!(supervisor.stopping, None, "nobody told it to end");
    supervisor.stopping = Some(now);
    supervisor.hear_engine(now);
    assert_eq!(supervisor.stopping, Some(now));
    link::send(&theirs, &FromEngine::Flushing, &[]).unwrap();
    supervisor.hear_engine(now);
    assert!(supervisor.stopping >= Some(now + STOP_DEADLINE));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_listener_that_accepts_nothing_holds_its_socket_and_nobody_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sidecar.sock");
    let claimed = || {
        let (path, (answer, asked)) = (path.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || answer.send(try_claim(&path).unwrap().is_some()));
        asked.recv_timeout(Duration::from_secs(30)).unwrap()
    };
    assert!(claimed());
    let address = SocketAddrUnix::new(&path).unwrap();
    let client = || {
        let flags = SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    };
    let listener = client();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    assert!(!claimed());
    let _waiting: Vec<_> = std::iter::repeat_with(client)
        .map_while(|client| connect(&client, &address).is_ok().then_some(client))
        .collect();
    assert!(!claimed());
    drop(listener);
    assert!(claimed(), "a dead socket");
}

#[test]
fn a_config_file_that_is_gone_for_a_moment_does_not_move_the_admin_port() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.v1.yaml");
    let files = Files {
        pod: Some(path.clone()),
        pool: None,
    };
    let mut supervisor = Supervisor::new(&files, Instant::now());
    let mut follow = |text| {
        match text {
            Some(text) => std::fs::write(&path, text).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        supervisor.follow_admin_address();
        supervisor.admin.as_ref().unwrap().local_addr().unwrap()
    };
    let open = follow(Some("admin: {listen: \"127.0.0.1:0\"}\n"));
    assert_eq!(follow(None), open);
    assert_eq!(follow(Some(": : :\n")), open);
    let other = follow(Some("admin: {listen: \"127.0.0.2:0\"}\n"));
    assert_eq!(other.ip().to_string(), "127.0.0.2");
}
