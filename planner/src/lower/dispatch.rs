//! Lowers token dispatch and combine for each dispatcher.
//!
//! All-to-all sends every chosen copy of a token; DeepEP and HybridEP send one copy to each distinct
//! destination: over the network one a node, over NVLink one a rank. Uniform routing is assumed
//! (imbalance scales the rows of the busiest rank, in [`crate::local::Local`]).

use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;
use moefold_profiles::{CollectiveKind, ExchangeKernel, Op};

use super::{Writer, over};
use crate::choice::Dispatcher;
use crate::model::Moe;
use crate::runtime::{Part, Task};

/// Rows put in order for experts and back.
pub(crate) fn lower_rows(work: &mut Writer<'_>) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    let dtype = work.wide;
    let sent = local.sent_rows;
    let received = local.expert_rows / local.etp;
    work.at(Category::RouterPermute, Part::Dispatch);
    // How many rows go where sizes all that follows; rows padded to a capacity are known before.
    if !work.setting.capacity.is_some_and(|capacity| capacity.pad) {
        work.push(true, Task::HostRead, Category::Host, None);
    }

    let permute = |rows| {
        move |pass| Op::Permute {
            rows,
            dim: hidden,
            pass,
            dtype,
        }
    };
    let unpermute = |rows| {
        move |pass| Op::Unpermute {
            rows,
            dim: hidden,
            pass,
            dtype,
        }
    };
    match work.setting.dispatcher {
        Dispatcher::Alltoall => {
            work.both(permute(sent));
            // Rows arrive by source rank and are sorted by expert, and back.
            if local.experts_local > 1 && local.ep > 1 {
                work.both(permute(local.expert_rows));
                work.both(unpermute(local.expert_rows));
            }
            work.both(unpermute(sent));
        }
        Dispatcher::Allgather => {
            work.both(permute(local.expert_rows));
            work.both(unpermute(local.expert_rows));
        }
        // The kernel delivers one copy a rank; rows are multiplied to their experts on arrival.
        Dispatcher::Deepep => {
            work.both(permute(received));
            work.both(unpermute(received));
        }
        // Permutation is fused into the kernels.
        Dispatcher::Hybridep => {}
    }
}

/// One dispatch (or combine) of either pass, beside what is said.
pub(crate) fn lower_exchange(work: &mut Writer<'_>, moe: &Moe, beside: Option<Part>) {
    if let Some(exchange) = exchanges(work, moe) {
        work.push(true, exchange, Category::EpComm, beside);
        work.push(false, exchange, Category::EpComm, beside);
    }
}

/// One dispatch (or combine) of a layer.
fn exchanges(work: &Writer<'_>, moe: &Moe) -> Option<Task> {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    let (ep, tp_ep) = (work.setting.groups.ep, work.setting.groups.tp_ep);
    if ep.ranks < 2 {
        return None;
    }
    let bytes = |copies: f64| {
        let elements = local.tokens_local as f64 * copies * hidden as f64;
        work.wide.bytes(elements.round() as u64)
    };
    match work.setting.dispatcher {
        Dispatcher::Alltoall => {
            let rows = work.wide.bytes(local.sent_rows * hidden);
            let all = over(ep, CollectiveKind::AllToAll, rows);
            Some(Task::Collective(all))
        }
        // Every token to every rank, one row each; the reduce-scatter back moves as much.
        Dispatcher::Allgather => {
            let ranks = f64::from(tp_ep.ranks);
            let all = over(tp_ep, CollectiveKind::AllGather, bytes(ranks));
            Some(Task::Collective(all))
        }
        Dispatcher::Deepep | Dispatcher::Hybridep => {
            // Over the network one copy a domain, forwarded to one copy a rank inside each.
            let by_rank = destinations(moe, u64::from(ep.ranks));
            let near = f64::from(ep.ranks_per_domain.max(1));
            let domains = ep.ranks.div_ceil(ep.ranks_per_domain.max(1));
            let by_domain = destinations(moe, u64::from(domains));
            let remote = by_domain * (1.0 - 1.0 / f64::from(domains));
            // HybridEP's buffers are its own: permuting copies what came out of them, and back, in its kernels. DeepEP
            // leaves that to an op.
            let fused = work.setting.dispatcher == Dispatcher::Hybridep;
            let rows = local.expert_rows / local.etp;
            let kernel = if fused {
                ExchangeKernel::Hybridep
            } else {
                ExchangeKernel::Deepep
            };
            let copied = if fused {
                bytes(by_rank) + work.wide.bytes(rows * hidden)
            } else {
                Bytes::ZERO
            };
            Some(Task::Exchange {
                kernel,
                copied,
                local: bytes(by_rank * (1.0 - 1.0 / near)),
                remote: bytes(remote),
                group: ep,
            })
        }
    }
}

/// Expected number of distinct destinations of one token among `blocks` equal blocks of experts:
/// `D (1 - C(E - E/D, K) / C(E, K))` under uniform routing. Group-limited routing draws the same way
/// from the experts of the kept groups, where blocks do not straddle groups.
pub fn destinations(moe: &Moe, blocks: u64) -> f64 {
    let (experts, topk) = (moe.experts, moe.topk);
    if let Some(limit) = &moe.router.groups
        && limit.topk < limit.groups
        && limit.groups > 0
    {
        let eligible = experts * limit.topk / limit.groups;
        if blocks >= limit.groups && blocks.is_multiple_of(limit.groups) {
            let kept = blocks / limit.groups * limit.topk;
            return distinct(eligible, topk, kept);
        }
        // A block holds whole groups: the kept groups fall on blocks as experts would.
        if limit.groups.is_multiple_of(blocks) {
            return distinct(limit.groups, limit.topk, blocks).min(distinct(experts, topk, blocks));
        }
    }
    distinct(experts, topk, blocks)
}

fn distinct(experts: u64, draws: u64, blocks: u64) -> f64 {
    let in_block = experts as f64 / blocks as f64;
    let experts = experts as f64;
    let missed: f64 = (0..draws)
        .map(|i| ((experts - in_block - i as f64) / (experts - i as f64)).max(0.0))
        .product();
    blocks as f64 * (1.0 - missed)
}

#[cfg(test)]
mod tests {
    use super::distinct;

    #[test]
    fn golden_distinct_destinations_of_256_experts_top_8() {
        // Computed from the formula for arXiv 2603.07685's dispatch benchmark.
        for (blocks, expected) in [
            (2, 1.99),
            (4, 3.61),
            (8, 5.30),
            (16, 6.52),
            (32, 7.27),
            (64, 7.68),
        ] {
            let got = distinct(256, 8, blocks);
            assert!((got - expected).abs() < 0.006, "{blocks}: {got}");
        }
    }

    #[test]
    fn law_a_token_reaches_between_one_and_topk_blocks() {
        for blocks in [1, 2, 4, 8, 16] {
            for topk in 1..=8 {
                let got = distinct(16, topk, blocks);
                assert!(got <= topk.min(blocks) as f64 + 1e-12 && got >= 1.0 - 1e-12);
            }
        }
    }
}
