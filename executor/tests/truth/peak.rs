//! The most that a step has alive is what the planner declares, byte for byte and class by class: the
//! state of a rank, what stands throughout a step, and the highest instant of its passes. On the CPU over
//! many layouts, and on emulated GPUs in f32 and bf16. Where routing decides how many rows a rank has,
//! the rows of the step itself are put in; where it decides nothing, the number is the plan's.

use moefold_executor::error::Error;
use moefold_executor::model::Part;
use moefold_executor::rank::Context;
use moefold_executor::step::HostTokens;
use moefold_executor::train::{self, TrainOptions, Trainer};
use moefold_executor::transport::World;
use moefold_kernels::{Device, Memory, TensorClass};
use moefold_planner::choice::{Optimizer, StackName};
use moefold_planner::layout::{Degrees, Layout};
use moefold_planner::local::Local;
use moefold_planner::memory::tape::Level;
use moefold_planner::memory::{self, passes::Passes};
use moefold_planner::model::{Ffn, Mixer, QkNorm};
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::Predicted;
use moefold_planner::stack::Stack;
use moefold_planner::stack::moefold::{
    Device as On, Site, embedding_padding, head_padding, layer_padding,
};
use moefold_planner::{search, shard};
use moefold_profiles::units::{Bytes, GIB};
use moefold_profiles::{Cluster, Costs, Dtype, Precision, presets};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, degrees};
use crate::cuda::{self, Emulated};
use crate::layouts::legal;

/// What a step is measured on.
struct Place<'a> {
    open: &'a (dyn Fn() -> Device + Sync),
    on: On,
    precision: Precision,
}

const CPU: Place<'static> = Place {
    open: &|| Device::cpu(1),
    on: On::Cpu,
    precision: Precision::Fp32,
};

/// The rows of one layer's routing as this rank has them, after the counts of all that send to it.
fn routed(cx: &Context, local: &Local, ids: &[i32], experts: usize) -> Result<Local, Error> {
    let mut own = vec![0_u64; experts];
    for &id in ids {
        own[id as usize] += 1;
    }
    let all = cx.tp_ep.exchange_counts(&own)?;
    let held = experts / cx.ep.size();
    let here = cx.ep.index() * held..(cx.ep.index() + 1) * held;
    let from = |sender: usize| all[sender][here.clone()].iter();
    let peers = cx.etp.size();
    let mine = (0..all.len()).filter(|sender| sender % peers == cx.etp.index());
    let in_order = held == 1 || all.len() == 1;
    let blocks = (0..all.len()).flat_map(from).filter(|&&rows| rows > 0);
    Ok(Local {
        expert_rows: (0..all.len()).flat_map(from).sum(),
        received_rows: mine.flat_map(from).sum(),
        row_blocks: if in_order { 0 } else { blocks.count() as u64 },
        ..*local
    })
}

/// The passes of one microbatch, declared for the rows that it sends.
fn passes(
    fixture: &Fixture,
    trainer: &Trainer,
    site: &Site<'_>,
    tokens: &HostTokens,
) -> Result<Passes, Error> {
    let cx = &trainer.cx;
    let kept = trainer.stepper().forward_only(cx, tokens)?;
    let tensors = kept[0].tensors();
    let mut all = site.embedding();
    for (index, layer) in fixture.model.layers.iter().enumerate() {
        let mut local = *site.local;
        if let Some(Ffn::Moe(moe)) = &layer.ffn {
            let ids = tensors
                .iter()
                .find(|t| t.layer == Some(index) && t.name == "expert_ids");
            let ids = ids.expect("a router keeps them").tensor.to_i32();
            local = routed(cx, site.local, &ids, moe.experts as usize)?;
        }
        let here = Site {
            local: &local,
            ..*site
        };
        all = all.then(here.layer(layer));
    }
    Ok(all.then(site.head()))
}

/// What a rank is declared to have alive at most beside its state.
fn declared(
    fixture: &Fixture,
    trainer: &Trainer,
    site: &Site<'_>,
    microbatches: &[HostTokens],
) -> Result<Level, Error> {
    let mut worst = site.update();
    for tokens in microbatches {
        let passes = passes(fixture, trainer, site, tokens)?;
        worst = worst.higher(passes.forward);
        worst = worst.higher(passes.saved + passes.backward);
    }
    Ok(site.standing(microbatches.len() as u64) + worst)
}

