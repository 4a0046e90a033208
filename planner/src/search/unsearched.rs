//! [`unsearched`]: choices that a search held as they are though others could be taken, and what these come to.

use super::closest::Change;
use super::watch::{Aim, aimed};
use super::{Asked, least_memory, plan_briefly};
use crate::answer::Untried;
use crate::choice::{CpComm, Graphs, Offload, Overlap, ScheduleName, StackName, Zero};
use crate::model::Model;
use crate::options::{PipelineLayout, PlanError, SearchOptions};
use crate::plan::PlannedLayout;
use crate::rules::Rules;
use crate::stack::Stack;

/// A choice that a search held.
struct Held {
    option: &'static str,
    /// What to name.
    value: String,
    /// The request with that.
    options: SearchOptions,
}

/// What is tried only where it is named and was not, each with what the degrees and stages of `first`, the first plan, come
/// to under it ([`under`]) and what asks for that, and the fastest first. Only what ranks, stack and pinned degrees leave room
/// for; what changes the numbers that are trained with is no choice of a search, but for weights that rest in FP8, as they
/// are multiplied.
pub fn unsearched(asked: &Asked<'_>, first: &PlannedLayout) -> Vec<(Untried, SearchOptions)> {
    let watch = &aimed(Aim::Untried, asked.watch);
    let asked = &Asked { watch, ..*asked };
    let each = held(asked).into_iter().map(|held| {
        let options = under(asked.model, held.options, first);
        (untried(asked, (held.option, held.value), &options), options)
    });
    let mut all: Vec<_> = each.collect();
    let rank = |(untried, _): &(Untried, _)| untried.step_s.unwrap_or(f64::INFINITY);
    all.sort_by(|a, b| rank(a).total_cmp(&rank(b)));
    all
}

/// A choice at the degrees and stages of `first`, as far as it has them: it has two chunks a rank where its pipeline comes
/// back, and one stage where weights rest divided.
fn under(model: &Model, mut options: SearchOptions, first: &PlannedLayout) -> SearchOptions {
    let mut pins = first.layout.pinned();
    let comes_back = options.schedule.is_some_and(ScheduleName::is_vee);
    if comes_back {
        pins.vpp = Some(2);
    }
    let divides = options.zero.divides_gradients();
    if divides {
        (pins.pp, pins.vpp) = (Some(1), Some(1));
    }
    if options.zero == Zero::Fsdp2 {
        pins.ep = Some(1);
        if model.num_moe_layers() > 0 {
            pins.etp = pins.tp;
        }
    }
    let own = pins.pp == Some(1) || comes_back || divides;
    let stages = (!own).then(|| PipelineLayout::of(model, first.pipeline.stages.clone()));
    options.pins = pins;
    options.stages = options.stages.or(stages);
    options.alone()
}

/// A choice with what comes of options that have it.
fn untried(asked: &Asked<'_>, (option, value): (&str, String), options: &SearchOptions) -> Untried {
    let asked = &Asked { options, ..*asked };
    let (mut step_s, mut peak_gib, mut fits) = (None, None, None);
    let rules = Rules::of(asked.model, options);
    let is_legal = rules.contradictions(&options.pins, asked.gpus).is_empty();
    match is_legal.then(|| plan_briefly(asked)) {
        Some(Ok(found)) if found.search.unseen.is_none() => {
            let predicted = &found.plans[0].predicted;
            step_s = Some(predicted.step_s);
            peak_gib = Some(predicted.peak_gib);
            fits = Some(true);
        }
        Some(Err(PlanError::Infeasible { .. })) => {
            peak_gib = least_memory(asked).map(|least| least.peak_gib);
            fits = Some(false);
        }
        Some(Err(PlanError::Hosts { .. })) => fits = Some(false),
        // Stopped, or not legal for these degrees.
        _ => {}
    }
    Untried {
        option: option.to_owned(),
        value,
        step_s,
        peak_gib,
        fits,
    }
}

/// The choices, in no order that says anything.
fn held(asked: &Asked<'_>) -> Vec<Held> {
    let (options, pins) = (asked.options, &asked.options.pins);
    let several = asked.gpus > 1;
    let overlap = options.overlap.unwrap_or_default();
    let sharded = options.zero.divides_gradients();
    let mut all = overlaps(asked);
    all.extend(schedules(asked));
    let mut hold = |is_held: bool, (option, value), change: &dyn Fn(&mut SearchOptions)| {
        if is_held {
            let mut options = options.clone();
            change(&mut options);
            all.push(Held {
                option,
                value,
                options,
            });
        }
    };
    let auto = |option| (option, "auto".to_owned());
    hold(
        several && pins.cp != Some(1) && options.cp_comm == Some(CpComm::default()),
        auto("cp_comm_type"),
        &|options| options.cp_comm = None,
    );
    hold(
        options.stack == StackName::Megatron && options.graphs.is_some_and(Graphs::is_none),
        auto("cuda_graph"),
        &|options| options.graphs = None,
    );
    hold(
        options.offload == Some(Offload::NONE) && !sharded && !overlap.expert_alltoall,
        auto("offload"),
        &|options| options.offload = None,
    );
    hold(
        several && options.instances == 1,
        ("num_distributed_optimizer_instances", "2".to_owned()),
        &|options| options.instances = 2,
    );
    let divides = several && !overlap.expert_alltoall && options.bucket_elements.is_none();
    let plain = divides && !sharded && options.instances == 1;
    for (zero, instances) in [(Zero::Gradients, 1), (Zero::Hybrid, 2), (Zero::Fsdp2, 1)] {
        let value = if instances > 1 {
            format!(
                "{} --num-distributed-optimizer-instances {instances}",
                zero.name()
            )
        } else {
            zero.name().to_owned()
        };
        hold(plain, ("zero", value), &|options| {
            (options.zero, options.instances) = (zero, instances);
        });
    }
    for change in [
        Change::Fsdp,
        Change::States,
        Change::Masters,
        Change::Primary,
    ] {
        hold(
            change.is_open(options) && (change != Change::Fsdp || divides),
            change.named(),
            &|options| change.make(asked.model, options),
        );
    }
    all.retain(|held| {
        let rules = Rules::of(asked.model, &held.options);
        rules.contradictions(pins, asked.gpus).is_empty()
    });
    all
}

