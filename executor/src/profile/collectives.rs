//! Collectives, ready to be timed: the world is cut into groups of the key's size, and all groups
//! exchange at the same time, as they do in training.

use moefold_kernels::{Device, Dtype};
use moefold_profiles::{Collective, CollectiveKind};

use super::ops;
use crate::transport::{RankContext, TransportError};

/// Why a collective cannot be measured among `ranks` ranks of this process.
pub(super) fn refusal(collective: &Collective, ranks: u32) -> Option<&'static str> {
    if collective.ranks < 2 || !ranks.is_multiple_of(collective.ranks) {
        return Some("its group does not divide the ranks that run");
    }
    if collective.crosses_domains() {
        return Some("ranks of one process share one memory domain");
    }
    if collective.kind == CollectiveKind::SendRecv {
        return Some("sends between pipeline ranks are not implemented yet");
    }
    None
}

/// A closure that runs the collective once.
pub(super) fn prepare(
    rank: &RankContext,
    device: &Device,
    collective: &Collective,
) -> Box<dyn FnMut() -> Result<(), TransportError>> {
    let size = collective.ranks;
    let first = rank.rank() / size * size;
    let ranks: Vec<u32> = (first..first + size).collect();
    let group = rank.communicator("profile", &ranks);
    let size = size as usize;
    // Whole shards; a buffer smaller than one element a rank is rounded up to that.
    let shard = (collective.bytes.0 as usize / 4).div_ceil(size).max(1);
    let tensor = |len: usize| ops::random(device, Dtype::F32, &[len], rank.rank().into());
    let (whole, part) = (tensor(shard * size), tensor(shard));
    match collective.kind {
        CollectiveKind::AllReduce => Box::new(move || group.all_reduce(&whole)),
        CollectiveKind::AllGather => Box::new(move || group.all_gather(&part, &whole)),
        CollectiveKind::ReduceScatter => Box::new(move || group.reduce_scatter(&whole, &part)),
        CollectiveKind::Broadcast => Box::new(move || group.broadcast(&whole, 0)),
        CollectiveKind::AllToAll => {
            let received = tensor(shard * size).reshape(&[size, shard]);
            let sent = whole.reshape(&[size, shard]);
            Box::new(move || group.all_to_all_even(&sent, &received))
        }
        CollectiveKind::SendRecv => unreachable!("refused before"),
    }
}
