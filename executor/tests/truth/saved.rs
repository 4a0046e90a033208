//! What modules keep for backward is what the planner prices, tensor by tensor, and nothing else
//! stays alive; weights, gradients and optimizer states take what it prices. On the CPU, and on
//! emulated GPUs in f32 and bf16.

use moefold_executor::model::Family;
use moefold_executor::rank::Context;
use moefold_executor::stage::NamedTensor;
use moefold_executor::train::{self, Trainer};
use moefold_executor::transport::World;
use moefold_kernels::{Device, Dtype, TensorClass};
use moefold_planner::choice::{Optimizer, Recompute, StackName};
use moefold_planner::layout::{Degrees, Layout};
use moefold_planner::local::Local;
use moefold_planner::saved::SavedTensor;
use moefold_planner::stack;
use moefold_planner::stack::Stack;
use moefold_planner::stack::moefold::{Device as On, Site};
use moefold_profiles::Precision;

use crate::common::{Fixture, degrees};
use crate::cuda;

/// Module, name and bytes of every tensor, sorted.
type Listing = Vec<(String, String, u64)>;

fn actual<'a>(tensors: impl Iterator<Item = &'a NamedTensor<'a>>) -> Listing {
    let mut list: Listing = tensors
        .map(|saved| {
            let bytes = saved.tensor.bytes().0;
            (saved.module.to_owned(), saved.name.to_owned(), bytes)
        })
        .filter(|(_, _, bytes)| *bytes > 0)
        .collect();
    list.sort();
    list
}

fn declared(saved: &[SavedTensor]) -> Listing {
    let mut list: Listing = saved
        .iter()
        .map(|saved| {
            (
                saved.module.to_owned(),
                saved.name.to_owned(),
                saved.bytes().0,
            )
        })
        .collect();
    list.sort();
    list
}

fn precision(device: &Device) -> Precision {
    match device.dtype() {
        Dtype::Bf16 => Precision::Bf16,
        _ => Precision::Fp32,
    }
}

/// Compares what a rank holds before its first step.
fn compare_state(trainer: &Trainer) {
    let cx = &trainer.cx;
    let bytes =
        Stack::of(StackName::Moefold).state(precision(&cx.device), Optimizer::Adam, Dtype::F32);
    let memory = cx.device.memory();
    let held = |class| memory.live(class).0 as f64;
    let shard = &trainer.stepper().store.shard;
    let families = [Family::Dense, Family::Expert];
    let sum = |of: fn(usize, usize) -> usize| -> f64 {
        let of = families.map(|f| of(shard.buffer_len(f), cx.replicas(f).size()) as f64);
        of.iter().sum()
    };
    let all = sum(|len, _| len);
    assert_eq!(held(TensorClass::Weights), bytes.weight * all);
    assert_eq!(held(TensorClass::Gradients), bytes.gradient * all);
    let sharded = sum(|len, replicas| len / replicas);
    assert_eq!(held(TensorClass::Optimizer), bytes.sharded * sharded);
}

/// Compares one rank after its forward pass.
fn compare(fixture: &Fixture, layout: &Layout, trainer: &Trainer) {
    let model = &fixture.model;
    let cx = &trainer.cx;
    let tokens = train::microbatches(&fixture.samples, cx, &fixture.batch(), 0).expect("tokens");
    let precision = precision(&cx.device);
    let before = cx.device.memory().live_total();
    let saved = trainer
        .stepper()
        .forward_only(cx, &tokens[0])
        .expect("forward");
    let alive = cx.device.memory().live_total().0 - before.0;

    let tensors = saved[0].tensors();
    let mut local = Local::new(layout, model, &fixture.batch(), 1.0);
    let mut total = 0;
    for (index, layer) in model.layers.iter().enumerate() {
        let of_layer = || tensors.iter().filter(move |t| t.layer == Some(index));
        // Routing decides how many rows reach the rank; the declaration is for a given number.
        let dispatched = of_layer().find(|t| t.name == "dispatched");
        local.expert_rows = dispatched.map_or(0, |t| t.tensor.dims()[0] as u64);
        let expected = stack::saved(
            StackName::Moefold,
            model,
            layer,
            &local,
            precision,
            &Recompute::None,
        );
        assert_eq!(
            actual(of_layer()),
            declared(&expected),
            "{} {layout:?} rank {} layer {index}",
            fixture.name,
            cx.rank
        );
        total += expected.iter().map(|saved| saved.bytes().0).sum::<u64>();
    }
    let head = Site::new(model, &local, precision, On::Cpu).kept_by_head();
    assert_eq!(
        actual(tensors.iter().filter(|t| t.layer.is_none())),
        declared(&head)
    );
    total += head.iter().map(|saved| saved.bytes().0).sum::<u64>();
    assert_eq!(
        alive, total,
        "{layout:?} rank {}: bytes alive and declared",
        cx.rank
    );
}

fn check(fixture: &Fixture, degrees: &Degrees, open: impl Fn() -> Device + Sync) {
    let layout = fixture.layout(degrees);
    let (options, weights) = (fixture.options(), fixture.weights());
    World::threads(layout.gpus())
        .run(|rank| {
            let cx = Context::join(rank, &layout, open(), rank.recorder());
            let seq_len = fixture.golden.seq_len;
            let trainer = Trainer::new(cx, &fixture.model, seq_len, &options, &weights)?;
            compare_state(&trainer);
            compare(fixture, &layout, &trainer);
            Ok(())
        })
        .expect("ranks run");
}

#[test]
fn law_modules_keep_what_they_declare() {
    for name in ["mixtral", "qwen3_moe"] {
        let fixture = Fixture::load(name);
        for degrees in [
            degrees(1, 1, 1, 1, 4),
            degrees(2, 2, 1, 1, 4),
            degrees(2, 1, 2, 1, 4),
            degrees(4, 2, 2, 2, 2),
            degrees(4, 2, 4, 1, 2),
            degrees(4, 1, 1, 4, 1),
            degrees(8, 2, 4, 2, 1),
        ] {
            check(&fixture, &degrees, || Device::cpu(1));
        }
    }
}

#[test]
fn law_modules_keep_what_they_declare_on_cuda() {
    for on in [cuda::F32, cuda::BF16, cuda::HOPPER] {
        if on.is_there() {
            let fixture = Fixture::load("qwen3_moe").with_batch(2);
            check(&fixture, &degrees(1, 1, 1, 1, 2), || on.open());
        }
    }
}