/// What runs beside compute only where it is named.
fn overlaps(asked: &Asked<'_>) -> Vec<Held> {
    let options = asked.options;
    let plain = options.overlap.is_none() && asked.gpus > 1 && !asked.cluster.gpu.is_cpu();
    if !plain {
        return Vec::new();
    }
    let pins = &options.pins;
    let stack = Stack::on(options.stack, asked.cluster, asked.costs.host());
    let base = stack.overlap(options.optimizer);
    let exchanges = pins.ep != Some(1);
    let passes = exchanges && options.schedule.is_none() && options.stages.is_none();
    let with = [
        (pins.tp != Some(1), Overlap { tp: true, ..base }),
        (
            exchanges,
            Overlap {
                shared_expert: true,
                ..base
            },
        ),
        (
            passes,
            Overlap {
                expert_alltoall: true,
                ..base
            },
        ),
        (
            passes,
            Overlap {
                expert_alltoall: true,
                delay_wgrad: true,
                ..base
            },
        ),
    ];
    let there = with.into_iter().filter(|(there, _)| *there);
    let held = there.map(|(_, overlap)| Held {
        option: "overlap",
        value: overlap.into(),
        options: SearchOptions {
            overlap: Some(overlap),
            ..options.clone()
        },
    });
    held.collect()
}

/// Pipelines that come back.
fn schedules(asked: &Asked<'_>) -> Vec<Held> {
    let (options, pins) = (asked.options, &asked.options.pins);
    let pipes = asked.gpus > 1 && pins.pp != Some(1) && !options.zero.divides_gradients();
    let plain = options.schedule.is_none() && options.stages.is_none();
    if !pipes || !plain || pins.vpp.is_some_and(|vpp| vpp != 2) {
        return Vec::new();
    }
    let stack = Stack::of(options.stack);
    let overlap = options.overlap.unwrap_or_default();
    let goes = |name: &ScheduleName| name.is_vee() && name.combines() == overlap.expert_alltoall;
    let held = stack.schedules(2, 2).filter(goes).map(|schedule| Held {
        option: "schedule",
        value: schedule.apart().unwrap_or(schedule).name().to_owned(),
        options: SearchOptions {
            schedule: Some(schedule),
            ..options.clone()
        },
    });
    held.collect()
}

#[cfg(test)]
mod tests {
    use moefold_profiles::Precision;
    use moefold_profiles::pricing::Costs;

    use super::*;
    use crate::choice::{HostShare, Masters};
    use crate::layout::Batch;
    use crate::model::presets;
    use crate::stack::megatron::Declared;

    /// What is named is searched, and so not listed; nor is what the degrees leave no room for, or what breaks a rule.
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
            let mut all: Vec<String> = held(&asked)
                .into_iter()
                .map(|held| match held.option {
                    "overlap" => held
                        .value
                        .trim_start_matches("grad-reduce,param-gather,p2p,")
                        .to_owned(),
                    "schedule" => held.value,
                    option => option.to_owned(),
                })
                .collect();
            all.sort_unstable();
            all.join(" ")
        };
        let megatron = SearchOptions::new(batch, StackName::Megatron);
        assert_eq!(
            listed(&megatron, 16),
            "cp_comm_type cuda_graph expert-alltoall expert-alltoall,delay-wgrad masters \
             num_distributed_optimizer_instances offload optimizer_offload_fraction tp zero zero zero"
        );
        let fp8 = SearchOptions {
            precision: Precision::Fp8,
            ..megatron.clone()
        };
        assert_eq!(
            listed(&fp8, 1),
            "cuda_graph masters offload optimizer_offload_fraction primary_weights"
        );
        let moefold = SearchOptions::new(batch, StackName::Moefold);
        assert_eq!(
            listed(&moefold, 16),
            "cp_comm_type dualpipe-v expert-alltoall expert-alltoall,delay-wgrad offload \
             optimizer_offload_fraction v-half v-min zb-v zero"
        );
        let combined = SearchOptions {
            overlap: Some("expert-alltoall".parse().expect("a word")),
            ..moefold
        };
        assert_eq!(
            listed(&combined, 16),
            "cp_comm_type dualpipe-v optimizer_offload_fraction"
        );
        let named = SearchOptions {
            cp_comm: None,
            graphs: None,
            offload: None,
            instances: 2,
            overlap: Some("expert-alltoall".parse().expect("a word")),
            optimizer_offload: HostShare(0.5),
            masters: Masters::Remainder,
            pins: "pp=4".parse().expect("degrees"),
            ..megatron.clone()
        };
        assert_eq!(listed(&named, 16), "optimizer_offload_fraction");
    }
}
