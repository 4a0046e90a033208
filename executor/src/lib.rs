//! Runs a plan: real training of Mixture-of-Experts language models under its layout.
//!
//! The executor interprets a `Plan` ([`train::run`]): communicators over the ranks ([`transport`],
//! [`rank`]), [`data`], [`weights`], the shard of a rank ([`model`], [`store`]), [`layers`] and
//! [`moe`], what of them runs again ([`recompute`]) or waits ([`later`]), the order of a step ([`stage`], [`step`]), the [`optimizer`], [`mod@checkpoint`]s, [`convert`]ing them, and measuring ([`record`],
//! [`run`]; on their own, [`profile`] and [`mod@bench`]). How to train is said by [`options`],
//! what they compute on by [`device::DeviceSpec`], and how much memory they take there by [`mod@room`]; what ranks may have on their way by `traffic`; what is not implemented is refused by [`support`]. Device work is in
//! `moefold-kernels`, rank arithmetic in the planner's mesh; neither is repeated here.

pub mod bench;
pub mod checkpoint;
pub mod claim;
mod clock;
pub mod control;
pub mod convert;
pub mod data;
pub mod device;
pub mod environment;
pub mod error;
pub mod files;
mod gather;
pub mod host;
pub mod later;
pub mod layers;
pub mod lr;
pub mod model;
pub mod moe;
mod offload;
pub mod optimizer;
pub mod options;
pub mod profile;
pub mod rank;
pub mod recompute;
pub mod record;
pub mod room;
mod rotary;
pub mod run;
mod shares;
pub mod stage;
pub mod step;
pub mod store;
mod sums;
pub mod support;
#[cfg(test)]
mod testing;
pub mod trace;
mod traffic;
pub mod train;
pub mod transport;
pub mod turns;
mod unpriced;
pub mod weights;

pub use error::Error;