/// What rests between steps.
const STATES: [TensorClass; 3] = [
    TensorClass::Weights,
    TensorClass::Gradients,
    TensorClass::Optimizer,
];

/// Weights, gradients and optimizer of a rank that holds as much as any, as a plan says.
fn planned_state(fixture: &Fixture, layout: &Layout, site: &Site<'_>, on: Precision) -> [Bytes; 3] {
    let (model, local) = (&fixture.model, site.local);
    let embedding = shard::embedding(model, local) + embedding_padding(model, local);
    let mut all = embedding + shard::head(model, local) + head_padding(model, local);
    for layer in &model.layers {
        all += shard::layer(model, layer, local) + layer_padding(model, layer, local);
    }
    if model.tied_embeddings {
        all.split -= embedding.split;
    }
    let bytes = Stack::of(StackName::Moefold).state(on, Optimizer::Adam, Dtype::F32);
    let (dense, experts) = (layout.dp() * layout.cp(), layout.edp());
    let state = memory::state(&all, bytes, dense.into(), experts.into());
    STATES.map(|class| state[class])
}

/// Runs two steps on one rank and compares the peak of each.
fn compare(
    fixture: &Fixture,
    place: &Place<'_>,
    layout: &Layout,
    trainer: &mut Trainer,
    options: &TrainOptions,
) -> Result<(), Error> {
    let batch = fixture.batch();
    let local = Local::new(layout, &fixture.model, &batch, 1.0);
    let embedding = trainer.stepper().store.shard.find(None, Part::Embedding);
    let site = Site {
        vocab: embedding.dims[0] as u64,
        balanced: options.aux_loss_coef > 0.0,
        ..Site::new(&fixture.model, &local, place.precision, place.on)
    };
    let device = trainer.cx.device.clone();
    let what = format!("{} {layout:?} rank {}", fixture.name, trainer.cx.rank);
    let memory = device.memory();
    let held = STATES.map(|class| memory.live(class));
    // The last of TP ranks may have fewer rows of the vocabulary.
    if site.vocab == shard::vocab(&fixture.model, &local) {
        let planned = planned_state(fixture, layout, &site, place.precision);
        assert_eq!(held, planned, "{what}: {STATES:?}");
    }
    let state: u64 = held.iter().map(|bytes| bytes.0).sum();
    // Ids and targets come with a step.
    let before = site.standing(0).total() as u64;
    assert_eq!(
        memory.live_total().0,
        state + before,
        "{what}: between steps"
    );
    for step in 0..2 {
        let tokens = train::microbatches(&fixture.samples, &trainer.cx, &batch, step)?;
        let expected = declared(fixture, trainer, &site, &tokens)?;
        device.reset_peak();
        trainer.step(&tokens, options.lr.at(step))?;
        let memory = device.memory();
        let measured = [
            TensorClass::Activations,
            TensorClass::Transient,
            TensorClass::Logits,
        ]
        .map(|class| (memory.at_peak(class).0 as i64, expected.get(class)));
        let what = format!("{what} step {step}: measured and declared {measured:?}");
        let total = state + expected.total() as u64;
        assert_eq!(memory.peak_total().0, total, "{what}");
        assert!(measured.iter().all(|(a, b)| a == b), "{what}");
    }
    Ok(())
}

fn check(fixture: &Fixture, place: &Place<'_>, degrees: &Degrees, aux_loss_coef: f64) {
    let layout = fixture.layout(degrees);
    let (mut options, weights) = (fixture.options(), fixture.weights());
    options.aux_loss_coef = aux_loss_coef;
    World::threads(layout.gpus())
        .run(|rank| {
            let cx = Context::join(rank, &layout, (place.open)(), rank.recorder());
            let seq_len = fixture.golden.seq_len;
            let mut trainer = Trainer::new(cx, &fixture.model, seq_len, &options, &weights)?;
            compare(fixture, place, &layout, &mut trainer, &options)
        })
        .unwrap_or_else(|error| panic!("{} {degrees:?}: {error}", fixture.name));
}

