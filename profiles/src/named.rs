//! [`named!`](crate::named!): closed sets whose members have names, each written once.

/// Declares an enum of named variants: the type, its list `ALL` in the order of declaration, and
/// `name`, which is also the key in JSON. A variant cannot be left out of either.
///
/// The crate that uses it depends on `serde`.
///
/// ```
/// moefold_profiles::named! {
///     /// Sides of a coin.
///     pub enum Side {
///         /// The head.
///         Obverse = "heads",
///         /// The other.
///         Reverse = "tails",
///     }
/// }
/// assert_eq!(Side::ALL.map(Side::name), ["heads", "tails"]);
/// ```
#[macro_export]
macro_rules! named {
    (
        $(#[$about:meta])*
        pub enum $Set:ident { $($(#[$doc:meta])* $Variant:ident = $name:literal),+ $(,)? }
    ) => {
        $(#[$about])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash,
            ::serde::Serialize, ::serde::Deserialize,
        )]
        pub enum $Set {
            $($(#[$doc])* #[serde(rename = $name)] $Variant,)+
        }

        impl $Set {
            /// All of them, in order.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$Variant),+];

            /// Its name in files, in tables and on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $name,)+
                }
            }
        }
    };
}
