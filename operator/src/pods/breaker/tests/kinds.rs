//! Each kind of cause: its evidence, and the comparison with a pod without a sidecar.

use super::*;

/// A pod whose vLLM ended with this code after `ran` seconds, with this number of restarts.
fn failing(name: &str, created: i64, code: i32, ran: i64, restarts: u32) -> Pod {
    let mut pod = works(name, created, created + 1);
    pod.ready = false;
    pod.own[0] = failed(code, ran, restarts);
    pod
}

fn failed(code: i32, ran: i64, restarts: u32) -> Own {
    Own {
        restarts,
        exit: Some(Box::new(Exit {
            code,
            reason: "Error".into(),
            message: "".into(),
            ran: SignedDuration::from_secs(ran),
        })),
        ..engine(waiting("CrashLoopBackOff"))
    }
}

fn pending(name: &str, created: i64, what: WaitsFor, maybe_injection: bool) -> Pod {
    let mut pod = pod(name, created, SidecarState::Unseen);
    pod.waits = Some(Box::new(Waits {
        what,
        maybe_injection,
        message: "0/1 nodes are available: 1 Insufficient memory.".into(),
    }));
    pod
}

#[test]
fn a_vllm_that_fails_twice_is_compared_with_one_without_a_sidecar() {
    let mut rig = Rig::new();
    rig.pods([failing("a", 0, 1, 3, 0)]).step(5);
    rig.expect("r", None);
    rig.pods([failing("a", 0, 1, 3, 1)]).step(10);
    rig.expect("r", Some(PAUSED));
    let cause = &rig.breaker.pauses["r"].cause;
    assert_eq!(&*cause.reason, "EngineFails");
    assert!(
        cause.message.contains("container vllm exited with code 1"),
        "{}",
        cause.message
    );
    assert_eq!(rig.replaced(12), ["a"]);
    let mut control = let_through("b", 13);
    control.ready = false;
    rig.pods([control]).step(43);
    rig.expect("r", Some(PAUSED));
    rig.step(44);
    rig.expect("r", Some(PROVEN));
}

#[test]
fn injection_continues_if_vllm_fails_without_a_sidecar_too() {
    let mut rig = Rig::new();
    rig.pods([failing("a", 0, 1, 3, 1)]).step(10);
    let mut control = let_through("b", 13);
    control.own[0] = failed(1, 3, 1);
    rig.pods([control]).step(20);
    rig.expect("r", Some(Position::Cleared));
}

#[test]
fn a_failing_vllm_is_no_evidence_while_another_of_its_owner_works() {
    let mut rig = Rig::new();
    rig.pods([works("up", 0, 1), failing("a", 0, 1, 3, 5)]);
    rig.step(60);
    rig.expect("r", None);
    rig.pods([failing("up", 0, 1, 3, 5)]).step(100);
    rig.expect("r", None);
}

#[test]
fn only_early_failures_of_vllm_are_evidence() {
    let mut disrupted = failing("a", 0, 137, 3, 1);
    disrupted.disrupted = true;
    for pod in [
        failing("a", 0, 0, 3, 5),
        failing("a", 0, 1, 601, 5),
        disrupted,
    ] {
        let mut rig = Rig::new();
        rig.pods([pod]).step(60);
        rig.expect("r", None);
    }
}

#[test]
fn an_unknown_python_path_is_named_as_the_cause() {
    let reason = |code: i32, unknown: bool| {
        let mut rig = Rig::new();
        let mut pod = failing("a", 0, code, 3, 1);
        pod.own[0].path_unknown = unknown;
        rig.pods([pod]).step(10);
        rig.breaker.pauses["r"].cause.clone()
    };
    let cause = reason(1, true);
    assert_eq!(&*cause.reason, "PythonPathUnknown");
    assert!(cause.message.contains("kvcachepool.io/python-path"));
    assert_eq!(&*reason(1, false).reason, "EngineFails");
    assert_eq!(&*reason(139, true).reason, "EngineFails");
}

#[test]
fn one_failed_pod_of_a_job_is_evidence_and_the_next_is_compared() {
    let job = |name: &str, created| {
        let mut pod = failing(name, created, 1, 3, 0);
        pod.phase = Phase::Failed;
        owned_by("j", pod)
    };
    let mut rig = Rig::new();
    rig.pods([job("a", 0)]).step(5);
    rig.expect("j", Some(PAUSED));
    assert_eq!(rig.replaced(8), [""; 0], "it has ended");
    rig.pods([job("a", 0), owned_by("j", let_through("b", 15))])
        .step(46);
    rig.expect("j", Some(PROVEN));
    // Of finished pods only the youngest counts.
    let mut rig = Rig::new();
    rig.pods([job("a", 0), owned_by("j", works("b", 15, 16))])
        .step(20);
    rig.expect("j", None);
}

