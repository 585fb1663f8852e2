//! Gather, scatter and layout changes in every layout of the table.

use crate::Rig;
use crate::data::{Data, FINITE};
use crate::report::{Check, Why, holds, same};
use kvcachepool_gpu::cuda::buffer::Buffer;
use kvcachepool_kernels::launch::Packing;
use kvcachepool_kernels::launch::pages::{Loops, Table};
use kvcachepool_kernels::pages::{BlockShape, HeadMajor, PageMap};
use kvcachepool_protocol::layouts::{LAYOUTS_JSON, Layout, LayoutTable};

/// Blocks of a cache, and ids of them in no order: first and last among them, and two that the cache has not.
const BLOCKS: u32 = 37;
const IDS: [u32; 9] = [36, 5, 0, 12, 37, 11, u32::MAX, 35, 1];
/// Bytes behind which 32 bits do not reach.
const FAR_BYTES: u64 = 5 << 30;

/// Sizes of a block: small with odd states, words of every width, and what a model has.
fn shapes() -> [BlockShape; 4] {
    [
        (2, 3, 2, 5, 6),
        (3, 2, 1, 4, 8),
        (2, 1, 3, 2, 80),
        (4, 8, 1, 16, 256),
    ]
    .map(
        |(layers, heads, kernel_blocks, tokens, state_bytes)| BlockShape {
            layers,
            heads,
            kernel_blocks,
            tokens,
            state_bytes,
        },
    )
}

pub fn checks() -> Vec<Check> {
    let table = LayoutTable::parse(LAYOUTS_JSON).unwrap();
    let mut checks = Vec::new();
    for layout in table.layouts.into_iter().filter(|layout| layout.served) {
        for data in FINITE {
            let name = |kernel: &str| format!("kernels/{kernel}/{}/{data:?}", layout.name);
            let on = layout.clone();
            checks.push(Check::new(name("kv_gather"), move |rig| {
                transferred(rig, Packing::Pack, &on, data)
            }));
            let on = layout.clone();
            checks.push(Check::new(name("kv_scatter"), move |rig| {
                transferred(rig, Packing::Unpack, &on, data)
            }));
            let on = layout.clone();
            checks.push(Check::new(name("kv_to_canonical"), move |rig| {
                changed(rig, Packing::Pack, &on, data)
            }));
            let on = layout.clone();
            checks.push(Check::new(name("kv_to_verbatim"), move |rig| {
                changed(rig, Packing::Unpack, &on, data)
            }));
        }
        let on = layout.clone();
        let name = format!("kernels/kv_gather/{}/Far", layout.name);
        checks.push(Check::new(name, move |rig| far(rig, &on)));
    }
    checks
}

fn words(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_ne_bytes()).collect()
}

fn transferred(rig: &Rig, way: Packing, layout: &Layout, data: Data) -> Result<String, Why> {
    let kernels = rig.kernels()?;
    let mut moved = 0;
    for (number, shape) in shapes().into_iter().enumerate() {
        let map = PageMap::dense(layout, &shape, BLOCKS).unwrap();
        let mut cache = data.bytes(map.storage_bytes()[0], number as u64);
        let mut section = Data::Random.bytes(IDS.len() * map.block_bytes(), 77);
        if way == Packing::Unpack {
            section = data.bytes(section.len(), 5 + number as u64);
        }
        let on_device = Buffer::of(&rig.context, &cache)?;
        let there = Buffer::of(&rig.context, &section)?;
        let ids = Buffer::of(&rig.context, &words(&IDS))?;
        let refused = Buffer::of(&rig.context, &[0; 4])?;
        let table = Table::new(kernels, &map, vec![&on_device])?;
        table.transfer(kernels, &rig.stream, way, &ids, &there, &refused)?;
        rig.stream.synchronize()?;
        let mut left_out = 0u32;
        for (id, bytes) in IDS.iter().zip(section.chunks_exact_mut(map.block_bytes())) {
            match way {
                _ if *id >= BLOCKS => left_out += map.planes().len() as u32,
                Packing::Pack => map.gather(&[&cache], &[*id], bytes).unwrap(),
                Packing::Unpack => map.scatter(bytes, &[*id], &mut [&mut cache]).unwrap(),
            }
        }
        same("the section", &there.content()?, &section)?;
        same("the cache", &on_device.content()?, &cache)?;
        let said = refused.content()?;
        same(
            "the count of refused pieces",
            &said,
            &left_out.to_ne_bytes(),
        )?;
        moved += section.len();
    }
    Ok(format!("{moved} bytes of {} shapes", shapes().len()))
}

