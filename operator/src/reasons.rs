//! The macro that declares a table of reasons. `api`, `inject` and `status` each have one; docs and tests iterate over all three.

/// Declares the enum `Reason` with its names and sentences.
macro_rules! reasons {
    ($about:literal $($name:ident = $sentence:literal,)+) => {
        #[doc = $about]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $(#[doc = $sentence] $name,)+
        }

        impl Reason {
            /// All reasons, in the order of the docs.
            pub const ALL: &[Reason] = &[$(Reason::$name),+];

            /// Name of the reason, never changed once published.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name)),+ }
            }

            /// What the reason means and what to do, for the docs.
            #[must_use]
            pub fn sentence(self) -> &'static str {
                match self { $(Self::$name => $sentence),+ }
            }
        }

        impl std::fmt::Display for Reason {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

pub(crate) use reasons;
