//! Who stops to wait for an operation does not end it: memory and slots are held until the thread is done with them.

use super::super::commit::End;
use super::super::core::Step;
use super::rig::*;
use crate::{Cause, Get, Place, Put, Stored, Tier};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
use rustix::io::{Errno, write};
use std::cell::OnceCell;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

fn poll_once<T>(future: &mut Pin<Box<dyn Future<Output = T> + Send + '_>>) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(future.as_mut().poll(&mut context), Poll::Pending));
}

#[test]
fn a_get_that_is_dropped_holds_its_memory_until_the_thread_has_read() {
    let (rig, gate) = Rig::gated(16 << 20, Step::ReadSections);
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
    let (mut rig, gate) = Rig::gated(16 << 20, Step::ReadSections);
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
        let (rig, gate) = Rig::gated(16 << 20, step);
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
    let (rig, gate) = Rig::gated(16 << 20, Step::ReadSections);
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

#[test]
fn what_waits_to_be_durable_when_the_end_comes_is_done_and_answered() {
    let (rig, gate) = Rig::gated(16 << 20, Step::SyncData);
    let disk = rig.open();
    gate.close();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| rig.put(&disk, 0, &[3000]));
        gate.wait_for(1);
        let second = scope.spawn(|| rig.put(&disk, 1, &[3000]));
        until("the second waits", || disk.waiting() == 1);
        disk.live.end(End::AsItIs);
        gate.open();
        for put in [first, second] {
            assert_eq!(put.join().unwrap(), Ok(Stored::New));
        }
    });
    Rig::die(disk);
    assert_eq!(all_whole(&rig.open(), &rig.memory).len(), 2);
}

#[test]
fn an_end_that_overtakes_the_opening_of_a_folder_gives_it_up() {
    let failing = Failing::default();
    let at = failing.clone();
    let rig = Rig::watched(1 << 20, move |step| at.step(step));
    let disk = rig.open();
    rig.put(&disk, 1, &[3000]).unwrap();
    rig.put(&disk, 2, &[3000]).unwrap();
    // Who opens it is stopped until somebody writes what it says.
    let format = rig.path().join("format");
    std::fs::remove_file(&format).unwrap();
    mknodat(CWD, &format, FileType::Fifo, Mode::RWXU, 0).unwrap();
    failing.set(Step::Read, Errno::IO);
    assert_eq!(rig.get(&disk, &object(1, &[3000])), Err(Cause::Io));
    failing.clear();
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| {
            let off = || block_on(disk.usage()).map_err(|e| e.cause) == Err(Cause::Io);
            until("it is opened or given up", || !off());
            block_on(disk.usage()).map_err(|e| e.cause)
        });
        let writes = OFlags::WRONLY | OFlags::NONBLOCK;
        let says = OnceCell::new();
        until("it is being opened", || {
            open(&format, writes, Mode::empty()).is_ok_and(|fd| says.set(fd).is_ok())
        });
        disk.live.end(End::AsItIs);
        write(says.get().unwrap(), b"kvcachepool-disk 1\n").unwrap();
        assert_eq!(opening.join().unwrap(), Err(Cause::Gone));
    });
    std::fs::remove_file(&format).unwrap();
    disk.close();
    assert!(rig.has(&rig.open(), 2), "nobody has the folder any more");
}
