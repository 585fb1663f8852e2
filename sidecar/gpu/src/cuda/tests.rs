//! Kernels over the fake driver, which runs them on the host: loading, and the names of launch errors. The example `gpu_check` verifies the
//! results of all kernels, here and on a device.
#![allow(unsafe_code)]

use super::buffer::{Buffer, Pinned};
use super::context::{Context, Contexts, Driver};
use super::launch::{Kernels, LaunchError};
use super::library::Library;
use super::stream::Stream;
use kvcachepool_kernels::launch::pages::Table;
use kvcachepool_kernels::launch::{Device, Packing};
use kvcachepool_kernels::manifest::Manifest;
use kvcachepool_kernels::pages::{PageMap, Plane};
use kvcachepool_memory::mapping::Mapping;
use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

const FIRST: &str = "11111111111111111111111111111100";

/// A device of the fake driver, which stays open.
fn context() -> Arc<Context> {
    contexts()[0].clone()
}

/// That device, and a stand-in for another one.
fn contexts() -> [Arc<Context>; 2] {
    static CONTEXTS: OnceLock<[Arc<Context>; 2]> = OnceLock::new();
    CONTEXTS.get_or_init(opened).clone()
}

fn opened() -> [Arc<Context>; 2] {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let folder = tempfile::tempdir().unwrap();
    let (object, library) = (
        folder.path().join("driver.o"),
        folder.path().join("libcuda.so.1"),
    );
    let built = Command::new("cc")
        .args(["-c", "-fPIC", "-o"])
        .args([&object, &sources.join("fake_driver.c")])
        .status()
        .unwrap();
    assert!(built.success());
    let built = Command::new("g++")
        .args([
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
        ])
        .args(["-shared", "-fPIC", "-Wno-unknown-pragmas", "-o"])
        .args([&library, &sources.join("fake_kernels.cpp"), &object])
        .status()
        .expect("install it: apt-get install g++");
    assert!(built.success());
    let path = CString::new(library.to_str().unwrap()).unwrap();
    let driver = Driver::of(&Library::open(&path).unwrap()).unwrap();
    let driver = Box::leak(Box::new(driver));
    [(); 2].map(|()| Contexts::new().of(driver, FIRST, |_| Ok(())).unwrap())
}

#[test]
fn every_kernel_of_the_manifest_is_loaded() {
    let context = context();
    let kernels = Kernels::load(&context).unwrap();
    let manifest = Manifest::load().unwrap();
    let stream = Stream::new(&context).unwrap();
    for entry in manifest.modules.iter().flat_map(|module| &module.entries) {
        // SAFETY: without arguments nothing is launched.
        let refused = unsafe { kernels.launch(&stream, &entry.name, &[], |_| 1) };
        let error = refused.unwrap_err();
        assert_eq!(error.name(), "Arguments", "{error}");
    }
    // SAFETY: as above.
    let refused = unsafe { kernels.launch(&stream, "kv_nothing", &[], |_| 1) };
    let unknown = LaunchError::UnknownKernel("kv_nothing".into());
    assert_eq!(refused.unwrap_err(), unknown);
}

#[test]
fn memory_and_streams_of_another_device_are_refused_before_a_launch() {
    let [context, other] = contexts();
    let kernels = Kernels::load(&context).unwrap();
    let [stream, elsewhere] = [&context, &other].map(|context| Stream::new(context).unwrap());
    let [own, foreign] = [&context, &other].map(|context| Buffer::new(context, 256).unwrap());
    let refused = |error: LaunchError| assert_eq!(error.name(), "OtherDevice", "{error}");
    let plane = |storage| Plane {
        storage,
        offset: 0,
        block_stride: 64,
        bytes: 64,
    };
    let map = PageMap::new(4, vec![plane(0), plane(1)]).unwrap();
    let of = |second| Table::new(&kernels, &map, vec![&own, second]);
    refused(of(&foreign).err().unwrap());
    let table = of(&own).unwrap();
    let [ids, section] = [4, 128].map(|bytes| Buffer::new(&context, bytes).unwrap());
    let on = |stream, ids| table.transfer(&kernels, stream, Packing::Pack, ids, &section, &own);
    assert!(on(&stream, &ids).is_ok());
    refused(on(&elsewhere, &ids).unwrap_err());
    refused(on(&stream, &foreign).unwrap_err());
}

#[test]
fn copies_stay_inside_of_both_memories() {
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let mapping = Arc::new(Mapping::private("test", 4096).unwrap());
    let host = Pinned::new(&context, mapping.clone()).unwrap();
    let buffer = Buffer::of(&context, &[7; 64]).unwrap();
    buffer.copy_out(&stream, 8, &host, 100, 56).unwrap();
    stream.synchronize().unwrap();
    let mut there = [0; 58];
    assert!(mapping.read(99, &mut there));
    assert_eq!((there[0], there[1], there[56], there[57]), (0, 7, 7, 0));
    assert!(buffer.copy_in(&stream, 9, &host, 0, 56).is_err());
    assert!(buffer.copy_in(&stream, 0, &host, 4095, 2).is_err());
    assert!(buffer.copy_out(&stream, u64::MAX, &host, 0, 1).is_err());
    assert!(buffer.read(0, &mut [0; 65]).is_err());
    let other = Buffer::new(&context, 32).unwrap();
    assert!(other.copy_from(&stream, &buffer, 33).is_err());
    other.copy_from(&stream, &buffer, 32).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(other.content().unwrap(), [7; 32]);
}
