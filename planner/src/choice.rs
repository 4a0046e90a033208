//! What a plan chooses beside its degrees: dispatcher, recomputation, optimizer, stack, schedule.
//!
//! Words of the search, of plans and of the rules, below all three. Nothing is decided here.

mod graphs;
mod host_share;
mod offload;
mod recompute;

use std::str::FromStr;

use moefold_profiles::Dtype;
use serde::{Deserialize, Serialize};

pub use graphs::{GraphModule, Graphs};
pub use host_share::{HostShare, in_flight};
pub use offload::{Offload, OffloadModule};
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
        /// 1F1B whose gradients of weights wait for the bubbles.
        ZbH1 = "zb-h1",
        /// Divided backward passes on two chunks a rank that go there and back as a V, with no more alive than the first
        /// rank of 1F1B has.
        ZbV = "zb-v",
        /// The same with about half of it alive.
        VHalf = "v-half",
        /// The same with about a third of it alive.
        VMin = "v-min",
        /// The order of DualPipe, cut in half: two chunks a rank as a V, forward passes of one and backward passes of the
        /// other in turn, and gradients of weights that wait only where a bubble would be.
        DualpipeV = "dualpipe-v",
        /// The same, where these passes run as one, as under [`ScheduleName::Combined`].
        DualpipeVCombined = "dualpipe-v-combined",
        /// Forward passes beside backward passes of other microbatches, so that the exchanges of tokens of one run
        /// beside the compute of the other.
        Combined = "combined",
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
    /// How attention reaches the keys of other context-parallel ranks, in Megatron-Core's words
    /// (`--cp-comm-type`).
    #[derive(Default)]
    pub enum CpComm {
        /// Blocks of keys and values go around a ring, beside the work on the blocks before.
        #[default]
        P2p = "p2p",
        /// Heads are exchanged against tokens: a rank has whole sequences of a share of the heads.
        A2a = "a2a",
        /// Keys and values of all ranks are gathered.
        Allgather = "allgather",
        /// Heads are exchanged against tokens among neighbours, and blocks of keys and values go around a ring of those
        /// that have the same heads.
        Hierarchical = "a2a+p2p",
    }
}

moefold_profiles::named! {
    /// Which assignments an expert beyond its capacity keeps.
    #[derive(Default)]
    pub enum DropPolicy {
        /// Those of the largest probabilities.
        #[default]
        Probs = "probs",
        /// The first.
        Position = "position",
    }
}

/// A limit of the tokens that an expert takes of each rank. All others it drops: they pass by it in the residual
/// stream.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// Of the tokens that an expert gets of a rank under balanced routing.
    pub factor: f64,
    /// What is kept.
    pub drop_policy: DropPolicy,
    /// Whether every expert gets just as many rows, those without a token zeros.
    pub pad: bool,
}

impl Capacity {
    /// Rows that one of `experts` takes of a rank that routes `tokens`, each to `topk`: `ceil(tokens * topk /
    /// experts * factor)` (Megatron-Core, `get_capacity` in `moe_utils.py`, of the tokens that a rank holds
    /// between blocks). At most one a token, since a token chooses an expert once.
    pub fn rows(&self, tokens: u64, topk: u64, experts: u64) -> u64 {
        let share = (tokens * topk) as f64 / experts as f64;
        ((share * self.factor).ceil() as u64).min(tokens)
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
        /// Matrices by Muon with an f32 momentum, all else by AdamW with f32 moments.
        Muon = "muon",
    }
}

impl Optimizer {
    /// Type of its moments.
    pub fn moments(self) -> Dtype {
        match self {
            Self::Adam | Self::Muon => Dtype::F32,
            Self::AdamBf16Moments => Dtype::Bf16,
        }
    }

    /// Moments of a matrix of a layer.
    pub fn moments_of_matrices(self) -> u64 {
        match self {
            Self::Adam | Self::AdamBf16Moments => 2,
            Self::Muon => 1,
        }
    }

    /// Whether replicas divide whole tensors among them, where others cut all parameters into equal parts.
    pub fn deals_tensors(self) -> bool {
        self == Self::Muon
    }
}

