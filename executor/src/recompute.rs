//! [`Kept`]: what a module's forward saves for its backward, or nothing where it runs again.
//!
//! Every module of a layer that may be recomputed is a function of what is saved before it, without random
//! numbers, so running it again gives the same bits. Which modules do is said by a
//! [`Recompute`] set when a layer runs forward: a module that the set covers lets go of
//! its result as soon as the modules after it have read it, and its backward asks for it again. A layer that
//! runs again as a whole keeps its input ([`crate::stage`]). How tokens were routed is kept whatever runs
//! again: row maps are small, and with them neither the host nor other ranks are asked a second time.

use moefold_planner::choice::{Module, Recompute};

use crate::error::Error;
use crate::rank::Context;

/// See the module's documentation.
#[derive(Debug)]
pub struct Kept<T>(Option<T>);

impl<T> Kept<T> {
    /// The result of a module that has just run.
    pub fn new(result: T) -> Self {
        Self(Some(result))
    }

    /// Of a module that runs later, or only when it is asked for again.
    pub fn later() -> Self {
        Self(None)
    }

    /// The result.
    ///
    /// # Panics
    /// When it was let go of and has not been asked for again.
    pub fn get(&self) -> &T {
        self.0
            .as_ref()
            .expect("a module's result is there or runs again")
    }

    /// The result, to be changed.
    ///
    /// # Panics
    /// As [`Kept::get`].
    pub fn get_mut(&mut self) -> &mut T {
        self.0
            .as_mut()
            .expect("a module's result is there or runs again")
    }

    /// The result where it is there, to be moved.
    pub(crate) fn there(&mut self) -> Option<&mut T> {
        self.0.as_mut()
    }

    /// Lets go of it where `again` covers the module that it is of.
    pub fn drop_of(&mut self, module: Module, again: &Recompute) {
        if again.covers(module) {
            self.0 = None;
        }
    }

    /// The result, from running the module again where it was let go of.
    pub fn again(
        &mut self,
        cx: &Context,
        run: impl FnOnce() -> Result<T, Error>,
    ) -> Result<&T, Error> {
        if self.0.is_none() {
            self.0 = Some(cx.again(run)?);
        }
        Ok(self.get())
    }

    /// The result, of which nobody else has need.
    ///
    /// # Panics
    /// As [`Kept::get`].
    pub fn into_inner(self) -> T {
        self.0.expect("a module's result is there or runs again")
    }
}
