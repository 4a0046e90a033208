//! Tests of the search: laws, published layouts, refusals.

mod around;
mod brute;
mod least;
mod open;
mod predicted;
mod pruning;
mod refused;
mod routed;
mod shared;
mod split;

use moefold_profiles::Cluster;
use moefold_profiles::pricing::Costs;

use super::{SearchResult, plan};
use crate::choice::StackName;
use crate::layout::Batch;
use crate::model::{Model, presets};
use crate::options::SearchOptions;
use crate::stack::megatron::Declared;

fn cluster(name: &str) -> Cluster {
    moefold_profiles::presets::cluster(name).expect("a preset")
}

fn run(model: &Model, cluster: &Cluster, gpus: u32, options: &SearchOptions) -> SearchResult {
    let costs = Costs::for_cluster(cluster, &[]);
    plan(model, cluster, gpus, options, &costs, &Declared).expect("something is feasible")
}

/// All cuts of layers into so many stages, of which those at the ends hold so many at least and the others one.
pub(crate) fn cuts(layers: u32, stages: u32, ends: [u32; 2]) -> Vec<Vec<Vec<u32>>> {
    cuts_from(0, layers, stages, ends)
}

fn cuts_from(from: u32, layers: u32, stages: u32, [first, last]: [u32; 2]) -> Vec<Vec<Vec<u32>>> {
    if stages == 1 {
        let is_enough = from + last <= layers;
        return is_enough
            .then(|| vec![(from..layers).collect()])
            .into_iter()
            .collect();
    }
    let each = (from + first..=layers).flat_map(|to| {
        let rest = cuts_from(to, layers, stages - 1, [1, last]).into_iter();
        rest.map(move |rest| {
            let first = std::iter::once((from..to).collect());
            first.chain(rest).collect()
        })
    });
    each.collect()
}

/// A preset on H100 with so many sequences of 4096 a step.
fn on_h100(model: &str, global_batch: u64) -> (Model, Cluster, SearchOptions) {
    let batch = Batch {
        seq_len: 4096,
        global_batch,
    };
    let model = presets::load(model).expect("a preset");
    let options = SearchOptions::new(batch, StackName::Megatron);
    (model, cluster("dgx-h100"), options)
}

fn small() -> (Model, Cluster, SearchOptions) {
    on_h100("mixtral-8x7b", 32)
}
