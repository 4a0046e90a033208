//! Device work of a training step, op by op.
//!
//! A [`Device`] owns memory and runs ops; a [`Tensor`] is a typed, row-major view into one of its
//! buffers. Every op is one module with one contract: shapes, what is overwritten and what is added
//! to, and what an implementation on a device has to do. There are two kinds of device, the CPU in
//! f32 and CUDA in f32 or bf16: an op `match`es on the device's backend and calls its `cpu` or its
//! `cuda` half, and no caller knows which.
//!
//! What holds for all ops: the same inputs give the same bits at any number of threads; a row of a
//! result does not depend on how many other rows there are (but for dense products that the vendor's
//! library does, which chooses its kernel by shape); wrong shapes are programmer errors and
//! panic with the op, what was expected and what was found; memory read by an op never overlaps
//! memory it writes unless the op says "in place".
//!
//! What is deliberately absent: ranks, layouts, autograd, streams in the interface. The crate knows
//! shapes and dtypes, nothing of models.

mod arena;
mod buffer;
#[cfg(test)]
mod emulated;
mod matrix;
mod parallel;
mod pool;
mod product;
mod simd;
mod sizes;
#[cfg(test)]
mod testing;
mod total;
mod turn;

pub mod adamw;
pub mod ahead;
pub mod attention;
pub mod bf16;
pub mod cases;
pub mod check;
pub mod cross_entropy;
pub mod cuda;
pub mod device;
pub mod elementwise;
pub mod embedding;
pub mod event;
pub mod expert_bias;
pub mod gate;
pub mod gemm;
pub mod grad_norm;
pub mod grouped_gemm;
pub mod latent_kv;
pub mod merge;
pub mod meta;
pub mod observe;
pub mod offer;
pub mod pace;
pub mod permute;
pub mod programs;
pub mod reduce;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod rows;
pub mod scalars;
pub mod sinks;
pub mod swiglu;
pub mod tensor;
pub mod transfer;
pub mod z_loss;

pub use cuda::error::{DeviceError, catch};
pub use device::{Device, Memory, Side, TensorClass};
pub use event::Event;
pub use moefold_profiles::{Dtype, Op, Pass};
pub use offer::Offer;
pub use scalars::{Factor, Scalars};
pub use tensor::Tensor;
