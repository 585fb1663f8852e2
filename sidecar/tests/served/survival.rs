//! The death of the whole container, with vLLM processes that live on and hand the memory back.

use crate::child::Process;
use crate::harness::{Sidecar, wait_for};
use crate::vllm::{Vllm, hashes};

#[test]
fn memory_outlives_the_container_in_the_hands_of_a_vllm() {
    let mut sidecar = Sidecar::small();
    let mut keeper = Process::start("store", &sidecar.socket());
    sidecar.kill_all();
    sidecar.run();
    keeper.reattach();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.check("r", &hashes(1, 4));
    assert!(sidecar.metric("adopted_chunks_total") >= 4.0);
}

#[test]
fn no_new_arena_is_made_while_a_lock_of_an_earlier_boot_is_held() {
    let mut sidecar = Sidecar::small();
    let mut keeper = Process::start("store", &sidecar.socket());
    sidecar.kill_all();
    sidecar.run();
    sidecar.wait_socket();
    wait_for("the named reason", || {
        sidecar
            .reasons()
            .iter()
            .any(|r| r.contains("ArenaHeldByEarlierBoot"))
            .then_some(())
    });
    assert_eq!(sidecar.status()["memory"]["capacity_bytes"], 0);
    // Its death ends the wait.
    keeper.kill();
    sidecar.wait_populated();
    Vllm::attach(&sidecar.socket()).store("r", &hashes(3, 1));
}

#[test]
fn a_writer_that_died_with_the_container_gives_its_slots_back_later_but_its_bytes_never() {
    let mut sidecar = Sidecar::small();
    let mut keeper = Process::start("store", &sidecar.socket());
    let mut writer = Process::start("grant", &sidecar.socket());
    sidecar.kill_all();
    writer.kill();
    sidecar.run();
    keeper.reattach();
    let mut vllm = Vllm::attach(&sidecar.socket());
    assert_eq!(vllm.ready("r", &hashes(2, 4)), 0);
    vllm.check("r", &hashes(1, 4));
    let slots = sidecar.status()["memory"]["slots"].clone();
    let open = slots["quarantined"].as_u64().unwrap() + slots["granted"].as_u64().unwrap();
    assert_eq!(open, 4, "a boot knows neither device nor time: {slots}");
}