#[test]
fn law_the_peak_of_a_step_is_declared() {
    for name in ["mixtral", "qwen3_moe", "qwen3_moe_raw", "qwen3_tied"] {
        let fixture = Fixture::load(name).with_batch(8);
        for gpus in [1, 2, 4, 8] {
            for (i, degrees) in legal(&fixture, gpus).iter().enumerate() {
                // Every other with a load-balancing loss.
                check(&fixture, &CPU, degrees, 0.01 * (i % 2) as f64);
            }
        }
    }
}

/// A model of up to four layers of either kind, in any order, with widths that put the peak of a step
/// in one place or another.
fn drawn(random: &mut ChaCha8Rng) -> Fixture {
    let fixture = Fixture::load("qwen3_moe").with_batch(4);
    let mut model = fixture.model.clone();
    let layers = model.layers.clone();
    let mut one_of = |all: &[u64]| all[random.random_range(0..all.len())];
    model.hidden = one_of(&[16, 32, 80]);
    model.tied_embeddings = one_of(&[0, 1]) == 1;
    let (head_dim, kv_heads) = (one_of(&[4, 8, 12]), one_of(&[1, 2, 4]));
    let qk_norm = one_of(&[0, 1]) == 1;
    let (experts, width) = (one_of(&[4, 8]), one_of(&[8, 16, 64]));
    let (topk, dense) = (one_of(&[1, 2, 4]), one_of(&[16, 48, 160]));
    model.layers.clear();
    for _ in 0..one_of(&[1, 2, 4]) {
        let mut layer = layers[one_of(&[0, 1]) as usize].clone();
        if let Some(Mixer::Gqa(gqa)) = &mut layer.mixer {
            (gqa.heads, gqa.kv_heads) = (8, kv_heads);
            (gqa.head_dim, gqa.rotary_dim) = (head_dim, head_dim);
            if !qk_norm {
                gqa.qk_norm = QkNorm::None;
            }
        }
        match &mut layer.ffn {
            Some(Ffn::Dense(mlp)) => mlp.width = dense,
            Some(Ffn::Moe(moe)) => {
                (moe.experts, moe.topk, moe.expert.width) = (experts, topk, width);
            }
            None => unreachable!("every layer has a feed-forward block"),
        }
        model.layers.push(layer);
    }
    fixture.with_model(model)
}

#[test]
fn law_the_peak_is_declared_wherever_it_is() {
    let mut random = ChaCha8Rng::seed_from_u64(cuda::seed());
    for draw in 0..24 {
        let fixture = drawn(&mut random);
        for gpus in [1, 2, 4, 8] {
            let all = legal(&fixture, gpus);
            let degrees = all[random.random_range(0..all.len())];
            let what = || (cuda::seed(), draw, &fixture.model.layers);
            let checked = std::panic::catch_unwind(|| check(&fixture, &CPU, &degrees, 0.01));
            assert!(checked.is_ok(), "MOEFOLD_SEED, draw, layers: {:?}", what());
        }
    }
}

fn check_emulated(fixture: &Fixture, on: Emulated, degrees: &Degrees, aux_loss_coef: f64) {
    if !on.is_there() {
        return;
    }
    let capability = if on == cuda::HOPPER { 90 } else { 80 };
    let place = Place {
        open: &|| on.open(),
        on: On::cuda(capability),
        precision: precision(on),
    };
    check(fixture, &place, degrees, aux_loss_coef);
}

fn precision(on: Emulated) -> Precision {
    if on == cuda::F32 {
        Precision::Fp32
    } else {
        Precision::Bf16
    }
}

#[test]
fn law_the_peak_of_a_step_on_cuda_is_declared() {
    let (mixtral, qwen) = (Fixture::load("mixtral"), Fixture::load("qwen3_moe"));
    let one = degrees(1, 1, 1, 1, 1);
    let (mixtral, qwen) = (mixtral.with_batch(2), qwen.with_batch(2));
    check_emulated(&qwen, cuda::F32, &one, 0.01);
    check_emulated(&mixtral, cuda::BF16, &one, 0.0);
    check_emulated(&qwen, cuda::HOPPER, &one, 0.0);
}

