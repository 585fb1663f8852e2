//! One table of settings. A section of the config declares each of its keys once: path, type, default, values, whether a change needs a
//! restart, the field of a `KVCachePool` that sets it, and its description. Everything else is derived from these rows.

use super::slot::{Form, Slot};
use super::{Config, Reload};
use std::ops::RangeInclusive;
use std::sync::LazyLock;

pub(super) const KI: u64 = 1 << 10;
pub(super) const MI: u64 = 1 << 20;
pub(super) const GI: u64 = 1 << 30;
pub(super) const TI: u64 = 1 << 40;
pub(super) const SECOND_MS: u64 = 1_000;
pub(super) const HOUR_MS: u64 = 3_600 * SECOND_MS;
pub(super) const YEAR_MS: u64 = 8_760 * HOUR_MS;

/// Declares a section. A row is `path field: type = default, form(values), reload, field of a pool`. Without a default the type's own counts,
/// and the last part is absent if no field of a pool sets the key. The sections within this one follow after its rows.
macro_rules! section {
    (
        $(#[$meta:meta])*
        $name:ident {
            $(
                $(#[doc = $about:literal])+
                $path:literal $field:ident: $type:ty $(= $default:expr)?, $slot:ident $(($values:expr))?, $reload:ident $(, $place:expr)?;
            )*
            $(sections { $($(#[$part_meta:meta])* $part:ident: $part_type:ty,)+ })?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, PartialEq, Eq)]
        pub struct $name {
            $($(#[doc = $about])+ pub $field: $type,)*
            $($($(#[$part_meta])* pub $part: $part_type,)+)?
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $($field: section!(@default $($default)?),)*
                    $($($part: Default::default(),)+)?
                }
            }
        }

        impl $name {
            /// The keys of this section, then those of the sections in it.
            pub(in $crate::config) fn keys(&mut self) -> Vec<$crate::config::section::Key<'_>> {
                let own = vec![$($crate::config::section::Key {
                    path: $path,
                    about: concat!($($about),+).trim_start(),
                    reload: $crate::config::Reload::$reload,
                    slot: $crate::config::slot::Slot::$slot(&mut self.$field $(, $values)?),
                    place: [$($place)?].into_iter().next(),
                }),*];
                [own $($(, self.$part.keys())+)?].into_iter().flatten().collect()
            }
        }
    };
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
}

pub(super) use section;

/// One key of a config, with mutable access to its value.
pub(super) struct Key<'a> {
    pub path: &'static str,
    pub about: &'static str,
    pub reload: Reload,
    pub slot: Slot<'a>,
    /// The field of a pool that sets the key.
    pub place: Option<Place>,
}

/// A field of a `KVCachePool`.
pub(super) struct Place {
    field: &'static str,
    required: bool,
    default: Option<&'static str>,
    range: Option<RangeInclusive<u64>>,
}

/// The field with this path, with default and range of the key.
pub(super) fn field(field: &'static str) -> Place {
    Place {
        field,
        required: false,
        default: None,
        range: None,
    }
}

impl Place {
    /// A pool must have the field.
    pub fn required(self) -> Self {
        Self {
            required: true,
            ..self
        }
    }

    /// The field has another default than the key.
    pub fn or(self, default: &'static str) -> Self {
        Self {
            default: Some(default),
            ..self
        }
    }

    /// The field has a smaller range than the key.
    pub fn within(self, range: RangeInclusive<u64>) -> Self {
        Self {
            range: Some(range),
            ..self
        }
    }
}

/// A key that a field of a `KVCachePool` sets.
pub struct PoolKey {
    pub key: &'static str,
    /// Path of the field, for example `spec.cache.chunkTokens`.
    pub field: &'static str,
    /// Whether a pool must have the field.
    pub required: bool,
    /// The value of an absent field.
    pub default: String,
    pub values: Values,
}

/// The values of a key. Ranges are in bytes or milliseconds.
pub enum Values {
    Size(RangeInclusive<u64>),
    Time(RangeInclusive<u64>),
    Number(RangeInclusive<u64>),
    Text(&'static Form),
    /// Names in a pool.
    Choice(&'static [&'static str]),
    /// Any other form, which the config's parser checks.
    Other,
}

/// The keys that fields of a pool set.
pub fn pool_keys() -> &'static [PoolKey] {
    static KEYS: LazyLock<Vec<PoolKey>> = LazyLock::new(|| {
        let mut config = Config::default();
        config.keys().into_iter().filter_map(pool_key).collect()
    });
    &KEYS
}

fn pool_key(key: Key<'_>) -> Option<PoolKey> {
    let place = key.place?;
    let own = |range: &RangeInclusive<u64>| place.range.clone().unwrap_or(range.clone());
    Some(PoolKey {
        key: key.path,
        field: place.field,
        required: place.required,
        default: place
            .default
            .map_or_else(|| key.slot.text(), str::to_string),
        values: match &key.slot {
            Slot::Size(_, range) => Values::Size(own(range)),
            Slot::Time(_, range) => Values::Time(own(range)),
            Slot::Number(_, range) => Values::Number(own(range)),
            Slot::Count(_, range) => {
                Values::Number(own(&(u64::from(*range.start())..=u64::from(*range.end()))))
            }
            Slot::Text(_, form) => Values::Text(form),
            Slot::Choice(choice) => Values::Choice(choice.pool_names()),
            _ => Values::Other,
        },
    })
}
