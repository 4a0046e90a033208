//! Runs a plan: real training of Mixture-of-Experts language models under its layout.
//!
//! The executor interprets a `Plan`: communicators over the ranks ([`transport`]), [`data`],
//! [`weights`], layers, optimizer, and measuring ([`record`], [`run`]). Device work is in
//! `moefold-kernels`, rank arithmetic in the planner's mesh; neither is repeated here.

pub mod data;
pub mod environment;
pub mod error;
pub mod files;
pub mod record;
pub mod run;
#[cfg(test)]
mod testing;
pub mod transport;
pub mod weights;

pub use error::Error;