fn changed(rig: &Rig, way: Packing, layout: &Layout, data: Data) -> Result<String, Why> {
    let kernels = rig.kernels()?;
    let mut moved = 0;
    for (shape, blocks) in shapes()
        .into_iter()
        .flat_map(|shape| [(shape, 1), (shape, 3)])
    {
        let change = HeadMajor::new(layout, &shape, blocks).unwrap();
        let bytes = change.section_bytes();
        let (from, mut to) = (data.bytes(bytes, 9), vec![0; bytes]);
        match way {
            Packing::Pack => change.to_canonical(&from, &mut to).unwrap(),
            Packing::Unpack => change.to_verbatim(&from, &mut to).unwrap(),
        }
        let source = Buffer::of(&rig.context, &from)?;
        let target = Buffer::of(&rig.context, &vec![0; bytes])?;
        let loops = Loops::new(kernels, change)?;
        let (verbatim, canonical) = match way {
            Packing::Pack => (&source, &target),
            Packing::Unpack => (&target, &source),
        };
        loops.change(kernels, &rig.stream, way, verbatim, canonical)?;
        rig.stream.synchronize()?;
        same("the target", &target.content()?, &to)?;
        same("the source", &source.content()?, &from)?;
        moved += bytes;
    }
    Ok(format!("{moved} bytes"))
}

/// Blocks of a cache that is larger than 32 bits count.
fn far(rig: &Rig, layout: &Layout) -> Result<String, Why> {
    let kernels = rig.kernels()?;
    let shape = BlockShape {
        layers: 2,
        heads: 2,
        kernel_blocks: 1,
        tokens: 16,
        state_bytes: 256 << 10,
    };
    let block_bytes = shape.block_bytes().unwrap() as u64;
    let blocks = (FAR_BYTES / block_bytes) as u32;
    let (free, _) = rig.context.memory()?;
    if free < FAR_BYTES + (1 << 30) {
        return Err(Why::Skipped(format!("OutOfMemory: {free} bytes are free")));
    }
    let map = PageMap::dense(layout, &shape, blocks).unwrap();
    let cache = Buffer::new(&rig.context, map.storage_bytes()[0] as u64)
        .map_err(|failed| Why::Skipped(format!("OutOfMemory: {failed}")))?;
    let ids = [blocks - 1, 0];
    let want = Data::Random.bytes(ids.len() * block_bytes as usize, 3);
    for (id, mut bytes) in ids.iter().zip(want.chunks_exact(block_bytes as usize)) {
        for plane in map.planes() {
            let (piece, rest) = bytes.split_at(plane.bytes);
            let at = plane.offset + *id as usize * plane.block_stride;
            cache.write(at as u64, piece)?;
            bytes = rest;
        }
    }
    let section = Buffer::new(&rig.context, want.len() as u64)?;
    let refused = Buffer::of(&rig.context, &[0; 4])?;
    let table = Table::new(kernels, &map, vec![&cache])?;
    let ids = Buffer::of(&rig.context, &words(&ids))?;
    table.transfer(
        kernels,
        &rig.stream,
        Packing::Pack,
        &ids,
        &section,
        &refused,
    )?;
    rig.stream.synchronize()?;
    same("the section", &section.content()?, &want)?;
    holds(refused.content()? == [0; 4], "blocks were refused")?;
    Ok(format!(
        "block {} of a cache of {} bytes",
        blocks - 1,
        cache.bytes()
    ))
}
