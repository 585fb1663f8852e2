//! Kernels over the made-up driver, which runs them on the host: what is passed, how much is launched, and what has which name when it
//! cannot be. That all of them compute what they should is checked by the example `gpu_check`, here as on a device.
#![allow(unsafe_code)]

use super::buffer::{Buffer, Pinned};
use super::context::{Context, Contexts, Driver};
use super::families::cachegen::{CacheGen, Rows, Streams};
use super::families::{Angles, Table, Way};
use super::launch::{Kernels, LaunchError, Value};
use super::library::Library;
use super::stream::Stream;
use crate::shm::mapping::Mapping;
use kvcachepool_kernels::codec::cachegen::Planes;
use kvcachepool_kernels::codec::{Element, Shape};
use kvcachepool_kernels::manifest::Manifest;
use kvcachepool_kernels::pages::{Dtype, Keys, PageMap, Plane, Style, Turn};
use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

const FIRST: &str = "11111111111111111111111111111100";

/// A device of the made-up driver, which stays open.
fn context() -> Arc<Context> {
    contexts()[0].clone()
}

/// That one, and what stands for another.
fn contexts() -> [Arc<Context>; 2] {
    static CONTEXTS: OnceLock<[Arc<Context>; 2]> = OnceLock::new();
    CONTEXTS.get_or_init(opened).clone()
}

fn opened() -> [Arc<Context>; 2] {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/served");
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

fn arguments_error(error: LaunchError) -> String {
    assert_eq!(error.name(), "Arguments", "{error}");
    error.to_string()
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
        let said = arguments_error(refused.unwrap_err());
        assert!(said.contains("0 arguments were given"), "{said}");
    }
}

#[test]
fn arguments_that_the_manifest_does_not_have_are_refused_by_name() {
    let context = context();
    let kernels = Kernels::load(&context).unwrap();
    let stream = Stream::new(&context).unwrap();
    let right = [
        ("verbatim", Value::Pointer(0)),
        ("canonical", Value::Pointer(0)),
        ("loops", Value::Pointer(0)),
        ("run_bytes", Value::U64(0)),
    ];
    let mut wrong = right;
    wrong[3].1 = Value::U32(0);
    let mut swapped = right;
    swapped.swap(0, 1);
    for (arguments, words) in [
        (wrong, "run_bytes is a U64, not a U32"),
        (swapped, "argument 0 is verbatim, not canonical"),
    ] {
        // SAFETY: nothing is launched with arguments that are refused.
        let refused = unsafe { kernels.launch(&stream, "kv_to_canonical", &arguments, |_| 1) };
        let said = arguments_error(refused.unwrap_err());
        assert!(said.contains(words), "{said}");
    }
    // SAFETY: as above.
    let refused = unsafe { kernels.launch(&stream, "kv_nothing", &right, |_| 1) };
    let unknown = LaunchError::UnknownKernel("kv_nothing".into());
    assert_eq!(refused.unwrap_err(), unknown);
}

#[test]
fn memory_that_is_too_short_is_refused_before_a_launch() {
    let context = context();
    let kernels = Kernels::load(&context).unwrap();
    let stream = Stream::new(&context).unwrap();
    let buffer = |bytes| Buffer::new(&context, bytes).unwrap();
    let plane = Plane {
        storage: 0,
        offset: 0,
        block_stride: 64,
        bytes: 64,
    };
    let map = PageMap::new(4, vec![plane]).unwrap();
    let (short, cache, ids) = (buffer(255), buffer(256), buffer(8));
    assert!(Table::new(&map, vec![&short]).is_err());
    assert!(Table::new(&map, Vec::new()).is_err());
    let table = Table::new(&map, vec![&cache]).unwrap();
    for (section, refused) in [(127, 4), (128, 3)] {
        let (section, refused) = (buffer(section), buffer(refused));
        let gathered = kernels.transfer(&stream, Way::Pack, &table, &ids, &section, &refused);
        assert_eq!(gathered.unwrap_err().name(), "TooSmall");
    }

    let keys = Keys {
        state_bytes: 16,
        offset: 0,
        rotary: 8,
        dtype: Dtype::F16,
        style: Style::NeoX,
    };
    let turn = |rotary| Angles::new(&kernels, &Turn::by_base(1e4, rotary, 1).unwrap()).unwrap();
    let states = buffer(64);
    assert!(kernels.turn(&stream, &keys, &states, &turn(8)).is_ok());
    assert!(kernels.turn(&stream, &keys, &states, &turn(6)).is_err());
    for other in [
        Keys { offset: 2, ..keys },
        Keys {
            offset: 1,
            rotary: 6,
            ..keys
        },
        Keys {
            state_bytes: 0,
            ..keys
        },
    ] {
        assert!(
            kernels
                .turn(&stream, &other, &states, &turn(other.rotary))
                .is_err()
        );
    }
}

