//! Collectives on the memory of one GPU: what they take, wait for and hold on to.

use std::sync::{Arc, Barrier};
use std::thread::sleep;

use moefold_emulator::LostWait;
use moefold_kernels::cuda::Architecture;
use moefold_kernels::elementwise;
use moefold_profiles::Dtype;

use super::*;
use crate::error::Error;
use crate::transport::tests::{Kind, all_ranks, data, kinds, tensor, zeros};
use crate::transport::{RankContext, World};

/// Collectives on a device leave its account and the memory it holds as they are, and the host reads
/// nothing.
#[test]
fn collectives_on_a_device_take_no_memory_and_no_read_by_the_host() {
    for kind in kinds().into_iter().filter(|&kind| kind != Kind::Cpu) {
        let run = World::threads(4).run(|rank| {
            let (device, group) = (kind.open(), rank.communicator("all", &all_ranks(4)));
            let [sum, max, whole, part, all] =
                [20, 7, 40, 20, 80].map(|len| tensor(&device, &data(1, len)));
            let (shard, rows) = (zeros(&device, &[10]), zeros(&device, &[4, 5]));
            let back = zeros(&device, &[4, 5]);
            device.reset_peak();
            let before = (device.memory(), device.cached(), device.host_reads());
            for _ in 0..2 {
                let started = group.start_all_reduce(&sum)?;
                group.all_reduce_max(&max)?;
                group.reduce_scatter(&whole, &shard)?;
                group.all_gather(&part, &all)?;
                group.all_to_all(&rows, &[1; 4], &back, &[1; 4])?;
                group.start_shift(&rows, &back)?.wait()?;
                group.broadcast(&part.view(0, &[0]), 2)?;
                started.wait()?;
            }
            let after = (device.memory(), device.cached(), device.host_reads());
            assert_eq!(after, before, "on {kind:?}");
            Ok(())
        });
        run.expect("every rank finishes");
    }
}

/// Every collective over three ranks; what it sends is made before and written again after, and what it
/// brings is used.
fn every_collective(rank: &RankContext, device: &Device) -> Result<(), Error> {
    let group = rank.communicator("all", &all_ranks(3));
    let me = rank.rank();
    let made = |dims: &[usize]| {
        let tensor = zeros(device, dims);
        elementwise::fill(&tensor, me as f32 + 1.0);
        tensor
    };
    let run = |exchange: Exchange, written: &[&Tensor]| {
        group.start(exchange)?.wait()?;
        for tensor in written {
            elementwise::scale(tensor, 0.5);
        }
        Ok::<(), Error>(())
    };
    for reduce in [Reduce::Sum, Reduce::Max] {
        let tensor = made(&[40]);
        let exchange = Exchange::AllReduce {
            tensor: tensor.clone(),
            reduce,
        };
        run(exchange, &[&tensor])?;
    }
    let (src, dst) = (made(&[9]), made(&[27]));
    let (from, to) = (src.clone(), dst.clone());
    run(Exchange::AllGather { src: from, dst: to }, &[&src, &dst])?;
    let (from, to) = (dst.clone(), src.clone());
    run(
        Exchange::ReduceScatter { src: from, dst: to },
        &[&src, &dst],
    )?;
    let (src, dst) = (made(&[6, 5]), made(&[6, 5]));
    let exchange = Exchange::AllToAll {
        src: src.clone(),
        send_rows: vec![2; 3],
        dst: dst.clone(),
        recv_rows: vec![2; 3],
        even: false,
    };
    run(exchange, &[&src, &dst])?;
    let (src, dst) = (made(&[8]), made(&[8]));
    let (from, to) = (src.clone(), dst.clone());
    run(Exchange::Shift { src: from, dst: to }, &[&src, &dst])?;
    let tensor = made(&[10]);
    let exchange = Exchange::Broadcast {
        tensor: tensor.clone(),
        root: 0,
    };
    run(exchange, &[&tensor])
}

/// A message around a ring of three, which every rank makes and writes again after, as what it receives.
fn around_the_ring(rank: &RankContext, device: &Device) -> Result<(), Error> {
    let me = rank.rank() as usize;
    let line = rank.lines("pp", &all_ranks(3), &[[0, 1], [1, 2], [2, 0]]);
    let [sent, received] = [zeros(device, &[7]), zeros(device, &[7])];
    elementwise::fill(&sent, me as f32 + 1.0);
    let sending = line.start_send(&sent, (me + 1) % 3)?;
    line.receive(&received, (me + 2) % 3)?;
    elementwise::scale(&received, 0.5);
    sending.wait()?;
    elementwise::scale(&sent, 0.5);
    Ok(())
}

/// Each wait of a rank's streams that tells them anything new is needed: without it work of two streams that
/// do not go together is not ordered, which the emulator finds on whichever rank comes second.
#[test]
fn each_wait_of_a_collective_is_missed_where_it_is_left_out() {
    if kinds() == [Kind::Cpu] {
        return;
    }
    // Of each all-reduce: for its own tensor, two offers, twice two meetings, and its end; of each of the next
    // three the same with one meeting; of the shift, whose neighbours alone matter, one offer and one meeting; of
    // the broadcast what its root waits for, whose stream would not have
    // to wait for the root's own tensor, since it does nothing.
    let before = 2 * (1 + 2 + 4 + 1) + 3 * (1 + 2 + 2 + 1) + (1 + 1 + 1 + 1);
    assert_eq!(waits(every_collective), (before + 1 + 2 + 1, vec![before]));
}

