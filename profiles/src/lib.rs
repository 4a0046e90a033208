//! What hardware is and what it was measured to do.
//!
//! The vocabulary under everything: units, dtypes, [`Op`] and [`Collective`] (the keys of every cost
//! table), GPUs and clusters, measured tables with interpolation, profile directories, and the
//! [`Trace`] that a simulation and a run share. Depends on no other member of the workspace, knows no
//! model, no layout and no device code.

pub mod calibration;
pub mod cluster;
pub mod collective;
pub mod cost;
pub mod directory;
pub mod dtype;
pub mod files;
pub mod host;
pub mod import;
pub mod memory;
mod named;
pub mod nearest;
pub mod op;
pub mod presets;
pub mod pricing;
pub mod random;
pub mod run;
pub mod statistics;
pub mod table;
pub mod trace;
pub mod units;

pub use calibration::{Calibration, Factors};
pub use cluster::{Cluster, Gpu};
pub use collective::{Collective, CollectiveKind, ExchangeKernel};
pub use cost::{Cost, Source};
pub use directory::Profile;
pub use dtype::{Dtype, Precision};
pub use host::{Direction, HostCost, HostTimes};
pub use memory::{ByClass, TensorClass};
pub use op::{Op, OpKind, Pass, SweepKind};
pub use pricing::Costs;
pub use trace::{Category, Trace, TraceSpan};
