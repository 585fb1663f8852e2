//! Turns of keys.

use crate::Rig;
use crate::data::{Data, FINITE};
use crate::report::{Check, Why, same};
use kvcachepool_gpu::cuda::buffer::Buffer;
use kvcachepool_kernels::launch::pages::Angles;
use kvcachepool_kernels::pages::{Dtype, Keys, Style, Turn};

const STATES: usize = 301;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        for style in [Style::NeoX, Style::GptJ] {
            for data in FINITE {
                let name = format!("kernels/kv_turn_{style:?}_{dtype:?}").to_lowercase();
                checks.push(Check::new(format!("{name}/{data:?}"), move |rig| {
                    turned(rig, dtype, style, data)
                }));
            }
        }
    }
    checks
}

fn turned(rig: &Rig, dtype: Dtype, style: Style, data: Data) -> Result<String, Why> {
    let kernels = rig.kernels()?;
    let mut moved = 0;
    for (pairs, before, behind) in [(64, 0, 128), (1, 3, 0), (33, 1, 5), (32, 512, 0)] {
        let row = before + 2 * pairs + behind;
        let keys = Keys {
            state_bytes: row * dtype.bytes(),
            offset: before * dtype.bytes(),
            rotary: 2 * pairs,
            dtype,
            style,
        };
        let turn = Turn::by_base(500_000.0, keys.rotary, -777).unwrap();
        let count = STATES * row;
        let mut states: Vec<u8> = match dtype {
            Dtype::Bf16 => bytes_of(&data.halves(count, 7, 0x7f80, 4)),
            Dtype::F16 => bytes_of(&data.halves(count, 10, 0x7c00, 4)),
            Dtype::F32 => {
                let numbers = data.wholes(count, 4);
                numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
            }
        };
        let on_device = Buffer::of(&rig.context, &states)?;
        let angles = Angles::new(kernels, &turn)?;
        angles.turn(kernels, &rig.stream, &keys, &on_device)?;
        rig.stream.synchronize()?;
        keys.turn(&mut states, &turn).unwrap();
        same("the states", &on_device.content()?, &states)?;
        moved += states.len();
    }
    Ok(format!("{moved} bytes"))
}

fn bytes_of(numbers: &[u16]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}
