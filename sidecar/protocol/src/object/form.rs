//! The form of a section's raw bytes: number type and dimensions.

/// Maximum dimensions of a block.
pub const MAX_DIMS: usize = 8;

/// Number type of the engine's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(u8)]
pub enum Element {
    /// Opaque bytes.
    #[default]
    Opaque = 0,
    /// bfloat16, little-endian.
    Bf16 = 1,
    /// IEEE half precision, little-endian.
    F16 = 2,
    /// IEEE single precision, little-endian.
    F32 = 3,
}

impl Element {
    /// Bytes per number.
    pub fn bytes(self) -> usize {
        match self {
            Self::Opaque => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The type for torch's name; [`Element::Opaque`] for unknown names.
    pub fn of_torch(name: &str) -> Self {
        match name {
            "torch.bfloat16" => Self::Bf16,
            "torch.float16" => Self::F16,
            "torch.float32" => Self::F32,
            _ => Self::Opaque,
        }
    }
}

/// The meaning of a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Axis {
    Layer = 1,
    /// Keys, then values.
    Half = 2,
    Token = 3,
    /// Numbers of a token in one half of one layer.
    Channel = 4,
}

impl Axis {
    pub const ALL: [Self; 4] = [Self::Layer, Self::Half, Self::Token, Self::Channel];

    /// Name in layout descriptors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Layer => "layer",
            Self::Half => "half",
            Self::Token => "token",
            Self::Channel => "channel",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|axis| axis.name() == name)
    }

    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|axis| *axis as u8 == number)
    }
}

/// One dimension of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dim {
    pub axis: Axis,
    /// Extent, at least 1.
    pub size: u32,
}

/// The form of all sections of an object: contiguous blocks with the same dimensions. An axis may have several dimensions (heads and
/// numbers of a head are both channels); the outer one counts in steps of the inner one's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Form {
    element: Element,
    /// The existing dimensions, followed by `None`.
    dims: [Option<Dim>; MAX_DIMS],
}

impl Form {
    /// Numbers without known dimensions.
    pub fn flat(element: Element) -> Self {
        Self {
            element,
            ..Self::default()
        }
    }

    /// Numbers with the dimensions of a block, from the outermost to the innermost. `None` for too many dimensions, an empty one, more than
    /// two halves, or a block longer than a section can be.
    pub fn new(element: Element, dims: &[Dim]) -> Option<Self> {
        let mut form = Self::flat(element);
        for (at, dim) in dims.iter().enumerate() {
            *form.dims.get_mut(at)? = (dim.size > 0).then_some(Some(*dim))?;
        }
        let bytes = dims.iter().try_fold(element.bytes() as u32, |bytes, dim| {
            bytes.checked_mul(dim.size)
        });
        (bytes.is_some() && form.size(Axis::Half) <= 2).then_some(form)
    }

    pub fn element(&self) -> Element {
        self.element
    }

    /// Dimensions of a block, from the outermost to the innermost; empty if unknown.
    pub fn dims(&self) -> impl DoubleEndedIterator<Item = Dim> + '_ {
        self.dims.iter().flatten().copied()
    }

    /// Total extent of a block along an axis; 1 without such a dimension.
    pub fn size(&self, axis: Axis) -> u32 {
        let along = self.dims().filter(|dim| dim.axis == axis);
        // The product of all extents is at most the bytes of a block.
        along.fold(1, |size, dim| size.saturating_mul(dim.size))
    }

    /// Bytes per block. `None` if the dimensions are unknown.
    pub fn block_bytes(&self) -> Option<u32> {
        self.dims[0]?;
        Some(
            self.dims()
                .fold(self.element.bytes() as u32, |bytes, dim| bytes * dim.size),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(list: &[(Axis, u32)]) -> Vec<Dim> {
        let dim = |(axis, size): &(Axis, u32)| Dim {
            axis: *axis,
            size: *size,
        };
        list.iter().map(dim).collect()
    }

    #[test]
    fn an_axis_may_have_several_dimensions() {
        let list = dims(&[
            (Axis::Layer, 3),
            (Axis::Channel, 8),
            (Axis::Token, 16),
            (Axis::Half, 2),
            (Axis::Channel, 64),
        ]);
        let form = Form::new(Element::Bf16, &list).unwrap();
        assert_eq!(form.dims().collect::<Vec<_>>(), list);
        assert_eq!(
            Axis::ALL.map(|axis| form.size(axis)),
            [3, 2, 16, 512],
            "{form:?}"
        );
        assert_eq!(form.block_bytes(), Some(3 * 2 * 16 * 512 * 2));
        assert_eq!(Form::flat(Element::F32).block_bytes(), None);
        assert_eq!(Form::flat(Element::F32).size(Axis::Layer), 1);
    }

    #[test]
    fn what_no_section_can_be_is_no_form() {
        for (list, what) in [
            (vec![(Axis::Token, 1); MAX_DIMS + 1], "too many"),
            (vec![(Axis::Token, 4), (Axis::Channel, 0)], "empty"),
            (vec![(Axis::Half, 3)], "three halves"),
            (vec![(Axis::Half, 2), (Axis::Half, 2)], "four halves"),
            (
                vec![(Axis::Token, 1 << 16), (Axis::Channel, 1 << 15)],
                "long",
            ),
        ] {
            assert_eq!(Form::new(Element::F16, &dims(&list)), None, "{what}");
        }
        assert!(Form::new(Element::F16, &[]).is_some());
        assert!(Form::new(Element::F16, &dims(&[(Axis::Token, 1); MAX_DIMS])).is_some());
    }

    #[test]
    fn axes_have_names_and_numbers() {
        for axis in Axis::ALL {
            assert_eq!(Axis::named(axis.name()), Some(axis));
            assert_eq!(Axis::numbered(axis as u8), Some(axis));
        }
        assert_eq!((Axis::named("head"), Axis::numbered(0)), (None, None));
    }
}
