//! Tensors as kernels take them: by their address, with rows that start where wide accesses may.

use crate::cuda::platform::Address;
use crate::cuda::program::Arg;
use crate::tensor::Tensor;

impl Arg {
    /// The address of a tensor's first element, or null.
    pub(crate) fn optional(tensor: Option<&Tensor>) -> Self {
        tensor.map_or(Self::Address(Address::NULL), Self::from)
    }
}

impl From<&Tensor> for Arg {
    fn from(tensor: &Tensor) -> Self {
        Self::Address(tensor.address())
    }
}

/// Elements of one 16-byte access where every row of all these tensors starts at a multiple of 16
/// bytes, else 1. They have one dtype.
pub(crate) fn vector(tensors: &[&Tensor]) -> usize {
    let size = |t: &Tensor| t.dtype().bytes(1).0;
    let aligned = |t: &&Tensor| {
        t.address().0.is_multiple_of(16) && (t.width() as u64 * size(t)).is_multiple_of(16)
    };
    if tensors.iter().all(aligned) {
        16 / size(tensors[0]) as usize
    } else {
        1
    }
}
