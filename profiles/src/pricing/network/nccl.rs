//! What NCCL was measured to do, as curves over bytes.

use super::wire_factor;
use crate::collective::CollectiveKind;
use crate::presets;
use crate::pricing::curve::Curve;
use crate::table;

/// A collective among a number of ranks of one domain.
#[derive(Debug, Clone)]
pub(super) struct Ranked {
    pub(super) ranks: u32,
    /// Seconds by bytes.
    pub(super) time: Curve,
    pub(super) latency: f64,
}

/// NCCL's curves of one GPU and kind. `slower` stretches what is above the latency.
pub(super) fn ranked(gpu: &str, kind: CollectiveKind, slower: f64) -> Vec<Ranked> {
    let rows = table::collectives()
        .iter()
        .filter(|row| row.gpu == gpu && row.kind == kind);
    let mut all: Vec<Ranked> = rows
        .map(|row| {
            let latency = row.latency_us_min * 1e-6;
            let factor = wire_factor(kind, f64::from(row.ranks));
            let stretch = |time: f64| latency + (time - latency).max(0.0) * slower;
            let sizes = row.busbw.iter().map(|&(bytes, busbw)| {
                let bytes = bytes as f64;
                (bytes, stretch(bytes * factor / (busbw * 1e9)))
            });
            // The least latency is taken as that of up to 16 KiB.
            let points = [(16384.0, latency)].into_iter().chain(sizes);
            Ranked {
                ranks: row.ranks,
                time: Curve::rising(points, [0.0, 1.0]),
                latency,
            }
        })
        .collect();
    // NCCL over a whole rack was measured at one size, by its all-to-all.
    if kind == CollectiveKind::AllToAll {
        let known = all.iter().map(|curve| curve.ranks).max().unwrap_or(0);
        let rack = table::dispatch().iter().filter(|row| {
            row.gpu == gpu && row.kernel == "all_to_all" && row.ranks[0] == row.ranks[1]
        });
        for row in rack.filter(|row| row.ranks[0] > known) {
            let bytes = (row.tokens * row.topk * row.hidden * row.dispatch_dtype.bits() / 8) as f64;
            let last = all.iter().find(|curve| curve.ranks == known);
            let shape = last
                .expect("GPUs with a rack row have smaller rows")
                .clone();
            let time = f64::midpoint(row.dispatch_us, row.combine_us) * 1e-6;
            let time = shape.latency + (time - shape.latency).max(0.0) * slower;
            // The shape by size is that of the largest measured group, through the one point.
            let ratio = time / shape.time.at(bytes);
            let sizes = [14, 20, 22, 24, 26, 28, 29].map(|log2| f64::from(1_u32 << log2));
            let grown = (f64::from(row.ranks[0]) / f64::from(known)).powf(0.75);
            let points = sizes.map(|bytes| {
                let least = if bytes < 65536.0 { grown } else { 1.0 };
                (bytes, shape.time.at(bytes) * ratio.max(least))
            });
            all.push(Ranked {
                ranks: row.ranks[0],
                time: Curve::rising(points.into_iter().chain([(bytes, time)]), [0.0, 1.0]),
                latency: shape.latency * grown,
            });
        }
    }
    all.sort_by_key(|curve| curve.ranks);
    all
}

/// All-reduce measured across nodes on a cluster, by wire bytes. Another NIC scales it.
pub(super) fn across(cluster: &str, nic_gb_per_s: f64) -> Vec<(CollectiveKind, [u32; 2], Curve)> {
    let rows: Vec<_> = table::inter_node()
        .iter()
        .filter(|row| row.cluster == cluster && row.kind == CollectiveKind::AllReduce)
        .collect();
    // One plateau is not a curve.
    if rows.len() < 2 || nic_gb_per_s <= 0.0 {
        return Vec::new();
    }
    let preset = presets::cluster(cluster).expect("tables are of presets");
    let slower = preset.nic_gb_per_s / nic_gb_per_s;
    let at = rows[0].ranks;
    let points = rows.iter().map(|row| {
        let wire = row.bytes as f64 * wire_factor(row.kind, f64::from(at[0]));
        (wire, wire / (row.busbw * 1e9) * slower)
    });
    vec![(
        CollectiveKind::AllReduce,
        at,
        Curve::rising(points, [0.0, 1.0]),
    )]
}
