//! How a tier packs objects, and how tiers share the room for packing.

use crate::layers::scratch::Room;
use kvcachepool_protocol::config::{PACKING_BYTES, UNPACKING_BYTES};
use kvcachepool_protocol::object::Codec;

/// Settings of the layer around one tier. Clones share the room.
#[derive(Debug, Clone)]
pub struct PackingOptions {
    pub(super) codec: Codec,
    pub(super) room: Room,
}

impl PackingOptions {
    /// The codec, and room for packing.
    pub fn new(codec: Codec) -> Self {
        let room = room(codec);
        Self { codec, room }
    }

    /// The same for a sidecar with this many tiers, each of which uses [`Self::of_another`].
    pub fn of_tiers(codec: Codec, tiers: usize) -> Self {
        let room = room(codec).of_tiers(tiers);
        Self { codec, room }
    }

    /// The same for another tier of the sidecar. With a codec each tier has its own room, so that one that hangs and uses it all does not
    /// delay the others. Without one, tiers only unpack, and share the room that every sidecar reserves.
    pub fn of_another(&self) -> Self {
        match self.codec {
            Codec::None => Self {
                room: self.room.of_another(),
                ..self.clone()
            },
            codec => Self::new(codec),
        }
    }

    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Room for packed bytes and for repeated reads.
    pub(in crate::layers) fn room(&self) -> Room {
        self.room.clone()
    }
}

/// More with a codec than for unpacking only.
fn room(codec: Codec) -> Room {
    Room::new(match codec {
        Codec::None => UNPACKING_BYTES,
        _ => PACKING_BYTES,
    })
}

impl Default for PackingOptions {
    fn default() -> Self {
        Self::new(Codec::None)
    }
}
