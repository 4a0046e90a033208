//! Models, layouts, schedules and plans, and the search over them.
//!
//! The data half (`choice`, `model`, `layout`, `mesh`, `schedule`, `saved`, `local`, `shard`, `bucket`, `runtime`,
//! `walk`, `plan`, `answer`, `settings`) is what the executor and the reports read. The algorithm half lowers a layer to ops, prices ops, counts memory,
//! simulates the step and searches. The whole crate is a pure function of its inputs: it reads the
//! files it is given and no clock, no environment and no device.

pub mod answer;
pub mod bucket;
pub mod calibrate;
pub mod choice;
pub mod experts;
pub mod goodput;
pub mod interval;
pub mod layout;
pub mod local;
pub mod lower;
pub mod memory;
pub mod mesh;
pub mod model;
pub mod options;
pub mod partition;
pub mod plan;
pub mod price;
pub mod published;
pub mod rules;
pub mod runtime;
pub mod saved;
pub mod schedule;
pub mod search;
pub mod settings;
pub mod shard;
pub mod simulate;
pub mod stack;
pub mod tensors;
pub mod walk;
