//! [`unsearched`]: choices that a search held as they are though others could be taken.

use std::collections::BTreeMap;

use super::Asked;
use crate::choice::{CpComm, Graphs, Offload, ScheduleName, StackName, Zero};
use crate::rules::undivided;
use crate::stack::Stack;

/// What is tried only where it is named and was not, by option: what to name. Only what ranks, stack and pinned degrees
/// leave room for; what changes the numbers that are trained with is no choice of a search.
pub(super) fn unsearched(asked: &Asked<'_>) -> BTreeMap<String, String> {
    let (options, pins) = (asked.options, &asked.options.pins);
    let stack = Stack::on(options.stack, asked.cluster, asked.costs.host());
    let ours = options.stack == StackName::Moefold;
    let several = asked.gpus > 1;
    let overlap = options.overlap.unwrap_or_default();
    let sharded = options.zero == Zero::Fsdp;
    let pipes = several && pins.pp != Some(1) && !sharded;
    let mut held = BTreeMap::new();
    let mut hold = |is_held: bool, option: &str, named: String| {
        if is_held {
            held.insert(option.to_owned(), named);
        }
    };
    let plain = options.schedule.is_none() && options.stages.is_none();
    let comes_back = pipes && plain && pins.vpp.is_none_or(|vpp| vpp == 2);
    let goes = |name: &ScheduleName| name.is_vee() && name.combines() == overlap.expert_alltoall;
    let vees = stack.schedules(2, 2).filter(goes);
    let vees: Vec<&str> = vees.map(ScheduleName::name).collect();
    hold(
        comes_back && !vees.is_empty() && undivided(options).is_none(),
        "schedule",
        vees.join("|"),
    );
    let exchanges = several && pins.ep != Some(1) && asked.model.num_moe_layers() > 0;
    hold(
        exchanges && plain && options.overlap.is_none() && !sharded && !asked.cluster.gpu.is_cpu(),
        "overlap",
        "grad-reduce,param-gather,p2p,expert-alltoall".to_owned(),
    );
    hold(
        several && pins.cp != Some(1) && options.cp_comm == Some(CpComm::default()),
        "cp_comm_type",
        "auto".to_owned(),
    );
    hold(
        !ours && options.graphs.is_some_and(Graphs::is_none),
        "cuda_graph",
        "auto".to_owned(),
    );
    hold(
        options.offload == Some(Offload::NONE) && !sharded && !overlap.expert_alltoall,
        "offload",
        "auto".to_owned(),
    );
    hold(
        several
            && !sharded
            && !overlap.expert_alltoall
            && options.bucket_elements.is_none()
            && pins.pp.is_none_or(|pp| pp == 1),
        "zero",
        "fsdp".to_owned(),
    );
    hold(
        several && !ours && options.instances == 1,
        "num_distributed_optimizer_instances",
        "2".to_owned(),
    );
    held
}

#[cfg(test)]
mod tests {
    use moefold_profiles::pricing::Costs;

    use super::*;
    use crate::layout::Batch;
    use crate::model::presets;
    use crate::options::SearchOptions;
    use crate::stack::megatron::Declared;

    /// What is named is searched, and so not listed; nor is what the degrees leave no room for.
    #[test]
    fn what_was_named_is_not_listed() {
        let model = presets::load("mixtral-8x7b").expect("a preset");
        let cluster = moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
        let costs = Costs::for_cluster(&cluster, &[]);
        let batch = Batch {
            seq_len: 4096,
            global_batch: 64,
        };
        let listed = |options: &SearchOptions, gpus| {
            let asked = Asked::new(&model, &cluster, gpus, options, &costs, &Declared);
            unsearched(&asked).into_keys().collect::<Vec<_>>().join(" ")
        };
        let megatron = SearchOptions::new(batch, StackName::Megatron);
        let all =
            "cp_comm_type cuda_graph num_distributed_optimizer_instances offload overlap zero";
        assert_eq!(listed(&megatron, 16), all);
        let moefold = SearchOptions::new(batch, StackName::Moefold);
        assert_eq!(
            listed(&moefold, 16),
            "cp_comm_type offload overlap schedule zero"
        );
        let schedules = |options: &SearchOptions| {
            let asked = Asked::new(&model, &cluster, 16, options, &costs, &Declared);
            unsearched(&asked)["schedule"].clone()
        };
        assert_eq!(schedules(&moefold), "zb-v|v-half|v-min|dualpipe-v");
        let combined = SearchOptions {
            overlap: Some("expert-alltoall".parse().expect("a word")),
            ..moefold
        };
        assert_eq!(schedules(&combined), "dualpipe-v-combined");
        let named = SearchOptions {
            cp_comm: None,
            graphs: None,
            offload: None,
            instances: 2,
            overlap: Some("expert-alltoall".parse().expect("a word")),
            pins: "pp=4".parse().expect("degrees"),
            ..megatron.clone()
        };
        assert_eq!(listed(&named, 16), "");
        // One rank has nobody to divide anything with.
        assert_eq!(listed(&megatron, 1), "cuda_graph offload");
    }
}