/// What is received is waited for until it is offered and until it is copied, into a tensor that is ready;
/// what is sent until it was read. More waits tell a stream anything where ranks come in another order.
#[test]
fn each_wait_of_a_message_is_missed_where_it_is_left_out() {
    if kinds() == [Kind::Cpu] {
        return;
    }
    // A wait for what a rank has heard of already tells it nothing new: on a busy machine there are fewer.
    let mut most = 0;
    for _ in 0..5 {
        let (all, not_missed) = waits(around_the_ring);
        assert!(not_missed.len() <= 1, "{all} {not_missed:?}");
        most = most.max(all as usize - not_missed.len());
        if most >= 4 {
            return;
        }
    }
    panic!("{most} waits are missed");
}

/// How many waits of rank 0 tell its streams anything new, and which of them are not missed.
fn waits(body: impl Fn(&RankContext, &Device) -> Result<(), Error> + Sync) -> (u32, Vec<u32>) {
    let mut not_missed = Vec::new();
    for number in 0.. {
        let lost = LostWait::number(number);
        let outcome = World::threads(3)
            .deadline(Duration::from_mins(1))
            .run(|rank| {
                let device = if rank.rank() == 0 {
                    moefold_emulator::losing(Architecture::SM80, Dtype::F32, 11, &lost)
                } else {
                    moefold_emulator::device(Architecture::SM80, Dtype::F32, 11)
                };
                body(rank, &device.expect("there was one"))
            });
        if !lost.happened() {
            outcome.expect("nothing is missing");
            return (number, not_missed);
        }
        match outcome {
            Ok(_) => not_missed.push(number),
            Err(error) => {
                let said = error.to_string();
                assert!(said.contains("streams out of order"), "{number}: {said}");
            }
        }
    }
    unreachable!("there are not so many")
}

/// Who awaits a collective waits for that one, not for those that came after it.
#[test]
fn a_collective_is_waited_for_without_those_after_it() {
    for both in [true, false] {
        if kinds() == [Kind::Cpu] {
            return;
        }
        let run = World::threads(2).run(|rank| {
            let device = Kind::Emulated(Dtype::F32).open();
            let group = rank.communicator("all", &[0, 1]);
            let [first, second] = [1.0, 2.0].map(|value| tensor(&device, &[value; 32]));
            let started = group.start_all_reduce(&first)?;
            // All ranks' parts of it are in their streams before there is another one.
            group.barrier()?;
            group.barrier()?;
            let after = group.start_all_reduce(&second)?;
            group.barrier()?;
            group.barrier()?;
            started.wait()?;
            elementwise::scale(&first, 2.0);
            if both {
                after.wait()?;
            }
            elementwise::scale(&second, 2.0);
            assert_eq!(first.to_f32(), [4.0; 32]);
            group.barrier()?;
            Ok(())
        });
        if both {
            run.expect("every rank finishes");
        } else {
            let error = run.expect_err("nobody waited for it").to_string();
            assert!(error.contains("streams out of order"), "{error}");
        }
    }
}

/// On a device a rank may have started a collective and never go on with it.
#[test]
fn a_rank_that_starts_a_collective_on_a_device_and_leaves_or_lingers_is_named() {
    for kind in kinds().into_iter().filter(|&kind| kind != Kind::Cpu) {
        let run = |deadline, stays: Duration| {
            let world = World::threads(3).deadline(deadline);
            let has_started = Barrier::new(3);
            let run = world.run(|rank| {
                let group = rank.communicator("tp", &all_ranks(3));
                let tensor = zeros(&kind.open(), &[4]);
                let start = || group.start_all_reduce(&tensor);
                if rank.rank() == 1 {
                    // Where the others are not there it goes no further.
                    let pending = start();
                    has_started.wait();
                    sleep(stays);
                    drop(pending?);
                    return Ok(());
                }
                has_started.wait();
                start()?.wait()?;
                Ok(())
            });
            run.expect_err("rank 1 does not wait").to_string()
        };
        let absent = run(Duration::from_mins(1), Duration::ZERO);
        assert!(
            absent.contains("all_reduce of 4") && absent.contains("number 0 of group tp [0, 1, 2]"),
            "{absent}"
        );
        assert!(
            absent.contains("for ranks [1], which have finished without it"),
            "{absent}"
        );
        let late = run(Duration::from_millis(200), Duration::from_secs(2));
        assert!(late.contains("for ranks [1], which did not come"), "{late}");
    }
}

/// Who hears of a failure late still reads what was offered before it.
#[test]
fn what_a_failing_rank_offered_stays_until_all_have_ended_and_no_longer() {
    for kind in kinds().into_iter().filter(|&kind| kind != Kind::Cpu) {
        let held = Arc::new(());
        let error = World::threads(2)
            .run(|rank| {
                let group = rank.communicator("tp", &all_ranks(2));
                let device = kind.open();
                if rank.rank() == 1 {
                    // As long as the device is there, so is this.
                    let held = Arc::clone(&held);
                    device.wait_by(move |done| while !done() && Arc::strong_count(&held) > 0 {});
                    let _pending = group.start_all_reduce(&zeros(&device, &[4]))?;
                    return Err(Error::Request("the data ran out".to_owned()));
                }
                let stopped = rank.communicator("words", &all_ranks(2)).barrier();
                stopped.expect_err("rank 1 fails instead");
                sleep(Duration::from_millis(50));
                assert_eq!(Arc::strong_count(&held), 2, "rank 1's device is there");
                let read = group.start_all_reduce(&zeros(&device, &[4]));
                Err::<(), _>(read.expect_err("rank 1 goes no further").into())
            })
            .expect_err("rank 1 fails");
        assert_eq!(error.to_string(), "rank 1: the data ran out");
        assert_eq!(Arc::strong_count(&held), 1, "and then it is not");
    }
}
