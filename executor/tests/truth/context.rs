//! Context parallelism against one rank: every way to reach the keys of other ranks, folded with everything
//! else, for every kind of attention.

use moefold_executor::data::Packing;
use moefold_executor::device::DeviceSpec;
use moefold_planner::choice::{CpComm, Module, Recompute, StackName};
use moefold_planner::layout::Degrees;
use moefold_planner::model::{Layer, Mixer};
use moefold_planner::options::SearchOptions;
use moefold_planner::rules::Rules;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::common::{Fixture, cut, degrees, piped};
use crate::cuda::{BF16, HOPPER, check_layouts, seed};
use crate::layouts::{compare, compare_gradients, gradients};
use crate::{packing, recompute};

/// Families with every kind of attention: grouped queries with and without norms and biases, latent with
/// compressed queries and without, and depths of multi-token prediction.
pub(crate) const KINDS: [&str; 6] = [
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_mtp",
];

/// Every legal layout of two to eight ranks with context parallelism of one kind.
fn contexts(fixture: &Fixture, cp_comm: CpComm) -> Vec<Degrees> {
    let options = SearchOptions {
        cp_comm: Some(cp_comm),
        ..SearchOptions::new(fixture.batch(), StackName::Moefold)
    };
    let rules = Rules::of(&fixture.model, &options);
    let mut all = Vec::new();
    for gpus in 2..=8 {
        let divisors = || (1..=gpus).filter(move |&degree| gpus % degree == 0);
        for (cp, pp) in divisors().flat_map(|cp| divisors().map(move |pp| (cp, pp))) {
            for (tp, ep, etp) in divisors()
                .flat_map(|tp| divisors().map(move |ep| (tp, ep)))
                .flat_map(|(tp, ep)| divisors().map(move |etp| (tp, ep, etp)))
            {
                for (vpp, mbs) in (1..=2).flat_map(|vpp| [1, 2, 3].map(|mbs| (vpp, mbs))) {
                    let degrees = cut(piped(degrees(gpus, tp, ep, etp, mbs), pp, vpp), cp);
                    if cp > 1 && rules.layout(&degrees).is_ok() {
                        all.push(degrees);
                    }
                }
            }
        }
    }
    all
}

/// So many of these layouts drawn at random, or all of them; at least one.
pub(crate) fn drawn(
    fixture: &Fixture,
    cp_comm: CpComm,
    count: Option<usize>,
    random: &mut ChaCha8Rng,
) -> Vec<Degrees> {
    let all = contexts(fixture, cp_comm);
    assert!(!all.is_empty(), "{}: {cp_comm:?}", fixture.name);
    let Some(count) = count else { return all };
    let mut one = || all[random.random_range(0..all.len())];
    (0..count).map(|_| one()).collect()
}

/// Layouts of a fixture of each way, so many of each or all, against one rank.
fn check(name: &'static str, count: Option<usize>) {
    const STEPS: u64 = 2;
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let mut fixture = Fixture::load(name).with_layers(2).with_batch(12);
    let one = degrees(1, 1, 1, 1, 12);
    let single = fixture.train(&one, STEPS, &fixture.options());
    let grads = gradients(&fixture, &one);
    for cp_comm in crate::common::WAYS {
        fixture.savers.cp_comm = cp_comm;
        for degrees in drawn(&fixture, cp_comm, count, &mut random) {
            let both = std::panic::AssertUnwindSafe(|| {
                compare(&fixture, &single, &degrees, STEPS);
                compare_gradients(&fixture, &grads, &degrees);
            });
            let checked = std::panic::catch_unwind(both);
            let what = || format!("MOEFOLD_SEED={}: {name} {cp_comm:?} {degrees:?}", seed());
            assert!(checked.is_ok(), "{}", what());
        }
    }
}

#[test]
fn oracle_layouts_that_cut_sequences_equal_one_rank() {
    for name in KINDS {
        check(name, Some(3));
    }
}

/// Families with windows, alone and beside sinks.
const WINDOWS: [&str; 4] = [
    "gpt_oss",
    "mixtral_windows",
    "qwen2_moe_windows",
    "qwen3_windows",
];

/// Ways under which a fixture's sequences are cut: where keys travel, none of windows and of documents that attention
/// keeps apart.
fn ways(fixture: &Fixture) -> Vec<CpComm> {
    let layers = fixture.model.layers.iter();
    let limited =
        |layer: &Layer| matches!(&layer.mixer, Some(Mixer::Gqa(gqa)) if gqa.window.is_some());
    let whole = fixture.samples.packing().reset_attention_mask || layers.into_iter().any(limited);
    let ways = crate::common::WAYS.into_iter();
    ways.filter(|&way| !whole || way == CpComm::A2a).collect()
}

/// A fixture without windows: of gpt-oss sinks are left.
fn without_windows(fixture: Fixture) -> Fixture {
    let mut model = fixture.model.clone();
    for layer in &mut model.layers {
        if let Some(Mixer::Gqa(gqa)) = &mut layer.mixer {
            gqa.window = None;
        }
    }
    fixture.with_model(model)
}

