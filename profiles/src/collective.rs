//! [`Collective`]: what ranks exchange, as a key of every cost table.
//!
//! The planner lowers communication to these and `profile` measures them. A collective says how many
//! bytes and how its ranks sit, never how long it takes: that is [`crate::pricing`]'s business.

use serde::{Deserialize, Serialize};

use crate::units::Bytes;

/// What a collective does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Everyone ends with the sum.
    AllReduce,
    /// Everyone ends with all shards.
    AllGather,
    /// Everyone ends with one shard of the sum.
    ReduceScatter,
    /// Everyone sends a part to everyone.
    AllToAll,
    /// One rank to one rank.
    SendRecv,
    /// One rank to all.
    Broadcast,
}

impl CollectiveKind {
    /// The name in tables and traces.
    pub fn stem(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::SendRecv => "send_recv",
            Self::Broadcast => "broadcast",
        }
    }
}

/// A collective with its size and where its ranks sit.
///
/// `bytes` is the full buffer of one rank: the reduced tensor of an all-reduce, the gathered tensor
/// of an all-gather, the unreduced tensor of a reduce-scatter, the send buffer of an all-to-all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Collective {
    /// What it does.
    pub kind: CollectiveKind,
    /// The full buffer of one rank, in bytes.
    pub bytes: Bytes,
    /// Ranks that take part.
    pub ranks: u32,
    /// The most ranks of the group that share one NVLink domain.
    pub ranks_per_domain: u32,
}

impl Collective {
    /// Whether tokens go to their experts and back in it.
    pub fn is_of_tokens(&self) -> bool {
        self.kind == CollectiveKind::AllToAll
    }

    /// Bytes that leave one rank under a bandwidth-optimal algorithm: `S (n-1)/n`, twice that for
    /// an all-reduce, `S` for a send (Megatron-Core MoE notes; Thakur et al. 2005, section 4).
    pub fn wire_bytes(&self) -> f64 {
        let n = f64::from(self.ranks);
        let s = self.bytes.0 as f64;
        match self.kind {
            CollectiveKind::AllReduce => 2.0 * s * (n - 1.0) / n,
            CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::AllToAll => s * (n - 1.0) / n,
            CollectiveKind::SendRecv | CollectiveKind::Broadcast => s,
        }
    }

    /// Whether the group leaves its NVLink domain.
    pub fn crosses_domains(&self) -> bool {
        self.ranks > self.ranks_per_domain
    }
}

/// Kernels that exchange tokens, one copy a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExchangeKernel {
    /// DeepEP.
    Deepep,
    /// HybridEP.
    Hybridep,
}
