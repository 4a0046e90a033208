//! [`table`]: functions of a library opened at run time, all looked up at once.
//!
//! The bindings that `cudarc` generates look a function up at its first call and panic where the
//! library lacks it; and they return results as Rust enums, which a newer library's codes are no
//! values of. So what this crate calls stands in tables: a required function that is missing is an
//! answer when the library is opened, an optional one is an `Option`, a result is a number. Types of
//! arguments are those of `cudarc`.

/// Declares a struct of function pointers with a `resolve` that looks them up by name.
macro_rules! table {
    (
        $(#[$meta:meta])*
        $name:ident {
            $($symbol:ident: fn($($arg:ty),* $(,)?) -> $ret:ty;)*
        }
        optional {
            $($maybe:ident: fn($($maybe_arg:ty),* $(,)?) -> $maybe_ret:ty;)*
        }
    ) => {
        $(#[$meta])*
        #[expect(non_snake_case, reason = "functions keep the names their library gives them")]
        #[derive(Clone, Copy)]
        pub(super) struct $name {
            $(pub(super) $symbol: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $(pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_arg),*) -> $maybe_ret>,)*
        }

        impl $name {
            /// Looks up every function; the error is the name of a required one that is missing.
            ///
            /// # Safety
            /// `find` gives addresses in a library that stays loaded, whose functions of these
            /// names have these signatures.
            #[expect(non_snake_case, reason = "functions keep the names their library gives them")]
            pub(super) unsafe fn resolve(
                find: impl Fn(&str) -> Option<*const std::ffi::c_void>,
            ) -> Result<Self, &'static str> {
                $(
                    let address = find(stringify!($symbol)).ok_or(stringify!($symbol))?;
                    // SAFETY: the caller's.
                    let $symbol = unsafe {
                        std::mem::transmute::<
                            *const std::ffi::c_void,
                            unsafe extern "C" fn($($arg),*) -> $ret,
                        >(address)
                    };
                )*
                $(
                    // SAFETY: the caller's.
                    let $maybe = find(stringify!($maybe)).map(|address| unsafe {
                        std::mem::transmute::<
                            *const std::ffi::c_void,
                            unsafe extern "C" fn($($maybe_arg),*) -> $maybe_ret,
                        >(address)
                    });
                )*
                Ok(Self { $($symbol,)* $($maybe,)* })
            }
        }
    };
}
pub(super) use table;
