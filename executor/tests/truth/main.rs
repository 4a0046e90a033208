//! What makes the executor's training real: it equals a reference, whatever the layout.

mod balance;
mod beside;
mod capacity;
mod combined;
mod common;
mod context;
mod cuda;
mod dispatch;
mod huggingface;
mod layouts;
mod masters;
mod offload;
mod overlap;
mod packing;
mod peak;
mod recompute;
mod refusals;
mod sharded;
mod shards;
mod validation;
mod zero_bubble;
