//! Rows arrive where their expert is and come home unchanged; payloads say where they are from.

use moefold_executor::moe::Load;
use moefold_executor::moe::dispatch::{Chosen, Dispatch, leaving, leaving_numbers};
use moefold_executor::rank::Context;
use moefold_executor::transport::World;
use moefold_executor::turns::now;
use moefold_kernels::{Device, Tensor, TensorClass, elementwise, permute};
use moefold_planner::choice::Dispatcher;
use moefold_planner::layout::{Batch, Degrees, Layout};

use crate::common::{Fixture, degrees};

const EXPERTS: usize = 8;
const TOPK: usize = 3;
const TOKENS: usize = 40;

/// An even spread, everything to one expert, or some pattern in between.
fn choice(pattern: u32, rank: u32, token: usize, slot: usize) -> usize {
    match pattern {
        0 => (token + slot) % EXPERTS,
        1 => [3, 0, 7][slot],
        _ => {
            let mixed = (token * 31 + rank as usize * 7) % 97;
            (mixed + slot * (1 + mixed % 2)) % EXPERTS
        }
    }
}

/// Source rank, token, slot and expert of every choice, as a row.
fn payload(rank: u32, pattern: u32) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut rows) = (Vec::new(), Vec::new());
    for token in 0..TOKENS {
        for slot in 0..TOPK {
            let expert = choice(pattern, rank, token, slot);
            ids.push(expert as i32);
            rows.extend([rank as f32, token as f32, slot as f32, expert as f32]);
        }
    }
    (ids, rows)
}

/// Sends every choice of the rank's tokens to its expert and back.
fn round_trip(cx: &Context, dispatcher: Dispatcher, pattern: u32) {
    let (ids, rows) = payload(cx.rank, pattern);
    // Every choice as a token of its own, so that it comes home alone.
    let choices = TOKENS * TOPK;
    let ids = cx
        .device
        .from_i32(TensorClass::Activations, &ids, &[choices, 1]);
    let rows = cx
        .device
        .from_f32(TensorClass::Activations, &rows, &[choices, 4]);
    let numbers = moefold_kernels::rows::gather_columns(&rows, 1..2);
    let map = permute::map(&ids, EXPERTS);
    let load: Vec<u64> = map.counts().iter().map(|&rows| rows as u64).collect();
    let chosen = Chosen {
        map: (dispatcher == Dispatcher::Alltoall || cx.tp_ep.is_solo()).then_some(map),
        load: Load::Known(load.clone()),
        ids,
        experts: EXPERTS,
        limit: None,
    };
    let sent = leaving(cx, &rows, chosen.map.as_ref());
    let sent_numbers = leaving_numbers(cx, &numbers, chosen.map.as_ref());
    let dispatch = Dispatch::plan(cx, chosen).expect("counts");
    let (arrived, arrived_numbers) =
        now(dispatch.to_experts_with(cx, sent, sent_numbers)).expect("dispatch");
    // Of the experts here, what all ranks chose.
    let held = EXPERTS / cx.ep.size();
    let all = cx.tp_ep.exchange_counts(&load).expect("counts");
    let here = cx.ep.index() * held..(cx.ep.index() + 1) * held;
    let of_expert = |expert: usize| all.iter().map(|load| load[expert] as usize).sum();
    let counts: Vec<usize> = here.map(of_expert).collect();
    assert_eq!(dispatch.num_rows(), counts.iter().sum::<usize>());
    check_arrival(cx, &counts, &arrived, &arrived_numbers);

    // Every ETP rank gives its part of the sum.
    let part = 1.0 / cx.etp.size() as f32;
    for tensor in [&arrived, &arrived_numbers] {
        elementwise::scale(tensor, part);
    }
    let (home, home_numbers) =
        now(dispatch.from_experts_with(cx, arrived, arrived_numbers)).expect("combine");
    assert_eq!(home.to_f32(), rows.to_f32());
    assert_eq!(home_numbers.to_f32(), numbers.to_f32());
}

fn check_arrival(cx: &Context, counts: &[usize], arrived: &Tensor, numbers: &Tensor) {
    let held = EXPERTS / cx.ep.size();
    let rows = arrived.to_f32();
    let mut rows = rows.chunks_exact(4).zip(numbers.to_f32());
    for (local, &count) in counts.iter().enumerate() {
        let expert = cx.ep.index() * held + local;
        for _ in 0..count {
            let (row, number) = rows.next().expect("as many rows as counted");
            assert_eq!(row[3], expert as f32, "a row reached another expert");
            assert_eq!(row[1], number, "a number travelled with another row");
            assert!(
                cx.tp_ep.ranks().contains(&(row[0] as u32)),
                "from outside the group"
            );
        }
    }
    assert!(rows.next().is_none(), "more rows than counted");
}

fn check(degrees: &Degrees) {
    let fixture = Fixture::load("mixtral");
    let batch = Batch {
        seq_len: 16,
        global_batch: 24,
    };
    let layout = Layout::new(degrees, &fixture.model, &batch).expect("legal");
    World::threads(layout.gpus())
        .run(|rank| {
            let device = Device::cpu(1);
            device.poison(true);
            let cx = Context::join(rank, &layout, device, rank.recorder());
            for dispatcher in [Dispatcher::Alltoall, Dispatcher::Allgather] {
                (0..3).for_each(|pattern| round_trip(&cx, dispatcher, pattern));
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{degrees:?}: {error}"));
}

#[test]
fn law_dispatch_then_combine_is_identity() {
    for gpus in [1, 2, 4, 8] {
        for ep in [1, 2, 4, 8] {
            for etp in [1, 2, 4, 8] {
                if gpus % (ep * etp) == 0 {
                    check(&degrees(gpus, 1, ep, etp, 1));
                }
            }
        }
    }
}
