//! Launchers on a device that runs nothing: what they refuse, and that every launch matches the manifest.

use super::cachegen::{CacheGen, Rows, Streams};
use super::pages::{Angles, Loops, Table};
use super::*;
use crate::codec::cachegen::Planes;
use crate::codec::{Element, Shape};
use crate::manifest::Manifest;
use crate::pages::{BlockShape, Dtype, HeadMajor, Keys, PageMap, Plane, Style, Turn};
use kvcachepool_protocol::layouts::{LAYOUTS_JSON, LayoutTable};
use std::cell::RefCell;
use std::collections::BTreeSet;

#[derive(Debug, PartialEq)]
enum Error {
    Refused(Refused),
    OtherDevice,
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

struct Memory {
    device: u32,
    bytes: u64,
}

/// Checks arguments against the manifest and records kernel names.
struct Recorder {
    number: u32,
    manifest: Manifest,
    launched: RefCell<BTreeSet<String>>,
}

impl Recorder {
    fn new() -> Self {
        Self {
            number: 0,
            manifest: Manifest::load().unwrap(),
            launched: RefCell::default(),
        }
    }

    fn memory(&self, bytes: u64) -> Memory {
        Memory {
            device: self.number,
            bytes,
        }
    }
}

fn foreign(bytes: u64) -> Memory {
    Memory { device: 1, bytes }
}

// SAFETY: no kernel ever runs.
unsafe impl Device for Recorder {
    type Memory = Memory;
    type Stream = ();
    type Error = Error;

    fn upload(&self, bytes: &[u8]) -> Result<Memory, Error> {
        Ok(self.memory(bytes.len() as u64))
    }

    fn range(&self, memory: &Memory) -> Result<(u64, u64), Error> {
        match memory.device == self.number {
            true => Ok((0, memory.bytes)),
            false => Err(Error::OtherDevice),
        }
    }

    unsafe fn launch(
        &self,
        (): &(),
        kernel: &str,
        arguments: &[(&str, Value)],
        of: impl Fn(Count) -> u64,
    ) -> Result<(), Error> {
        let (_, entry) = self.manifest.entry(kernel).unwrap();
        words(entry, arguments)?;
        assert_ne!(entry.grid_of(of), [0, 0]);
        self.launched.borrow_mut().insert(kernel.to_owned());
        Ok(())
    }
}

/// Calls a launcher with valid memory, with one byte less of each buffer, and with each buffer on another device.
fn each<const N: usize>(
    device: &Recorder,
    bytes: [u64; N],
    call: impl Fn([&Memory; N]) -> Result<(), Error>,
) {
    let enough = bytes.map(|bytes| device.memory(bytes));
    call(enough.each_ref()).unwrap();
    for at in 0..N {
        let less = device.memory(bytes[at] - 1);
        let mut given = enough.each_ref();
        given[at] = &less;
        match call(given) {
            Err(Error::Refused(Refused::TooSmall { got, want, .. })) => {
                assert_eq!((got, want), (bytes[at] - 1, bytes[at]), "{at}");
            }
            other => panic!("{at}: {other:?}"),
        }
        let elsewhere = foreign(bytes[at]);
        given[at] = &elsewhere;
        assert_eq!(call(given), Err(Error::OtherDevice), "{at}");
    }
}

fn transfers(device: &Recorder) {
    let plane = |storage| Plane {
        storage,
        offset: 0,
        block_stride: 64,
        bytes: 64,
    };
    let map = PageMap::new(4, vec![plane(0), plane(1)]).unwrap();
    each(device, [256, 256], |[first, second]| {
        Table::new(device, &map, vec![first, second]).map(drop)
    });
    let cache = device.memory(256);
    let missing = Table::new(device, &map, vec![&cache]).err();
    let missing = missing.map(|error| matches!(error, Error::Refused(Refused::Pages(_))));
    assert_eq!(missing, Some(true));
    let table = Table::new(device, &map, vec![&cache, &cache]).unwrap();
    let ids = device.memory(8);
    for packing in [Packing::Pack, Packing::Unpack] {
        each(device, [256, 4], |[section, refused]| {
            table.transfer(device, &(), packing, &ids, section, refused)
        });
        let (section, refused) = (device.memory(256), device.memory(4));
        let ids = foreign(8);
        let transferred = table.transfer(device, &(), packing, &ids, &section, &refused);
        assert_eq!(transferred, Err(Error::OtherDevice));
    }
}

fn changes(device: &Recorder) {
    let layouts = LayoutTable::parse(LAYOUTS_JSON).unwrap();
    let shape = BlockShape {
        layers: 2,
        heads: 2,
        kernel_blocks: 1,
        tokens: 4,
        state_bytes: 8,
    };
    let change = HeadMajor::new(layouts.layout("LBHNC").unwrap(), &shape, 3).unwrap();
    let bytes = change.section_bytes() as u64;
    let loops = Loops::new(device, change).unwrap();
    for packing in [Packing::Pack, Packing::Unpack] {
        each(device, [bytes, bytes], |[verbatim, canonical]| {
            loops.change(device, &(), packing, verbatim, canonical)
        });
    }
}

fn rotations(device: &Recorder) {
    let angles = |rotary| Angles::new(device, &Turn::by_base(1e4, rotary, 1).unwrap()).unwrap();
    let states = device.memory(64);
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        for style in [Style::NeoX, Style::GptJ] {
            let keys = Keys {
                state_bytes: 8 * dtype.bytes(),
                offset: 0,
                rotary: 8,
                dtype,
                style,
            };
            angles(8).turn(device, &(), &keys, &states).unwrap();
            let elsewhere = angles(8).turn(device, &(), &keys, &foreign(64));
            assert_eq!(elsewhere, Err(Error::OtherDevice));
            for (pairs_of, other) in [
                (6, keys),
                (
                    8,
                    Keys {
                        offset: dtype.bytes(),
                        ..keys
                    },
                ),
                (
                    6,
                    Keys {
                        offset: 1,
                        rotary: 6,
                        ..keys
                    },
                ),
                (
                    8,
                    Keys {
                        state_bytes: 0,
                        ..keys
                    },
                ),
            ] {
                let refused = angles(pairs_of).turn(device, &(), &other, &states);
                let refused =
                    refused.map_err(|error| matches!(error, Error::Refused(Refused::Pages(_))));
                assert_eq!(refused, Err(true), "{other:?}");
            }
        }
    }
}

