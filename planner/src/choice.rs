//! What a plan chooses beside its degrees: dispatcher, recomputation, optimizer, stack, schedule.
//!
//! Words of the search, of plans and of the rules, below all three. Nothing is decided here.

mod recompute;

use std::str::FromStr;

use moefold_profiles::Dtype;

pub use recompute::{Module, Recompute, RecomputePlan};

moefold_profiles::named! {
    /// What runs a plan.
    #[derive(Default)]
    pub enum StackName {
        /// Megatron-Core with Transformer Engine.
        #[default]
        Megatron = "megatron",
        /// This project's executor.
        Moefold = "moefold",
    }
}

moefold_profiles::named! {
    /// Pipeline schedules.
    pub enum ScheduleName {
        /// No pipeline.
        None = "none",
        /// One forward, one backward.
        OneFOneB = "1f1b",
        /// Interleaved 1F1B over virtual stages.
        Interleaved = "interleaved",
    }
}

moefold_profiles::named! {
    /// How tokens reach their experts.
    pub enum Dispatcher {
        /// Permute, exchange rows, permute back.
        Alltoall = "alltoall",
        /// Gather every token, select locally.
        Allgather = "allgather",
        /// DeepEP: one copy per destination.
        Deepep = "deepep",
        /// HybridEP: one copy per destination, permutation fused.
        Hybridep = "hybridep",
    }
}

moefold_profiles::named! {
    /// Offloading; only `none` exists so far.
    #[derive(Default)]
    pub enum Offload {
        /// Nothing leaves the device.
        #[default]
        None = "none",
    }
}

moefold_profiles::named! {
    /// Optimizers.
    #[derive(Default)]
    pub enum Optimizer {
        /// AdamW with f32 moments.
        #[default]
        Adam = "adam",
        /// AdamW with bf16 moments.
        AdamBf16Moments = "adam-bf16-moments",
    }
}

impl Optimizer {
    /// Type of its moments.
    pub fn moments(self) -> Dtype {
        match self {
            Self::Adam => Dtype::F32,
            Self::AdamBf16Moments => Dtype::Bf16,
        }
    }
}

/// Communication that runs beside compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Gradient reduction under the last microbatch's backward pass.
    pub grad_reduce: bool,
    /// Weight gathering under the first microbatch's forward pass.
    pub param_gather: bool,
    /// Pipeline messages under other chunks' work, where stages are interleaved.
    pub p2p: bool,
}

impl FromStr for Overlap {
    type Err = String;

    /// Reads `none` or kinds with commas or pluses; the error is what was expected.
    fn from_str(words: &str) -> Result<Self, String> {
        let mut overlap = Self::default();
        if words == "none" {
            return Ok(overlap);
        }
        for word in words.split([',', '+']).map(str::trim) {
            match word {
                "grad-reduce" => overlap.grad_reduce = true,
                "param-gather" => overlap.param_gather = true,
                "p2p" => overlap.p2p = true,
                _ => {
                    return Err(format!(
                        "none, or some of grad-reduce, param-gather, p2p; there is `{word}`"
                    ));
                }
            }
        }
        Ok(overlap)
    }
}

moefold_profiles::named! {
    /// What a search maximizes.
    #[derive(Default)]
    pub enum Objective {
        /// Tokens a second. On given GPUs it is also tokens a dollar, which older files name.
        #[default]
        #[serde(alias = "cost")]
        Throughput = "throughput",
        /// Least peak memory.
        Memory = "memory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_older_files_call_cost_is_throughput() {
        let read = |word: &str| serde_json::from_str::<Objective>(word).expect("known");
        assert_eq!(read("\"cost\""), Objective::Throughput);
        assert_eq!(read("\"throughput\""), Objective::Throughput);
        let written = serde_json::to_string(&Objective::Throughput).expect("serializes");
        assert_eq!(written, "\"throughput\"");
    }
}