/// Windows, sinks, and documents, as they are and beside one another.
#[test]
fn oracle_windows_sinks_and_documents_of_cut_sequences_equal_one_rank() {
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let positions = Packing {
        reset_attention_mask: false,
        ..packing::ALL
    };
    let load = |name| Fixture::load(name).with_layers(2).with_batch(12);
    let mut fixtures: Vec<Fixture> = WINDOWS.map(load).into();
    fixtures.push(without_windows(load("gpt_oss")));
    for name in ["gpt_oss", "qwen3_moe", "deepseek_v3_mtp"] {
        fixtures.push(packing::apart(load(name)));
    }
    for name in ["qwen3_tied", "deepseek_v2"] {
        fixtures.push(packing::packed(load(name), positions));
    }
    let one = degrees(1, 1, 1, 1, 12);
    for mut fixture in fixtures {
        let single = fixture.train(&one, 2, &fixture.options());
        let grads = gradients(&fixture, &one);
        let ways = ways(&fixture);
        let each = 4_usize.div_ceil(ways.len());
        for cp_comm in ways {
            fixture.savers.cp_comm = cp_comm;
            for degrees in drawn(&fixture, cp_comm, Some(each), &mut random) {
                let both = std::panic::AssertUnwindSafe(|| {
                    compare(&fixture, &single, &degrees, 2);
                    compare_gradients(&fixture, &grads, &degrees);
                });
                let checked = std::panic::catch_unwind(both);
                let what = (
                    seed(),
                    fixture.name,
                    fixture.samples.packing(),
                    cp_comm,
                    degrees,
                );
                assert!(checked.is_ok(), "MOEFOLD_SEED and what was drawn: {what:?}");
            }
        }
    }
}

/// Minutes, so only where asked for (`--ignored`).
#[test]
#[ignore = "takes minutes: there are thousands of layouts"]
fn oracle_every_layout_that_cuts_sequences_equals_one_rank() {
    for name in KINDS {
        check(name, None);
    }
}

/// Of every kind of attention and every way.
#[test]
fn oracle_cut_sequences_in_bf16_equal_one_rank_but_for_rounding() {
    let grouped = ("qwen3_tied", BF16, [CpComm::P2p, CpComm::A2a]);
    let limited = ("gpt_oss", BF16, [CpComm::A2a; 2]);
    let latent = (
        "deepseek_v3_halves",
        HOPPER,
        [CpComm::P2p, CpComm::Allgather],
    );
    for (name, on, mut ways) in
        [grouped, limited, latent].map(|(name, on, ways)| (name, on, ways.to_vec()))
    {
        let mut fixture = Fixture::load(name).with_batch(2);
        ways.dedup();
        for cp_comm in ways {
            fixture.savers.cp_comm = cp_comm;
            check_layouts(&fixture, on, &[cut(degrees(2, 1, 1, 1, 2), 2)], 1e-2);
        }
    }
}

#[test]
fn law_cut_sequences_give_the_same_bits_on_any_number_of_threads() {
    for name in ["mixtral", "deepseek_v3"] {
        let mut fixture = Fixture::load(name).with_batch(4);
        for (cp_comm, layout) in crate::common::WAYS.into_iter().zip([
            cut(degrees(4, 1, 2, 2, 2), 4),
            cut(degrees(4, 2, 4, 1, 2), 2),
            cut(degrees(8, 2, 4, 1, 1), 4),
        ]) {
            fixture.savers.cp_comm = cp_comm;
            let run = |threads| {
                let mut options = fixture.options();
                options.device = DeviceSpec::Cpu {
                    threads_per_rank: Some(threads),
                };
                let trained = fixture.train(&layout, 2, &options);
                (trained.steps, trained.weights)
            };
            let first = run(1);
            assert_eq!(run(1), first, "{name} {cp_comm:?}, run again");
            assert_eq!(run(2), first, "{name} {cp_comm:?}, on two threads");
        }
    }
}

/// Of the forward pass; gradients are summed in another order.
#[test]
fn differential_gathered_keys_give_the_bits_of_the_ring() {
    let mut fixture = Fixture::load("deepseek_v3").with_batch(4);
    let layout = cut(degrees(4, 1, 2, 2, 2), 4);
    let losses = [CpComm::P2p, CpComm::Allgather].map(|cp_comm| {
        fixture.savers.cp_comm = cp_comm;
        fixture.train(&layout, 1, &fixture.options()).steps[0].loss
    });
    assert_eq!(losses[0].to_bits(), losses[1].to_bits());
}

#[test]
fn law_recomputing_changes_no_bit_of_cut_sequences() {
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    for name in ["qwen3_moe", "deepseek_v3"] {
        for cp_comm in crate::common::WAYS {
            let mut fixture = Fixture::load(name).with_batch(4);
            fixture.savers.cp_comm = cp_comm;
            let layout = cut(degrees(4, 1, 2, 1, 1), 2);
            let sets = recompute::sets(&fixture);
            let plain = fixture.train(&layout, 2, &fixture.options());
            for set in [
                Recompute::of(vec![Module::CoreAttn]),
                sets[random.random_range(0..sets.len())].clone(),
                Recompute::Full,
            ] {
                fixture = fixture.recomputing(set);
                let again = fixture.train(&layout, 2, &fixture.options());
                let what = format!("{name} {cp_comm:?} {:?}", fixture.savers);
                assert_eq!(plain.steps, again.steps, "{what}: steps");
                assert!(plain.weights == again.weights, "{what}: weights");
            }
        }
    }
}
