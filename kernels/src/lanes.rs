//! The same Rust compiled again for the vectors of the CPU at hand. The workspace is built for any x86-64, whose vectors hold four numbers;
//! with AVX2 they hold eight, with AVX-512 sixteen.
#![allow(
    unsafe_code,
    reason = "code for more instructions than the crate is built for is called after a look at the CPU"
)]

/// Loops over bytes. `run` and all that it calls in its loops are `#[inline(always)]`: only what is inlined there is compiled again.
pub trait Work {
    /// What comes out.
    type Done;
    /// Does it.
    fn run(self) -> Self::Done;
}

/// Does the work with the widest vectors that this CPU has. What comes out does not depend on them.
#[cfg(target_arch = "x86_64")]
pub fn widest<W: Work>(work: W) -> W::Done {
    let eight = is_x86_feature_detected!("avx2");
    let sixteen = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512cd")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if sixteen {
        // SAFETY: the CPU has just said that it has the five features that `avx512` is compiled for.
        unsafe { avx512(work) }
    } else if eight {
        // SAFETY: the CPU has just said that it has AVX2, which `avx2` is compiled for.
        unsafe { avx2(work) }
    } else {
        work.run()
    }
}

/// Does the work. Every CPU of this kind has the vectors that the crate is built for, and few have more.
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

    /// All halves as bfloat16.
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
            // SAFETY: the CPU has just said that it has AVX2.
            assert!(unsafe { avx2(Convert) } == plain);
        }
    }
}
