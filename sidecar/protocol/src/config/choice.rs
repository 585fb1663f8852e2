//! Enums whose values have fixed names: in the config file, in a `KVCachePool`, and in logs.

/// An enum whose values have fixed names.
pub trait Choice {
    /// The names of all values in a config file.
    fn names(&self) -> &'static [&'static str];
    /// The names of all values in a `KVCachePool`, in the same order.
    fn pool_names(&self) -> &'static [&'static str];
    fn name(&self) -> &'static str;
    /// Sets the value with this name of either kind. Returns whether one has it.
    fn choose(&mut self, name: &str) -> bool;
}

/// Declares an enum with the names of its values. A second name is that in a `KVCachePool`, if it differs. Serde uses the names of a pool.
macro_rules! choice {
    (
        $(#[$doc:meta])*
        $name:ident { $($(#[$value_doc:meta])* $variant:ident = $text:literal $(| $in_pool:literal)?),+ $(,)? }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
        #[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
        pub enum $name { $($(#[$value_doc])* #[cfg_attr(feature = "cli", value(name = $text))] $variant),+ }

        choice!(@names $name { $($variant = $text $(| $in_pool)?),+ });

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(match self { $(Self::$variant => choice!(@last $text $($in_pool)?)),+ })
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(from)?;
                let names: &'static [&'static str] = &[$(choice!(@last $text $($in_pool)?)),+];
                match text.as_str() {
                    $(choice!(@last $text $($in_pool)?) => Ok(Self::$variant),)+
                    other => Err(serde::de::Error::unknown_variant(other, names)),
                }
            }
        }
    };
    (@names $name:ident { $($variant:ident = $text:literal $(| $in_pool:literal)?),+ }) => {
        impl $crate::config::Choice for $name {
            fn names(&self) -> &'static [&'static str] { &[$($text),+] }
            fn pool_names(&self) -> &'static [&'static str] { &[$(choice!(@last $text $($in_pool)?)),+] }
            fn name(&self) -> &'static str { match self { $(Self::$variant => $text),+ } }
            fn choose(&mut self, name: &str) -> bool {
                match name { $($text $(| $in_pool)? => *self = Self::$variant,)+ _ => return false }
                true
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($crate::config::Choice::name(self))
            }
        }
    };
    (@last $text:literal) => { $text };
    (@last $text:literal $in_pool:literal) => { $in_pool };
}

pub(super) use choice;