#[test]
fn law_the_peak_of_rank_threads_on_cuda_is_declared() {
    let fixture = Fixture::load("qwen3_moe_raw").with_batch(2);
    check_emulated(&fixture, cuda::F32, &degrees(2, 2, 1, 2, 1), 0.0);
    check_emulated(&fixture, cuda::BF16, &degrees(2, 1, 2, 1, 1), 0.01);
    check_emulated(&fixture, cuda::HOPPER, &degrees(2, 2, 2, 1, 2), 0.0);
}

/// Trains under a layout for two steps and compares the fullest rank's peak with the plan's, class by
/// class.
fn check_plan(fixture: &Fixture, cluster: &Cluster, place: &Place<'_>, degrees: &Degrees) {
    let planned = predicted(fixture, cluster, place.precision, degrees);
    let (_, peaks) = fixture.train_on(place.open, degrees, 2, &fixture.options(), |trainer| {
        trainer.cx.device.memory()
    });
    let measured = peaks.into_iter().max_by_key(Memory::peak_total);
    let measured = measured.expect("a rank");
    let gib = &planned.memory_gib;
    let what = format!("{} {degrees:?}", fixture.name);
    let overhead = gib[TensorClass::Overhead];
    for (class, &gib) in gib
        .iter()
        .filter(|(class, _)| *class != TensorClass::Overhead)
    {
        assert_eq!(measured.at_peak(class), bytes(gib), "{what}: {class:?}");
    }
    let tensors = planned.peak_gib - overhead;
    assert_eq!(measured.peak_total(), bytes(tensors), "{what}");
}

/// Bytes of a plan, which are whole.
fn bytes(gib: f64) -> Bytes {
    Bytes((gib * GIB as f64) as u64)
}

/// The plan of exactly this layout.
fn predicted(
    fixture: &Fixture,
    cluster: &Cluster,
    precision: Precision,
    degrees: &Degrees,
) -> Predicted {
    let Degrees {
        tp, ep, etp, mbs, ..
    } = degrees;
    let mut options = SearchOptions {
        precision,
        ..SearchOptions::new(fixture.batch(), StackName::Moefold)
    };
    let pins = format!("tp={tp},cp=1,pp=1,vpp=1,ep={ep},etp={etp},mbs={mbs}");
    options.pins = pins.parse().expect("degrees");
    let costs = Costs::for_cluster(cluster, &[]);
    let found = search::plan(&fixture.model, cluster, degrees.gpus, &options, &costs);
    found.expect("it fits").plans.swap_remove(0).predicted
}

/// Fixtures in which routing decides nothing: one without experts, and two, one of them with dense
/// layers between, with all of them chosen.
fn unvarying() -> [Fixture; 3] {
    let all = |name| {
        let mut fixture = Fixture::load(name);
        for layer in &mut fixture.model.layers {
            if let Some(Ffn::Moe(moe)) = &mut layer.ffn {
                moe.topk = moe.experts;
            }
        }
        fixture
    };
    let fixtures = [
        Fixture::load("qwen3_tied"),
        all("mixtral"),
        all("qwen3_moe"),
    ];
    fixtures.map(|fixture| fixture.with_batch(8))
}

#[test]
fn law_a_plan_says_the_peak_of_a_run() {
    for fixture in unvarying() {
        for gpus in [1, 2, 4] {
            let cluster = presets::local(gpus);
            for degrees in legal(&fixture, gpus) {
                check_plan(&fixture, &cluster, &CPU, &degrees);
            }
        }
    }
}

#[test]
fn law_a_plan_says_the_peak_of_a_run_on_cuda() {
    for (on, capability, cluster) in [(cuda::BF16, 80, "dgx-a100"), (cuda::HOPPER, 90, "dgx-h100")]
    {
        if !on.is_there() {
            return;
        }
        let place = Place {
            open: &|| on.open(),
            on: On::cuda(capability),
            precision: precision(on),
        };
        let cluster = presets::cluster(cluster).expect("a preset");
        let [dense, experts, _] = unvarying().map(|fixture| fixture.with_batch(1));
        for fixture in [dense, experts] {
            check_plan(&fixture, &cluster, &place, &degrees(1, 1, 1, 1, 1));
        }
    }
}