fn cachegen(device: &Recorder, element: Element) {
    let shape = Shape {
        element,
        layers: 1,
        halves: 2,
        tokens: 300,
        channels: 3,
    };
    // 600 rows of 3 channels; 6 channels in both planes, with one stream for 256 tokens and one for the rest.
    let (levels, tables, lengths, width) = (1800, 6 * 66, 12 * 4, element.bytes() as u64);
    let planes = Planes::of(&shape, 1800 * element.bytes()).unwrap();
    let section = CacheGen::new(device, planes).unwrap();
    for packing in [Packing::Pack, Packing::Unpack] {
        let bytes = [1800 * width, 600 * width, levels, 8];
        each(device, bytes, |[raw, largest, levels, refused]| {
            let rows = Rows {
                raw,
                largest,
                levels,
                refused,
            };
            section.rows(device, &(), packing, &rows)
        });
    }
    each(
        device,
        [levels, 6 * 128, tables],
        |[levels, counts, tables]| section.count(device, &(), levels, counts, tables),
    );
    let bytes = [levels, tables, 12 * 516, lengths];
    each(device, bytes, |[levels, tables, streams, lengths]| {
        section.encode(device, &(), levels, tables, streams, lengths)
    });
    let packed = device.memory(7);
    let bytes = [12 * 8, lengths, tables, levels];
    each(device, bytes, |[offsets, lengths, tables, levels]| {
        let streams = Streams {
            packed: &packed,
            offsets,
            lengths,
        };
        section.decode(device, &(), &streams, tables, levels)
    });
}

#[test]
fn memory_that_is_too_short_or_of_another_device_is_refused_and_every_kernel_has_a_launcher() {
    let device = Recorder::new();
    transfers(&device);
    changes(&device);
    rotations(&device);
    for element in [Element::Bf16, Element::F16, Element::F32] {
        cachegen(&device, element);
    }
    let modules = device.manifest.modules.iter();
    let names = modules.flat_map(|module| module.entries.iter().map(|entry| entry.name.clone()));
    assert_eq!(*device.launched.borrow(), names.collect());
}

#[test]
fn what_was_uploaded_to_another_device_is_refused() {
    let device = Recorder::new();
    let other = Recorder {
        number: 1,
        ..Recorder::new()
    };
    let angles = Angles::new(&other, &Turn::by_base(1e4, 8, 1).unwrap()).unwrap();
    let keys = Keys {
        state_bytes: 16,
        offset: 0,
        rotary: 8,
        dtype: Dtype::F16,
        style: Style::NeoX,
    };
    let states = device.memory(64);
    let refused = angles.turn(&device, &(), &keys, &states);
    assert_eq!(refused, Err(Error::OtherDevice));
}

#[test]
fn arguments_that_the_manifest_does_not_have_are_refused_by_name() {
    let manifest = Manifest::load().unwrap();
    let (_, entry) = manifest.entry("kv_to_canonical").unwrap();
    let right = [
        ("verbatim", Value::Pointer(1)),
        ("canonical", Value::Pointer(2)),
        ("loops", Value::Pointer(3)),
        ("run_bytes", Value::U64(4)),
    ];
    assert_eq!(words(entry, &right), Ok(vec![1, 2, 3, 4]));
    let mut wrong = right;
    wrong[3].1 = Value::U32(0);
    let mut swapped = right;
    swapped.swap(0, 1);
    for (arguments, expected) in [
        (&wrong[..], "run_bytes is a U64, not a U32"),
        (&swapped[..], "argument 0 is verbatim, not canonical"),
        (&right[..3], "3 arguments were given, expected 4"),
    ] {
        let refused = words(entry, arguments).unwrap_err();
        assert_eq!(refused.name(), "Arguments");
        assert!(refused.to_string().contains(expected), "{refused}");
    }
}

#[test]
fn a_small_number_lies_in_the_first_bytes_of_its_word() {
    let word = Value::U32(0x0102_0304).word().to_ne_bytes();
    assert_eq!(word[..4], 0x0102_0304u32.to_ne_bytes());
}
