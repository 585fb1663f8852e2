//! How a tier's objects are packed, and whose room for that is whose.

use crate::layers::scratch::Room;
use kvcachepool_protocol::object::Codec;

/// Settings of the layer around one tier. Clones share the room.
#[derive(Debug, Clone)]
pub struct PackingOptions {
    pub(super) codec: Codec,
    pub(super) room: Room,
}

impl PackingOptions {
    /// How objects are packed, and room for that.
    pub fn new(codec: Codec) -> Self {
        let room = Room::new(codec);
        Self { codec, room }
    }

    /// The same for a sidecar of so many tiers, each of which has [`Self::of_another`].
    pub fn of_tiers(codec: Codec, tiers: usize) -> Self {
        let room = Room::new(codec).of_tiers(tiers);
        Self { codec, room }
    }

    /// The same for another tier of the sidecar. Where objects are packed each tier has room of its own, so that one that hangs with all of
    /// it in use holds up no other; where they only may have to be unpacked, each has a share of what every sidecar has to spare.
    pub fn of_another(&self) -> Self {
        match self.codec {
            Codec::None => Self {
                room: self.room.of_another(),
                ..self.clone()
            },
            codec => Self::new(codec),
        }
    }

    /// How objects are packed.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Room for what is packed, and for what is read once more.
    pub(in crate::layers) fn room(&self) -> Room {
        self.room.clone()
    }
}

impl Default for PackingOptions {
    fn default() -> Self {
        Self::new(Codec::None)
    }
}
