//! [`Message`]: what a collective says of itself in a trace, as a key.

use super::Hosts;
use super::ops::sizes;
use super::text::{Args, Event};
use crate::collective::{Collective, CollectiveKind};
use crate::import::gathered::of_one_domain;
use crate::units::Bytes;

/// Arguments of a collective: those of `record_param_comms`, which newer traces also give its kernels.
#[derive(Debug)]
pub(super) struct Message<'a> {
    name: &'a str,
    elements: [Option<u64>; 2],
    dtype: Option<&'a str>,
    group_size: Option<u64>,
    group_ranks: Option<&'a str>,
}

impl<'a> Message<'a> {
    pub(super) fn of(args: &'a Args) -> Option<Self> {
        Some(Self {
            name: args.collective.as_deref()?,
            elements: [args.elements_in, args.elements_out],
            dtype: args.dtype.as_deref(),
            group_size: args.group_size,
            group_ranks: args.group_ranks.as_deref(),
        })
    }

    /// That of a collective of Gloo, which has a span of its own on a thread of the host (`gloo:all_reduce`). It says
    /// what a rank gave; its group is known where all of the job have one size.
    pub(super) fn of_gloo(event: &'a Event<'_>, groups: &[u64]) -> Option<Self> {
        let name = event.name.strip_prefix("gloo:")?;
        let Args { dims, types, .. } = &event.args;
        let given = dims.as_ref().and_then(|dims| sizes(dims.first()?));
        let given = given.map(|dims| dims.into_iter().fold(1, u64::saturating_mul));
        let dtype = types.as_ref().and_then(|types| types.first()?.as_str());
        let group_size = groups.first().copied();
        let group_size = group_size.filter(|size| groups.iter().all(|other| other == size));
        let got = given.zip(group_size);
        Some(Self {
            name,
            elements: [given, got.map(|(given, ranks)| given.saturating_mul(ranks))],
            dtype,
            group_size,
            group_ranks: None,
        })
    }

    /// Its key, or why it has none.
    pub(super) fn key(&self, hosts: &Hosts<'_>) -> Result<Collective, &'static str> {
        let [given, got] = self.elements;
        // The full buffer of a rank: of a gather what it gets, else what it gives.
        let (kind, elements) = match self.name {
            "allreduce" | "all_reduce" | "allreduce_coalesced" => {
                (CollectiveKind::AllReduce, given)
            }
            "allgather"
            | "all_gather"
            | "_allgather_base"
            | "allgather_coalesced"
            | "allgather_into_tensor_coalesced" => (CollectiveKind::AllGather, got),
            "reduce_scatter" | "_reduce_scatter_base" | "reduce_scatter_tensor_coalesced" => {
                (CollectiveKind::ReduceScatter, given)
            }
            "all_to_all" | "all_to_allv" | "alltoall" | "alltoall_base" => {
                (CollectiveKind::AllToAll, given)
            }
            "broadcast" | "_broadcast_oop" => (CollectiveKind::Broadcast, given),
            "send" => (CollectiveKind::SendRecv, given),
            "recv" => (CollectiveKind::SendRecv, got),
            _ => return Err("prices know no such collective"),
        };
        let elements = elements.filter(|&elements| elements > 0);
        let elements = elements.ok_or("a collective without its size")?;
        let width = self.dtype.and_then(width);
        let width = width.ok_or("a collective of a type that has no width here")?;
        let all = match kind {
            CollectiveKind::SendRecv => Some(2),
            _ => self.group_size.and_then(|size| u32::try_from(size).ok()),
        };
        let ranks = all.ok_or("a collective without the size of its group")?;
        if ranks < 2 {
            return Err("a group of one rank");
        }
        Ok(Collective {
            kind,
            bytes: Bytes(elements.saturating_mul(width)),
            ranks,
            ranks_per_domain: of_one_domain(hosts.device, ranks, self.of_host(ranks, hosts)),
        })
    }

    /// The most ranks of the group on one host. Ranks are numbered host by host; a list that is not
    /// whole (long ones are cut) says nothing, and the group is taken to lie as close as it can.
    fn of_host(&self, ranks: u32, hosts: &Hosts<'_>) -> u32 {
        let listed: Option<Vec<u32>> = self.group_ranks.and_then(|text| {
            let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?;
            inner
                .split(',')
                .map(|rank| rank.trim().parse().ok())
                .collect()
        });
        let whole = listed.filter(|listed| listed.len() as u32 == ranks);
        let Some(listed) = whole else {
            return ranks.min(hosts.ranks);
        };
        let host = |rank: &u32| rank / hosts.ranks;
        let each = listed.iter().map(|rank| {
            let same = listed.iter().filter(|other| host(other) == host(rank));
            same.count() as u32
        });
        each.max().unwrap_or(1)
    }
}

/// Bytes of an element, by the names that PyTorch and C++ have for types.
fn width(dtype: &str) -> Option<u64> {
    Some(match dtype.strip_prefix("c10::").unwrap_or(dtype) {
        "Double" | "Long" | "double" | "long" | "long int" => 8,
        "Float" | "Int" | "float" | "int" => 4,
        "Half" | "BFloat16" | "Short" | "short" => 2,
        "Byte" | "Char" | "Bool" | "unsigned char" | "signed char" | "bool" => 1,
        name if name.starts_with("Float8") => 1,
        _ => return None,
    })
}
