//! What is wrong with a description of pages or with a call, by name. After an error no byte was written.

/// Why pages were not moved or changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PagesError {
    /// A size that must be positive is zero.
    #[error("{what} is zero")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// Sizes whose product no machine can address.
    #[error("{what} overflows: sizes this large address nothing")]
    Overflow {
        /// Which product.
        what: &'static str,
    },
    /// A layout that the table does not serve, or whose order is not one of L, B, H, N with C innermost.
    #[error("layout {layout} is not served: use one of the layout table's")]
    Unserved {
        /// Its name.
        layout: String,
    },
    /// A block id that the KV cache does not have.
    #[error("block {block} of a KV cache of {blocks} blocks")]
    BlockOutOfRange {
        /// The id.
        block: u32,
        /// Ids are below this.
        blocks: u32,
    },
    /// A block is the destination of two copies: which one would stay is chance.
    #[error("block {block} is written twice in one scatter")]
    BlockTwice {
        /// The id.
        block: u32,
    },
    /// Two planes, or two blocks of one, share bytes.
    #[error("planes {first} and {second} share bytes")]
    PlanesOverlap {
        /// Index of one plane.
        first: usize,
        /// Index of the other; equal to `first` where a plane's blocks overlap each other.
        second: usize,
    },
    /// A plane lies in a storage that the call did not bring.
    #[error("plane {plane} lies in storage {storage}, and {got} were given")]
    StorageMissing {
        /// Index of the plane.
        plane: usize,
        /// Index of the storage.
        storage: usize,
        /// Storages given.
        got: usize,
    },
    /// A storage ends before its planes do.
    #[error("storage {storage} has {got} bytes, its planes need {want}")]
    StorageTooSmall {
        /// Index of the storage.
        storage: usize,
        /// Its bytes.
        got: usize,
        /// Bytes that the planes reach to.
        want: usize,
    },
    /// A buffer has not exactly the bytes that it must have.
    #[error("{what} has {got} bytes, not {want}")]
    Size {
        /// Which buffer.
        what: &'static str,
        /// Its bytes.
        got: usize,
        /// The bytes that it must have.
        want: usize,
    },
    /// Heads outside of the section.
    #[error("heads {first}..{end} of a section of {heads}")]
    HeadsOutOfRange {
        /// First head asked for.
        first: usize,
        /// One behind the last.
        end: usize,
        /// Heads of the section.
        heads: usize,
    },
    /// Rotation turns pairs of elements.
    #[error("a rotary size of {elements} elements: it must be even and not zero")]
    OddRotarySize {
        /// Elements.
        elements: usize,
    },
    /// The key lies outside of its state.
    #[error("a key that ends at byte {end} of a state of {state_bytes}")]
    KeyOutsideState {
        /// One behind the key's last rotated byte.
        end: usize,
        /// Bytes of a state.
        state_bytes: usize,
    },
    /// Not one angle per pair of elements.
    #[error("{cosines} cosines and {sines} sines for {pairs} pairs")]
    AngleCount {
        /// Cosines given.
        cosines: usize,
        /// Sines given.
        sines: usize,
        /// Pairs of a key.
        pairs: usize,
    },
    /// A cosine and a sine that belong to no angle: keys would change their length.
    #[error(
        "angle {pair} is no rotation: cos^2 + sin^2 is not 1; divide the model's scaling factor out of its table"
    )]
    NotARotation {
        /// Index of the pair.
        pair: usize,
    },
    /// A base of frequencies must be finite and positive, frequencies finite.
    #[error("frequencies of rotary embedding must be finite, their base positive")]
    BadFrequency,
}
