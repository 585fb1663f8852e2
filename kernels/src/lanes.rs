//! The same Rust code compiled again for the vector instructions of the CPU. The workspace is built for baseline x86-64, whose vectors hold
//! four numbers; AVX2 vectors hold eight, AVX-512 vectors sixteen.
#![allow(
    unsafe_code,
    reason = "functions with target features are called after a check of the CPU's features"
)]

/// Loops over bytes. `run` and everything it calls in its loops must be `#[inline(always)]`, because only inlined code is compiled again.
pub trait Work {
    type Done;
    fn run(self) -> Self::Done;
}

/// Runs the work with the widest vectors of this CPU. The result does not depend on them.
#[cfg(target_arch = "x86_64")]
pub fn widest<W: Work>(work: W) -> W::Done {
    let eight = is_x86_feature_detected!("avx2");
    let sixteen = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512cd")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if sixteen {
        // SAFETY: the CPU reports the five features that `avx512` is compiled for.
        unsafe { avx512(work) }
    } else if eight {
        // SAFETY: the CPU reports AVX2, which `avx2` is compiled for.
        unsafe { avx2(work) }
    } else {
        work.run()
    }
}

/// Runs the work. Other architectures have one code path: the baseline vectors are the usual ones.
#[cfg(not(target_arch = "x86_64"))]
pub fn widest<W: Work>(work: W) -> W::Done {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<W: Work>(work: W) -> W::Done {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
fn avx512<W: Work>(work: W) -> W::Done {
    work.run()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::{Bf16, F16, Number};

    /// Converts all halves to bfloat16.
    struct Convert;

    impl Work for Convert {
        type Done = Vec<[u8; 2]>;

        #[inline(always)]
        fn run(self) -> Self::Done {
            let mut numbers: Vec<_> = (0..=u16::MAX).map(u16::to_le_bytes).collect();
            for number in &mut numbers {
                *number = Bf16::nearest(F16::value(*number) * 1.7);
            }
            numbers
        }
    }

    #[test]
    fn what_comes_out_does_not_depend_on_vectors() {
        let plain = Convert.run();
        assert!(widest(Convert) == plain);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU reports AVX2.
            assert!(unsafe { avx2(Convert) } == plain);
        }
    }
}
