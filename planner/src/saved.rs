//! [`SavedTensor`]: a tensor that a layer keeps between its forward and its backward pass.
//!
//! Which they are is a runtime's choice ([`crate::runtime`]). What lives only during a pass is not here.

use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;
use serde::Serialize;

/// A tensor saved for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SavedTensor {
    /// The module that keeps it (`attention`, `mlp`, `moe`, `shared_expert`).
    pub module: &'static str,
    /// Its name within the module.
    pub name: &'static str,
    /// Elements on this rank.
    pub elements: u64,
    /// Their type.
    pub dtype: Dtype,
}

impl SavedTensor {
    /// Its size.
    pub fn bytes(&self) -> Bytes {
        self.dtype.bytes(self.elements)
    }
}
