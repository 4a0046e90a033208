//! Every op through its public functions, on the CPU and on the emulator, against plain loops in f64.

// What the module `testing` asks of the crate it is in.
use moefold_kernels::{Device, Dtype, Tensor, TensorClass, bf16};

mod adamw;
mod attention;
mod check;
mod cross_entropy;
mod device;
mod elementwise;
mod embedding;
mod expert_bias;
mod gate;
mod gemm;
mod grad_norm;
mod grouped_gemm;
mod latent_kv;
mod merge;
mod model;
mod permute;
mod reduce;
mod rms_norm;
mod rope;
mod router;
mod rows;
mod scalars;
mod sinks;
mod support;
mod swiglu;
#[path = "../../src/testing.rs"]
mod testing;
mod z_loss;