#[test]
fn memory_that_is_too_short_for_cachegen_or_of_another_device_is_refused_before_a_launch() {
    let [context, other] = contexts();
    let kernels = Kernels::load(&context).unwrap();
    let stream = Stream::new(&context).unwrap();
    let shape = Shape {
        element: Element::F32,
        layers: 1,
        halves: 2,
        tokens: 300,
        channels: 3,
    };
    let section = CacheGen::new(&kernels, Planes::of(&shape, 7200).unwrap()).unwrap();
    let zeros = |bytes| Buffer::of(&context, &vec![0; bytes]).unwrap();
    let foreign = |bytes| Buffer::of(&other, &vec![0; bytes]).unwrap();
    let zeros = [&zeros as &dyn Fn(usize) -> Buffer, &foreign];
    /// Calls it with all that is needed, with a byte less of each, and with each of another device.
    fn each<const N: usize>(
        bytes: [usize; N],
        [zeros, foreign]: [&dyn Fn(usize) -> Buffer; 2],
        call: impl Fn([&Buffer; N]) -> Result<(), LaunchError>,
    ) {
        let enough = bytes.map(&zeros);
        call(enough.each_ref()).unwrap();
        for short in 0..N {
            let less = zeros(bytes[short] - 1);
            let mut given = enough.each_ref();
            given[short] = &less;
            assert_eq!(call(given).unwrap_err().name(), "TooSmall", "{short}");
            let elsewhere = foreign(bytes[short]);
            given[short] = &elsewhere;
            assert_eq!(call(given).unwrap_err().name(), "OtherDevice", "{short}");
        }
    }
    // 600 rows of 3 channels; 6 channels in both planes, with a stream for 256 tokens and one for the rest.
    let (levels, tables, lengths) = (1800, 6 * 66, 12 * 4);
    for way in [Way::Pack, Way::Unpack] {
        each(
            [7200, 2400, levels, 8],
            zeros,
            |[raw, largest, levels, refused]| {
                let rows = Rows {
                    raw,
                    largest,
                    levels,
                    refused,
                };
                kernels.cachegen_rows(&stream, way, &section, &rows)
            },
        );
    }
    each(
        [levels, 6 * 128, tables],
        zeros,
        |[levels, counts, tables]| {
            kernels.cachegen_count(&stream, &section, levels, counts, tables)
        },
    );
    let streams = 12 * 516;
    each(
        [levels, tables, streams, lengths],
        zeros,
        |[levels, tables, streams, lengths]| {
            kernels.cachegen_encode(&stream, &section, levels, tables, streams, lengths)
        },
    );
    let packed = zeros[0](7);
    each(
        [12 * 8, lengths, tables, levels],
        zeros,
        |[offsets, lengths, tables, levels]| {
            let streams = Streams {
                packed: &packed,
                offsets,
                lengths,
            };
            kernels.cachegen_decode(&stream, &section, &streams, tables, levels)
        },
    );
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
    refused(Table::new(&map, vec![&own, &foreign]).err().unwrap());
    let table = Table::new(&map, vec![&foreign, &foreign]).unwrap();
    let [ids, section] = [4, 128].map(|bytes| Buffer::new(&context, bytes).unwrap());
    refused(
        kernels
            .transfer(&stream, Way::Pack, &table, &ids, &section, &own)
            .unwrap_err(),
    );
    let table = Table::new(&map, vec![&own, &own]).unwrap();
    let on = |stream| kernels.transfer(stream, Way::Pack, &table, &ids, &section, &own);
    assert!(on(&stream).is_ok());
    refused(on(&elsewhere).unwrap_err());
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
