//! Parameter counts and FLOPs per token.
//!
//! [`params()`] divides a model's parameters the way a memory model needs them: by layer, and within
//! a layer by the axes that shard each part. Totals leave out multi-token prediction, which is
//! counted beside them, and the correction bias of a router, which is a buffer. FLOPs, in the
//! convention of Megatron's throughput metric, are in [`flops_per_token`].

mod flops;
mod params;

pub use flops::{FlopRules, flops_per_token, flops_per_token_with};
pub use params::{LayerParams, MtpParams, Params, last_norm, layer, mtp, params};
