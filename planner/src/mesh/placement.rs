//! Where the groups of a kind sit in a cluster, without listing them.

use moefold_profiles::Cluster;

use super::{Digit, GroupKind, Mesh, decode};
use crate::layout::Layout;

/// How a kind of group lies on a cluster's domains and nodes.
///
/// Where groups differ (domains that no power of two fits), it is the most spread one that is
/// described: all groups of a kind communicate at the same time, and the slowest is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Placement {
    /// Ranks of a group.
    pub ranks: u32,
    /// The most ranks of a group that share one NVLink domain.
    pub ranks_per_domain: u32,
    /// The most ranks of a group that share one node.
    pub ranks_per_node: u32,
}

impl Placement {
    /// Whether every group stays inside one NVLink domain.
    pub fn inside_domain(&self) -> bool {
        self.ranks == self.ranks_per_domain
    }
}

/// Where the groups of a kind sit, under the default rank order.
pub fn placement(layout: &Layout, kind: GroupKind, cluster: &Cluster) -> Placement {
    Mesh::of(layout).placement(kind, cluster)
}

/// Where the two kinds of groups sit that groups of `kind` are cut into, which `parts` divides: parts of neighbours, and
/// across them those that have one place in each. As Megatron-Core cuts replicas into instances of its distributed
/// optimizer (`megatron/core/parallel_state.py`, `create_hierarchical_groups`), under the default rank order.
pub fn cut(layout: &Layout, kind: GroupKind, parts: u32, cluster: &Cluster) -> [Placement; 2] {
    let mesh = Mesh::of(layout);
    let size = mesh.group_size(kind);
    assert!(size.is_multiple_of(parts), "{parts} parts of {size} ranks");
    let inside = size / parts;
    let blocks = [
        domain_in_job(cluster, mesh.gpus()),
        cluster.gpus_per_node.max(1),
    ];
    // By kind of cut group and of block, the most ranks that share a block, of the group where that is least.
    let mut sharing = [[inside; 2], [parts; 2]];
    for group in mesh.groups(kind) {
        for (own, sharing) in sharing.iter_mut().enumerate() {
            let (count, ranks) = if own == 0 {
                (parts, inside)
            } else {
                (inside, parts)
            };
            for number in 0..count {
                let member = |place: u32| match own {
                    0 => number * inside + place,
                    _ => place * inside + number,
                };
                let ranks = (0..ranks).map(|place| group[member(place) as usize]);
                for (block, least) in blocks.iter().zip(sharing.iter_mut()) {
                    let (mut most, mut run, mut last) = (0, 0, None);
                    for rank in ranks.clone() {
                        let here = Some(rank / block);
                        run = if here == last { run + 1 } else { 1 };
                        last = here;
                        most = most.max(run);
                    }
                    *least = most.min(*least);
                }
            }
        }
    }
    let placement = |ranks, [ranks_per_domain, ranks_per_node]: [u32; 2]| Placement {
        ranks,
        ranks_per_domain,
        ranks_per_node,
    };
    [placement(inside, sharing[0]), placement(parts, sharing[1])]
}

/// GPUs of each NVLink domain that a job occupies.
///
/// All of them where they divide the job or the job fits into one. Else a job is spread evenly, by
/// the same whole number of nodes in each domain, as long as that uses more than half of it: 64 of
/// the 72 GPUs of a rack for a job of 256 (what `sbatch --segment=16` asks for), so that no group of
/// a power of two straddles racks. A job that cannot be spread so takes GPUs as they come.
pub fn domain_in_job(cluster: &Cluster, gpus: u32) -> u32 {
    let (domain, node) = (cluster.gpus_per_domain.max(1), cluster.gpus_per_node.max(1));
    if gpus <= domain || gpus.is_multiple_of(domain) {
        return domain;
    }
    (domain / 2 + 1..domain)
        .rev()
        .find(|&part| part.is_multiple_of(node) && gpus.is_multiple_of(part))
        .unwrap_or(domain)
}

impl Mesh {
    /// Where the groups of a kind sit.
    pub fn placement(&self, kind: GroupKind, cluster: &Cluster) -> Placement {
        Placement {
            ranks: self.group_size(kind),
            ranks_per_domain: self.ranks_sharing(kind, domain_in_job(cluster, self.gpus())),
            ranks_per_node: self.ranks_sharing(kind, cluster.gpus_per_node),
        }
    }

    /// Domains from the first rank of a group to its last, where the first begins one.
    pub fn reach(&self, kind: GroupKind, cluster: &Cluster) -> u32 {
        let of_digit = |digit: Digit| (digit.size - 1) * digit.stride;
        let last: u32 = self.varying(kind).map(of_digit).sum();
        last / domain_in_job(cluster, self.gpus()) + 1
    }

    /// Where the group of all ranks sits.
    pub fn everyone(&self, cluster: &Cluster) -> Placement {
        let ranks = self.gpus();
        Placement {
            ranks,
            ranks_per_domain: domain_in_job(cluster, ranks).min(ranks),
            ranks_per_node: cluster.gpus_per_node.min(ranks),
        }
    }

    /// The most ranks of a group that share an aligned block of `block` rank numbers, for the group
    /// where that is least.
    ///
    /// Closed where every varying axis lies inside a block, crosses blocks whole, or is cut by them
    /// evenly; then it is the same for every group. Otherwise counted, once for each position a
    /// group can have relative to a block.
    pub fn ranks_sharing(&self, kind: GroupKind, block: u32) -> u32 {
        let block = block.max(1);
        if block >= self.gpus() {
            return self.group_size(kind);
        }
        let mut sharing = 1;
        for digit in self.varying(kind) {
            match sharing_along(digit, block) {
                Some(along) => sharing *= along,
                None => return self.ranks_sharing_counted(kind, block),
            }
        }
        sharing
    }

    fn ranks_sharing_counted(&self, kind: GroupKind, block: u32) -> u32 {
        let size = self.group_size(kind);
        let mut least = size;
        for position in self.positions(kind, block) {
            let (mut most, mut run, mut last) = (0, 0, u32::MAX);
            for index in 0..size {
                let here = (position + decode(self.varying(kind), index)) / block;
                run = if here == last { run + 1 } else { 1 };
                last = here;
                most = most.max(run);
            }
            least = least.min(most);
        }
        least
    }

    /// Where in a block the lowest ranks of groups lie.
    fn positions(&self, kind: GroupKind, block: u32) -> Vec<u32> {
        let mut all = vec![0];
        for Digit { size, stride, .. } in self.fixed(kind) {
            let mut seen = vec![false; block as usize];
            let mut next = Vec::new();
            for &first in &all {
                // After `block` steps all come again.
                let each = (0..size.min(block)).map(|step| (first + step * stride) % block);
                let new = |position: &u32| !std::mem::replace(&mut seen[*position as usize], true);
                next.extend(each.filter(new));
            }
            all = next;
        }
        all
    }
}

/// How many positions of one axis share a block, where that does not depend on the others.
fn sharing_along(digit: Digit, block: u32) -> Option<u32> {
    let Digit { size, stride, .. } = digit;
    let span = u64::from(stride) * u64::from(size);
    if size == 1 || stride.is_multiple_of(block) {
        Some(1)
    } else if u64::from(block).is_multiple_of(span) {
        Some(size)
    } else if block.is_multiple_of(stride) && span.is_multiple_of(block.into()) {
        Some(block / stride)
    } else {
        None
    }
}
