//! What the planner plans for this executor, the executor runs: no plan is refused on the device that it was
//! made for.

use moefold_executor::device::DeviceSpec;
use moefold_executor::support;
use moefold_executor::trace::Traced;
use moefold_planner::choice::{
    Capacity, Dispatcher, DropPolicy, HostShare, Masters, Offload, Optimizer, Overlap,
    RecomputePlan, ScheduleName, StackName, Zero,
};
use moefold_planner::layout::Batch;
use moefold_planner::model::presets as models;
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::Plan;
use moefold_planner::search;
use moefold_profiles::{Costs, Precision, presets};
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::cuda;

/// What users ask for, of which much cannot be planned.
fn options(random: &mut ChaCha8Rng) -> SearchOptions {
    let batch = Batch {
        seq_len: 128,
        global_batch: 16,
    };
    let pins = [
        ("tp", 4),
        ("cp", 4),
        ("pp", 4),
        ("vpp", 2),
        ("ep", 8),
        ("mbs", 2),
    ];
    let mut pinned = Vec::new();
    for (name, most) in pins {
        let degree = 1 << random.random_range(0..=most / 2);
        if random.random_range(0..4) == 0 {
            pinned.push(format!("{name}={degree}"));
        }
    }
    let chance = |random: &mut ChaCha8Rng| random.random_range(0..3) == 0;
    let capacity = chance(random).then(|| Capacity {
        factor: 1.25,
        drop_policy: *DropPolicy::ALL.choose(random).expect("some"),
        pad: random.random(),
    });
    let recompute = [
        "none",
        "full",
        "moe_act,layernorm",
        "core_attn,moe",
        "mla_up_proj,mlp",
        "0-1=full",
    ];
    let recompute = recompute.choose(random).filter(|_| random.random());
    let offload = [
        "none",
        "core_attn,attn_proj",
        "moe_act,expert_fc1",
        "attn_norm",
    ];
    let overlap = [
        "none",
        "p2p",
        "grad-reduce,param-gather",
        "p2p,shared-expert",
        "p2p,expert-alltoall",
        "grad-reduce,expert-alltoall,delay-wgrad",
    ];
    let overlap = overlap.choose(random).filter(|_| random.random());
    SearchOptions {
        offload: match random.random_range(0..4) {
            0 => None,
            1 => offload
                .choose(random)
                .map(|words| words.parse().expect("modules")),
            _ => Some(Offload::NONE),
        },
        bucket_elements: chance(random).then_some(1000),
        overlap: overlap.map(|words| words.parse::<Overlap>().expect("kinds")),
        schedule: ScheduleName::ALL
            .choose(random)
            .copied()
            .filter(|_| random.random_range(0..3) == 0),
        zero: *[Zero::States, Zero::States, Zero::Fsdp]
            .choose(random)
            .expect("some"),
        precision: *[Precision::Fp32, Precision::Bf16, Precision::Fp8]
            .choose(random)
            .expect("some"),
        pins: pinned.join(",").parse().expect("degrees"),
        dispatcher: Dispatcher::ALL
            .choose(random)
            .copied()
            .filter(|_| random.random()),
        cp_comm: Some(*crate::common::WAYS.choose(random).expect("some")),
        capacity,
        recompute: recompute.map(|words| words.parse::<RecomputePlan>().expect("modules")),
        optimizer: *Optimizer::ALL.choose(random).expect("some"),
        masters: *Masters::ALL.choose(random).expect("some"),
        optimizer_offload: HostShare([0.0, 0.0, 0.5, 1.0][random.random_range(0..4)]),
        // Whether a plan fits is another question.
        memory_gib: Some(1e9),
        ..SearchOptions::new(batch, StackName::Moefold)
    }
}

/// Plans that `requests` random ones end in, each of which is to be run as it is.
fn check(requests: u32) -> usize {
    let seed = cuda::seed();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("plan.json");
    let mut plans = 0;
    for _ in 0..requests {
        let preset = models::all().choose(&mut random).expect("some");
        let model = preset.load().expect("a preset");
        let options = options(&mut random);
        let gpus = 1 << random.random_range(0..=5);
        let cluster = match random.random_range(0..2) {
            0 => presets::local(gpus),
            _ => presets::cluster("dgx-h100").expect("a preset"),
        };
        let costs = Costs::for_cluster(&cluster, &[]);
        let runtime = Traced::new(&model, &cluster);
        let Ok(found) = search::plan(&model, &cluster, gpus, &options, &costs, &runtime) else {
            continue;
        };
        for planned in found.plans {
            let plan = Plan::of(planned, &model, &cluster, gpus, &options);
            let device = if cluster.gpu.is_cpu() {
                DeviceSpec::CPU
            } else {
                DeviceSpec::Cuda {
                    dtype: plan.planned.precision.activation(),
                    reserve: None,
                }
            };
            let name = &model.name;
            plan.save(&file).expect("a temporary folder");
            let read = Plan::load(&file).unwrap_or_else(|refused| {
                panic!("MOEFOLD_SEED={seed}: {name} with {options:?}: {refused}")
            });
            if let Err(refused) = support::check(&read.planned, &read.model, &device) {
                panic!("MOEFOLD_SEED={seed}: {name} with {options:?}: {refused}");
            }
            plans += 1;
        }
    }
    plans
}

#[test]
fn law_what_is_planned_is_run() {
    let plans = check(300);
    assert!(plans > 10, "{plans} plans");
}

#[test]
#[ignore = "minutes"]
fn law_what_is_planned_of_many_requests_is_run() {
    assert!(check(10_000) > 1000);
}
