//! What makes the executor's training real: it equals a reference, whatever the layout.

mod balance;
mod capacity;
mod common;
mod context;
mod cuda;
mod dispatch;
mod huggingface;
mod layouts;
mod overlap;
mod peak;
mod recompute;
mod refusals;
mod shards;
mod validation;
