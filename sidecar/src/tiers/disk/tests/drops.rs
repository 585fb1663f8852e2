//! Who stops to wait for an operation does not end it: memory and slots are held until the thread is done with them.

use super::super::core::Step;
use super::rig::*;
use crate::tiers::{Get, Place, Put, Tier};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

fn poll_once<T>(future: &mut Pin<Box<dyn Future<Output = T> + Send + '_>>) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(future.as_mut().poll(&mut context), Poll::Pending));
}

fn rig_with_gate(step: Step) -> (Rig, Gate) {
    let gate = Gate::at(step);
    let at = gate.clone();
    let rig = Rig::watched(16 << 20, move |step| {
        at.pass(step);
        Ok(())
    });
    (rig, gate)
}

#[test]
fn a_get_that_is_dropped_holds_its_memory_until_the_thread_has_read() {
    let (rig, gate) = rig_with_gate(Step::ReadSections);
    let disk = rig.open();
    rig.put(&disk, 1, &[9000]).unwrap();
    let hold = Arc::new(());
    let span = rig.memory.held(9000, hold.clone());
    let seen = rig.memory.span(1);
    let (name, watched) = (object(1, &[9000]).name(), span.offset);
    let places = vec![Place {
        group: 0,
        shard: 0,
        span,
    }];
    gate.close();
    let mut get = disk.get(Get { name, places });
    poll_once(&mut get);
    gate.wait_for(1);
    drop(get);
    assert!(Arc::strong_count(&hold) > 1, "the thread may still write");
    gate.open();
    until("the memory is given back", || Arc::strong_count(&hold) == 1);
    // It did write, after the drop.
    let mut bytes = vec![0; 9000];
    assert!(seen.arena.read(watched, &mut bytes));
    assert_eq!(bytes, bytes_of(1, 0, 9000));
}

#[test]
fn a_get_that_is_dropped_before_it_begins_gives_its_memory_back() {
    let (mut rig, gate) = rig_with_gate(Step::ReadSections);
    rig.options.read_threads = 1;
    let disk = rig.open();
    rig.put(&disk, 1, &[9000]).unwrap();
    let hold = Arc::new(());
    let name = object(1, &[9000]).name();
    let get = |hold: Arc<()>| Get {
        name: name.clone(),
        places: vec![Place {
            group: 0,
            shard: 0,
            span: rig.memory.held(9000, hold),
        }],
    };
    gate.close();
    let mut first = disk.get(get(Arc::new(())));
    poll_once(&mut first);
    gate.wait_for(1);
    let mut second = disk.get(get(hold.clone()));
    poll_once(&mut second);
    drop((first, second));
    gate.open();
    until("the memory is given back", || Arc::strong_count(&hold) == 1);
}

#[test]
fn a_put_that_is_dropped_is_done_all_the_same() {
    for step in [Step::Write, Step::SyncData, Step::Durable] {
        let (rig, gate) = rig_with_gate(step);
        let disk = rig.open();
        let hold = Arc::new(());
        let object = object(1, &[9000]);
        let span = rig.memory.held(9000, hold.clone());
        span.write(0, &bytes_of(1, 0, 9000));
        gate.close();
        let spans = vec![span];
        let mut put = disk.put(Put {
            object: object.clone(),
            spans,
        });
        poll_once(&mut put);
        gate.wait_for(1);
        drop(put);
        let reads = Arc::strong_count(&hold) > 1;
        assert_eq!(reads, step == Step::Write, "held while it is read only");
        gate.open();
        until("the object is there", || rig.has(&disk, 1));
        assert_eq!(Arc::strong_count(&hold), 1);
        assert_eq!(rig.get(&disk, &object), Ok(()));
    }
}

#[test]
fn a_close_waits_for_what_a_thread_does() {
    let (rig, gate) = rig_with_gate(Step::ReadSections);
    let disk = rig.open();
    rig.put(&disk, 1, &[9000]).unwrap();
    let hold = Arc::new(());
    let span = rig.memory.held(9000, hold.clone());
    let places = vec![Place {
        group: 0,
        shard: 0,
        span,
    }];
    let name = object(1, &[9000]).name();
    gate.close();
    let mut get = disk.get(Get { name, places });
    poll_once(&mut get);
    gate.wait_for(1);
    drop(get);
    std::thread::scope(|scope| {
        let closed = scope.spawn(|| disk.close());
        assert!(!closed.is_finished());
        gate.open();
        closed.join().unwrap();
        assert_eq!(Arc::strong_count(&hold), 1);
    });
    rig.open().close();
}
