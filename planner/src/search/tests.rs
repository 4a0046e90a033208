//! Tests of the search: laws, published layouts, refusals.

mod brute;
mod open;
mod predicted;
mod pruning;
mod refused;
mod routed;
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

fn small() -> (Model, Cluster, SearchOptions) {
    let batch = Batch {
        seq_len: 4096,
        global_batch: 32,
    };
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let options = SearchOptions::new(batch, StackName::Megatron);
    (model, cluster("dgx-h100"), options)
}