moefold_profiles::named! {
    /// What is kept of the f32 weights that the optimizer updates, where the model's are narrower; with either the
    /// same is computed, to the bit.
    #[derive(Default)]
    pub enum Masters {
        /// All of them.
        #[default]
        Fp32 = "fp32",
        /// The 16 bits that a bf16 weight lacks (Transformer Engine's `store_param_remainders`).
        Remainder = "remainder",
    }
}

impl Masters {
    /// Their type in memory; bits of remainders are no numbers.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Fp32 => Dtype::F32,
            Self::Remainder => Dtype::Bf16,
        }
    }
}

moefold_profiles::named! {
    /// What the weights are that layers multiply with, where a recipe multiplies in FP8.
    #[derive(Default)]
    pub enum PrimaryWeights {
        /// Weights in the type of activations; FP8 copies of them beside.
        #[default]
        Wide = "wide",
        /// FP8 alone, written from the masters (Megatron-LM's `--fp8-param-gather`).
        Fp8 = "fp8",
    }
}

moefold_profiles::named! {
    /// What data parallelism divides over the ranks that replicate a parameter, by the flag `--zero`.
    #[derive(Default)]
    pub enum Zero {
        /// Masters and moments (ZeRO-1, Megatron's distributed optimizer).
        #[default]
        States = "1",
        /// Gradients too (ZeRO-2, Megatron-FSDP's `optim_grads`): they are reduced in every microbatch. Weights rest whole.
        Gradients = "2",
        /// Weights and gradients too (ZeRO-3, Megatron-FSDP's `optim_grads_params`): layers are gathered before
        /// each of their passes, and their gradients reduced in every microbatch.
        Fsdp = "fsdp",
        /// The same among the replicas of each instance, and masters and moments among all (HFSDP, of Megatron-FSDP
        /// `--outer-dp-sharding-strategy optim`).
        Hybrid = "hfsdp",
        /// What [`Fsdp`](Self::Fsdp) divides, as PyTorch's FSDP2 does (Megatron-LM's `--use-torch-fsdp2`).
        Fsdp2 = "fsdp2",
    }
}

impl Zero {
    /// Whether weights are divided, so that layers are gathered in every microbatch.
    pub fn divides_weights(self) -> bool {
        matches!(self, Self::Fsdp | Self::Hybrid | Self::Fsdp2)
    }

    /// Whether gradients are divided, so that they are reduced in every microbatch.
    pub fn divides_gradients(self) -> bool {
        self != Self::States
    }
}

/// Communication that runs beside compute. A file has it in words, as [`FromStr`] reads it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each kind runs beside compute or not, whatever the others do"
)]
pub struct Overlap {
    /// Gradient reduction under the last microbatch's backward pass; where gradients rest divided, under that of every
    /// microbatch.
    pub grad_reduce: bool,
    /// Weight gathering under the first microbatch's forward pass; where weights rest divided, under every pass.
    pub param_gather: bool,
    /// Pipeline messages under other chunks' work, where stages are interleaved.
    pub p2p: bool,
    /// Dispatch and combine of tokens under the shared expert's work.
    pub shared_expert: bool,
    /// Dispatch and combine of tokens under a pass of another microbatch: see [`ScheduleName::Combined`].
    pub expert_alltoall: bool,
    /// Gradients of weights behind the start of the next exchange of tokens, beside which they run.
    pub delay_wgrad: bool,
    /// Gathers and scatters of tensor-parallel ranks under the products that they feed and follow, chunk by chunk.
    pub tp: bool,
}

/// Where a kind of overlap is chosen.
type Chosen = fn(&mut Overlap) -> &mut bool;

impl FromStr for Overlap {
    type Err = String;

    /// Reads `none` or kinds with commas or pluses; the error is what was expected.
    fn from_str(words: &str) -> Result<Self, String> {
        let mut overlap = Self::default();
        if words == "none" {
            return Ok(overlap);
        }
        for word in words.split([',', '+']).map(str::trim) {
            let kind = Self::KINDS.iter().find(|(name, _)| *name == word);
            let (_, chosen) = kind.ok_or_else(|| {
                let names = Self::KINDS.map(|(name, _)| name).join(", ");
                format!("none, or some of {names}; there is `{word}`")
            })?;
            *chosen(&mut overlap) = true;
        }
        Ok(overlap)
    }
}

