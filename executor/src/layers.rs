//! The layers outside the experts: embedding, attention, dense MLP, head and loss.
//!
//! A layer is a value with views of its weights. `forward` returns its output and a `Saved` value:
//! the tensors that `backward` needs, and nothing else survives in between. Layers call ops and
//! collectives; they never look inside a tensor.
//!
//! Shapes in names: `T` are the tokens of the tensor-parallel group in a microbatch, `t` the share `T / tp`
//! of them that this rank holds between blocks (sequence parallelism). `h` is the residual width, `n` and
//! `m` are the query and key/value heads on this rank, `d` the width of a head.

pub mod attention;
mod context;
pub mod embedding;
pub mod head;
pub mod latent;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod tokens;
