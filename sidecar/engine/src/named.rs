//! Enums whose values have fixed names in metrics and status.

/// Declares an enum with `ALL`, its values in this order, and `name`. A value without a name of its own has that of its variant.
#[macro_export]
macro_rules! named {
    (
        $(#[$doc:meta])*
        pub enum $named:ident { $($(#[$value_doc:meta])* $value:ident $(= $name:literal)?),+ $(,)? }
    ) => {
        $(#[$doc])*
        pub enum $named { $($(#[$value_doc])* $value),+ }

        impl $named {
            pub const ALL: [Self; [$(stringify!($value)),+].len()] = [$(Self::$value),+];

            /// Name in metrics and status.
            pub fn name(self) -> &'static str {
                match self { $(Self::$value => $crate::named!(@name $value $($name)?)),+ }
            }
        }
    };
    (@name $value:ident) => { stringify!($value) };
    (@name $value:ident $name:literal) => { $name };
}
