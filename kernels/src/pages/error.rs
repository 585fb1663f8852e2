//! Errors of page descriptions and calls. A call that fails has written nothing.

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PagesError {
    #[error("{what} is zero")]
    Zero { what: &'static str },
    /// Sizes whose product overflows `usize`.
    #[error("{what} overflows: sizes this large address nothing")]
    Overflow { what: &'static str },
    /// A layout that is unknown, or whose order is not a permutation of L, B, H, N with C innermost.
    #[error("layout {layout} is not supported: use one of the layout table")]
    Unserved { layout: String },
    /// A block id outside the KV cache.
    #[error("block {block} does not exist: the KV cache has {blocks} blocks")]
    BlockOutOfRange {
        block: u32,
        /// Ids are below this.
        blocks: u32,
    },
    /// A block is the destination of two copies, so its final content would be undefined.
    #[error("block {block} is written twice in one scatter")]
    BlockTwice { block: u32 },
    /// Two planes, or two blocks of one, share bytes.
    #[error("planes {first} and {second} share bytes")]
    PlanesOverlap {
        first: usize,
        /// Index of the other plane. Equal to `first` if the plane's own blocks overlap.
        second: usize,
    },
    /// A plane refers to a storage that was not passed.
    #[error("plane {plane} is in storage {storage}, but only {got} storages were given")]
    StorageMissing {
        plane: usize,
        storage: usize,
        /// Number of storages passed.
        got: usize,
    },
    /// A storage is shorter than its planes need.
    #[error("storage {storage} has {got} bytes, its planes need {want}")]
    StorageTooSmall {
        storage: usize,
        /// Its length in bytes.
        got: usize,
        /// The length in bytes that its planes need.
        want: usize,
    },
    /// A buffer has the wrong length.
    #[error("{what} has {got} bytes, not {want}")]
    Size {
        what: &'static str,
        /// Its length in bytes.
        got: usize,
        /// The required length in bytes.
        want: usize,
    },
    /// Heads outside the section.
    #[error("heads {first}..{end} are outside the section, which has {heads} heads")]
    HeadsOutOfRange {
        /// First requested head.
        first: usize,
        /// End of the range, exclusive.
        end: usize,
        heads: usize,
    },
    /// The rotary size must be even, because rotation acts on pairs.
    #[error("the rotary size is {elements}, but must be even and not zero")]
    OddRotarySize { elements: usize },
    /// The key extends beyond its state.
    #[error("a key ends at byte {end}, beyond its state of {state_bytes} bytes")]
    KeyOutsideState {
        /// End of the key's rotated bytes, exclusive.
        end: usize,
        state_bytes: usize,
    },
    /// The number of angles differs from the number of pairs.
    #[error("{cosines} cosines and {sines} sines for {pairs} pairs")]
    AngleCount {
        cosines: usize,
        sines: usize,
        pairs: usize,
    },
    /// A cosine and a sine that form no rotation: keys would change their length.
    #[error(
        "angle {pair} is not a rotation: cos^2 + sin^2 is not 1; divide the model's scaling factor out of its table"
    )]
    NotARotation { pair: usize },
    /// The base of frequencies must be finite and positive, and frequencies finite.
    #[error("frequencies of rotary embedding must be finite, their base positive")]
    BadFrequency,
}