impl TryFrom<String> for Overlap {
    type Error = String;

    fn try_from(words: String) -> Result<Self, String> {
        let read = words.parse();
        read.map_err(|expected| format!("found `{words}`, expected {expected}"))
    }
}

impl From<Overlap> for String {
    fn from(mut overlap: Overlap) -> Self {
        let chosen = Overlap::KINDS
            .iter()
            .filter(|(_, chosen)| *chosen(&mut overlap));
        let words: Vec<&str> = chosen.map(|(name, _)| *name).collect();
        if words.is_empty() {
            return "none".to_owned();
        }
        words.join(",")
    }
}

impl Overlap {
    /// All kinds by name.
    const KINDS: [(&'static str, Chosen); 7] = [
        ("grad-reduce", |overlap| &mut overlap.grad_reduce),
        ("param-gather", |overlap| &mut overlap.param_gather),
        ("p2p", |overlap| &mut overlap.p2p),
        ("shared-expert", |overlap| &mut overlap.shared_expert),
        ("expert-alltoall", |overlap| &mut overlap.expert_alltoall),
        ("delay-wgrad", |overlap| &mut overlap.delay_wgrad),
        ("tp", |overlap| &mut overlap.tp),
    ];

    /// What a plan runs beside compute that says nothing of it, on CPUs or GPUs: what its stack did when plans had
    /// no word for it.
    pub fn unsaid(stack: StackName, on_cpu: bool) -> Self {
        let all = stack == StackName::Megatron;
        Self {
            grad_reduce: all,
            param_gather: all,
            p2p: all || !on_cpu,
            ..Self::default()
        }
    }

    /// Whether some collective over replicas runs beside compute.
    pub fn of_replicas(self) -> bool {
        self.grad_reduce || self.param_gather
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
    fn law_overlap_is_read_as_it_is_written() {
        for bits in 0..128 {
            let overlap = Overlap {
                grad_reduce: bits & 1 > 0,
                param_gather: bits & 2 > 0,
                p2p: bits & 4 > 0,
                shared_expert: bits & 8 > 0,
                expert_alltoall: bits & 16 > 0,
                delay_wgrad: bits & 32 > 0,
                tp: bits & 64 > 0,
            };
            let written = serde_json::to_string(&overlap).expect("serializes");
            let read: Overlap = serde_json::from_str(&written).expect("reads");
            assert_eq!(read, overlap, "{written}");
        }
        let error = serde_json::from_str::<Overlap>("\"dp\"").expect_err("unknown");
        assert!(error.to_string().contains("`dp`"), "{error}");
    }

    #[test]
    fn golden_capacities() {
        // By hand: 4096 tokens, 2 of 8, are 1024 an expert; 100 tokens, 2 of 7, are 28.57.
        for (factor, [tokens, topk, experts], rows) in [
            (1.0, [4096, 2, 8], 1024),
            (1.25, [4096, 2, 8], 1280),
            (1.0, [100, 2, 7], 29),
            (1.1, [100, 2, 7], 32),
            (0.01, [100, 2, 7], 1),
            (64.0, [100, 2, 7], 100),
        ] {
            let capacity = Capacity {
                factor,
                drop_policy: DropPolicy::Probs,
                pad: false,
            };
            assert_eq!(capacity.rows(tokens, topk, experts), rows, "{factor}");
        }
    }

    #[test]
    fn what_older_files_call_cost_is_throughput() {
        let read = |word: &str| serde_json::from_str::<Objective>(word).expect("known");
        assert_eq!(read("\"cost\""), Objective::Throughput);
        assert_eq!(read("\"throughput\""), Objective::Throughput);
        let written = serde_json::to_string(&Objective::Throughput).expect("serializes");
        assert_eq!(written, "\"throughput\"");
    }
}
