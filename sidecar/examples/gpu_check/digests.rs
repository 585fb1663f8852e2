//! Digests of sections.

use crate::Rig;
use crate::data::{Data, FINITE};
use crate::report::{Check, Why, same};
use kvcachepool_protocol::object::digest;
use kvcachepool_sidecar::gpu::cuda::buffer::Buffer;
use kvcachepool_sidecar::gpu::cuda::families::Sections;

const BYTES: u64 = 3 << 20;
/// Every length up to some bytes beyond a block of 1 KiB, then blocks, groups of eight, and what a section has.
const SHORT: u64 = 1_100;
const LONG: [u64; 9] = [
    2_048,
    8_191,
    8_192,
    8_193,
    9_216,
    9_217,
    65_536,
    1_000_003,
    2 << 20,
];

pub fn checks() -> Vec<Check> {
    let named = |data| format!("kernels/kv_digest/{data:?}");
    FINITE
        .map(|data| Check::new(named(data), move |rig| digested(rig, data)))
        .into()
}

fn digested(rig: &Rig, data: Data) -> Result<String, Why> {
    let kernels = rig.kernels()?;
    let bytes = data.bytes(BYTES as usize, 12);
    let on_device = Buffer::of(&rig.context, &bytes)?;
    // As a section begins in a slot, and anywhere.
    let ranges: Vec<(u64, u64)> = [0, 64, 7]
        .into_iter()
        .flat_map(|at| (0..=SHORT).chain(LONG).map(move |length| (at, length)))
        .collect();
    let list: Vec<_> = ranges
        .iter()
        .map(|(at, length)| (&on_device, *at, *length))
        .collect();
    let sections = Sections::new(kernels, &list)?;
    let digests = Buffer::of(&rig.context, &vec![0; 16 * list.len()])?;
    kernels.digest(&rig.stream, &sections, &digests)?;
    rig.stream.synchronize()?;
    let found = digests.content()?;
    for ((at, length), found) in ranges.iter().zip(found.chunks_exact(16)) {
        let want = digest(&bytes[*at as usize..(at + length) as usize]);
        same(
            &format!("the digest of {length} bytes from {at} on"),
            found,
            &want,
        )?;
    }
    same("the bytes", &on_device.content()?, &bytes)?;
    Ok(format!("{} sections", ranges.len()))
}
