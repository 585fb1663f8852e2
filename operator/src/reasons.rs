//! How a table of reasons is declared: `api`, `inject` and `status` each have one, and docs and tests walk all three.

/// Declares the enum `Reason`, its names and its sentences in one place.
macro_rules! reasons {
    ($about:literal $($name:ident = $sentence:literal,)+) => {
        #[doc = $about]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $(#[doc = $sentence] $name,)+
        }

        impl Reason {
            /// All of them, in the order of the docs.
            pub const ALL: &[Reason] = &[$(Reason::$name),+];

            /// Its name, never changed once published.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name)),+ }
            }

            /// What it means and what to do, for docs.
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
