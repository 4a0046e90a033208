//! [`programs`]: every program that ops launch for the models there are presets of.
//!
//! What is compiled ahead into a pack and checked in tests: machine code exists for every
//! architecture a program is for, keeps to the declared limits, and shows the instructions it is
//! about. An op that can launch a specialization lists it here, or pays for its first launch.

use crate::cuda::program::Listed;

/// The programs of all ops.
pub(crate) fn programs() -> Vec<Listed> {
    [
        crate::adamw::programs(),
        crate::attention::cuda::programs(),
        crate::cross_entropy::programs(),
        crate::cuda::model::programs(),
        crate::elementwise::programs(),
        crate::embedding::programs(),
        crate::gemm::cuda::programs(),
        crate::permute::cuda::programs(),
        crate::reduce::cuda::programs(),
        crate::rms_norm::programs(),
        crate::rope::programs(),
        crate::router::cuda::programs(),
        crate::rows::cuda::programs(),
        crate::scalars::programs(),
        crate::swiglu::cuda::programs(),
        crate::total::programs(),
    ]
    .concat()
}