#[test]
fn an_unschedulable_pod_is_compared_with_one_without_a_sidecar() {
    let mut rig = Rig::new();
    rig.pods([pending("a", 0, WaitsFor::Node, true)]).step(0);
    assert_eq!(rig.replaced(31), [""; 0]);
    rig.expect("r", Some(PAUSED));
    assert_eq!(&*rig.breaker.pauses["r"].cause.reason, "NoNodeWithRoom");
    assert_eq!(rig.replaced(33), ["a"]);
    let mut control = let_through("b", 34);
    control.own[0].state = SidecarState::Unseen;
    rig.pods([control.clone()]).step(35);
    rig.expect("r", Some(PROVEN));
    let mut rig = Rig::new();
    rig.pods([pending("a", 0, WaitsFor::Node, true)]).step(0);
    rig.step(31);
    control.waits = pending("", 0, WaitsFor::Node, false).waits;
    rig.pods([control]).step(60);
    rig.expect("r", Some(PAUSED));
    rig.step(64);
    rig.expect("r", Some(Position::Cleared));
}

#[test]
fn a_pod_that_waits_for_foreign_resources_is_no_evidence() {
    for what in [WaitsFor::Node, WaitsFor::Volumes] {
        let mut rig = Rig::new();
        rig.pods([pending("a", 0, what, false)]).step(0);
        rig.step(600);
        rig.expect("r", None);
    }
}

#[test]
fn a_disk_may_take_a_minute_to_mount() {
    let mut rig = Rig::new();
    rig.pods([pending("a", 0, WaitsFor::Volumes, true)]).step(0);
    rig.step(59);
    rig.expect("r", None);
    rig.step(60);
    rig.expect("r", Some(PAUSED));
    rig.pods([let_through("b", 62)]).step(64);
    rig.expect("r", Some(PROVEN));
}

#[test]
fn refused_pods_are_let_through_at_once() {
    let mut rig = Rig::new();
    rig.refused("r", 1).step(2);
    rig.expect("r", Some(PAUSED));
    rig.refused("r", 5).step(6);
    rig.expect("r", Some(PAUSED));
    rig.pods([let_through("a", 6)]).step(8);
    rig.expect("r", Some(PROVEN));
}

#[test]
fn injection_continues_if_pods_without_a_sidecar_are_refused_too() {
    let mut rig = Rig::new();
    rig.refused("r", 1).step(2);
    rig.refused("r", 7).step(8);
    rig.expect("r", Some(Position::Cleared));
    rig.refused("r", 200).step(201);
    rig.expect("r", Some(Position::Cleared));
    rig.refused("r", 310).step(311);
    rig.expect("r", Some(PAUSED));
}

#[test]
fn an_outdated_refusal_is_ignored() {
    let mut rig = Rig::new();
    rig.pods([works("a", 2, 3)]).refused("r", 1).step(4);
    rig.expect("r", None);
    let mut rig = Rig::new();
    rig.refused("r", 0).step(121);
    rig.expect("r", None);
    let mut rig = Rig::new();
    rig.hash = "new";
    rig.refused("r", 1).step(2);
    rig.expect("r", None);
}

#[test]
fn running_pods_do_not_end_a_pause_after_a_refusal() {
    let mut rig = Rig::new();
    rig.pods([works("a", 0, 3)]).refused("r", 1).step(2);
    rig.expect("r", Some(PAUSED));
    rig.pods([works("a", 0, 3), let_through("b", 4)]).step(60);
    rig.expect("r", Some(PROVEN));
    rig.refused.clear();
    rig.step(602);
    rig.expect("r", Some(Position::Probing));
    rig.refused("r", 700).step(701);
    rig.expect("r", Some(PROVEN));
    assert_eq!(rig.breaker.pauses["r"].failures, 1);
}

#[test]
fn a_patched_image_that_cannot_be_pulled_is_evidence() {
    let ended = SidecarState::Terminated {
        reason: "Completed".into(),
    };
    let mut pod = pod("a", 0, ended);
    pod.sidecar.as_mut().unwrap().image_in_use = "i:1".into();
    let mut rig = Rig::new();
    rig.pods([pod]).step(0);
    rig.step(30);
    assert_eq!(&*rig.breaker.pauses["r"].cause.reason, "ImageNotPulled");
}

#[test]
fn a_crash_loop_is_remembered_while_the_sidecar_runs_for_seconds() {
    let crash = |s| [pod("a", 0, s)];
    let mut rig = Rig::new();
    rig.pods(crash(waiting("CrashLoopBackOff"))).step(0);
    rig.pods(crash(running(20))).step(22);
    rig.pods(crash(waiting("CrashLoopBackOff"))).step(31);
    rig.expect("r", Some(PAUSED));
    let mut rig = Rig::new();
    rig.pods(crash(waiting("CrashLoopBackOff"))).step(0);
    rig.pods(crash(running(10))).step(45);
    rig.pods(crash(waiting("CrashLoopBackOff"))).step(46);
    rig.expect("r", None);
}
