//! Worlds of processes with a GPU each, here threads with an emulated one, over an NCCL without GPUs:
//! what travels, which communicators there are, and how everything that hangs or fails ends.

use moefold_kernels::cuda::Architecture;
use moefold_kernels::cuda::nccl::mock::Mock;
use moefold_kernels::{Dtype, TensorClass, elementwise};

use super::*;
use crate::error::Error;
use crate::transport::rendezvous::tests::{PATIENCE, collectives, processes, world_of};
use crate::transport::tests::{messages, oracle_messages};
use crate::transport::world::Gpu;
use crate::transport::{Communicator, RankContext, World};

mod training;

fn device(dtype: Dtype) -> Device {
    moefold_emulator::device(Architecture::SM90, dtype, 1).expect("it needs nothing yet")
}

/// Runs ranks whose communicators are of `mock`.
fn gpus<T: Send>(
    mock: Mock,
    ranks: u32,
    deadline: Duration,
    body: impl Fn(&RankContext, &Device) -> Result<T, Error> + Sync,
) -> Vec<Result<T, String>> {
    processes(&world_of(ranks), deadline, |rank| {
        let device = device(Dtype::F32);
        let rank = rank.over_nccl(mock.nccl(&[]), &device);
        body(&rank, &device)
    })
}

fn mock() -> Option<Mock> {
    let mock = Mock::load()?;
    mock.moves();
    Some(mock)
}

fn ones(device: &Device, dims: &[usize]) -> Tensor {
    let tensor = device.zeros(TensorClass::Activations, Dtype::F32, dims);
    tensor.copy_from_f32(&vec![1.0; tensor.len()]);
    tensor
}

fn pair(rank: &RankContext) -> Communicator {
    rank.communicator("tp", &[0, 1])
}

/// An exchange that NCCL may finish in the background.
fn swap(group: &Communicator, device: &Device) -> Result<Vec<f32>, TransportError> {
    let (src, dst) = (ones(device, &[2, 3]), ones(device, &[2, 3]));
    group.all_to_all(&src, &[1, 1], &dst, &[1, 1])?;
    Ok(dst.to_f32())
}

#[test]
fn differential_gpus_compute_what_threads_compute() {
    let Some(mock) = mock() else { return };
    for ranks in [2, 4] {
        let threads = World::threads(ranks).run(|rank| collectives(rank, &Device::cpu(1)));
        let outcomes = gpus(mock, ranks, PATIENCE, collectives);
        for (expected, found) in threads.expect("finishes").into_iter().zip(outcomes) {
            assert_eq!(found.expect("finishes"), expected);
        }
    }
    mock.assert_clean();
}

/// Each line between two ranks is a communicator of its own beside that of all ranks.
#[test]
fn messages_between_gpus_come_in_their_order() {
    let Some(mock) = mock() else { return };
    for ranks in [2, 3] {
        let before = mock.said().len();
        let outcomes = gpus(mock, ranks, PATIENCE, messages);
        for (me, came) in outcomes.into_iter().enumerate() {
            assert_eq!(came, Ok(oracle_messages(me, ranks as usize)));
        }
        let joined = mock.said()[before..].matches("rank 0 of 2").count();
        assert!(joined >= 2 * ranks as usize, "{joined}");
    }
    mock.assert_clean();
}

/// Who awaits a collective waits for that one, not for those that came after it.
#[test]
fn a_collective_is_waited_for_without_those_after_it() {
    let Some(mock) = mock() else { return };
    for both in [true, false] {
        let outcomes = gpus(mock, 2, PATIENCE, |rank, device| {
            let tp = pair(rank);
            let [first, second] = [(); 2].map(|()| ones(device, &[8]));
            let started = tp.start_all_reduce(&first)?;
            let after = tp.start_all_reduce(&second)?;
            started.wait()?;
            elementwise::scale(&first, 2.0);
            if both {
                after.wait()?;
            }
            elementwise::scale(&second, 2.0);
            Ok(())
        });
        for outcome in outcomes {
            match outcome {
                Ok(()) => assert!(both, "nobody waited for the second"),
                Err(error) => assert!(
                    !both
                        && (error.contains("streams out of order")
                            || error.contains("because rank")),
                    "{error}"
                ),
            }
        }
    }
    assert_eq!((mock.wrong().as_str(), mock.alive()), ("", 0));
}

#[test]
fn bf16_is_summed_and_sent_as_it_is_stored() {
    let Some(mock) = mock() else { return };
    let outcomes = processes(&world_of(2), PATIENCE, |rank| {
        let device = device(Dtype::Bf16);
        let rank = rank.over_nccl(mock.nccl(&[]), &device);
        let tensor = device.zeros(TensorClass::Activations, Dtype::Bf16, &[4]);
        tensor.copy_from_f32(&[1.0, 2.0, 3.0, f32::from(rank.rank() as u8)]);
        let half = device.zeros(TensorClass::Activations, Dtype::Bf16, &[2]);
        pair(&rank).reduce_scatter(&tensor, &half)?;
        Ok(half.to_f32())
    });
    assert_eq!(outcomes, [Ok(vec![2.0, 4.0]), Ok(vec![6.0, 1.0])]);
    mock.assert_clean();
}

#[test]
fn even_rows_go_by_nccls_own_all_to_all_where_it_has_one() {
    for missing in ["nothing", "ncclAlltoAll"] {
        let Some(mock) = mock() else { return };
        let outcomes = processes(&world_of(2), PATIENCE, |rank| {
            let device = device(Dtype::F32);
            let rank = rank.over_nccl(mock.nccl(&[missing]), &device);
            let (me, tp) = (rank.rank(), pair(&rank));
            let rows = |first: u32| {
                let values: Vec<f32> = (0..8).map(|i| (first + i) as f32).collect();
                device.from_f32(TensorClass::Activations, &values, &[4, 2])
            };
            let dst = rows(0);
            tp.all_to_all_even(&rows(10 * me), &dst)?;
            let even = dst.to_f32();
            // Nothing is as even as it gets.
            let none = device.zeros(TensorClass::Activations, Dtype::F32, &[0, 2]);
            tp.all_to_all_even(&none, &none)?;
            let send = [[1, 3], [3, 1]][me as usize];
            tp.all_to_all(&rows(10 * me), &send, &dst, &send)?;
            Ok([even, dst.to_f32()])
        });
        let from = |firsts: &[u32]| -> Vec<f32> {
            let rows = firsts.iter().flat_map(|&first| [first, first + 1]);
            rows.map(|value| value as f32).collect()
        };
        let first = [from(&[0, 2, 10, 12]), from(&[0, 10, 12, 14])];
        let second = [from(&[4, 6, 14, 16]), from(&[2, 4, 6, 16])];
        assert_eq!(outcomes, [Ok(first), Ok(second)]);
        let said = mock.said();
        let count = |call: &str| said.lines().filter(|line| *line == call).count();
        let own = missing == "nothing";
        // A rank sends two members each something.
        assert_eq!(
            (count("ncclAlltoAll"), count("ncclSend")),
            if own { (2, 4) } else { (0, 8) }
        );
        mock.assert_clean();
    }
}

#[test]
fn groups_are_split_from_one_parent_and_groups_of_one_have_none() {
    let Some(mock) = mock() else { return };
    let outcomes = gpus(mock, 4, PATIENCE, |rank, _| {
        let me = rank.rank();
        let tp = rank.communicator("tp", &[me & !1, me | 1]);
        let cp = rank.communicator("cp", &[me]);
        let dp = rank.communicator("dp", &[me % 2, me % 2 + 2]);
        // Some have one rank, some more: the others split without it.
        let some = if me < 2 { vec![me] } else { vec![2, 3] };
        let some = rank.communicator("some", &some);
        Ok([&tp, &cp, &dp, &some].map(Communicator::is_solo))
    });
    for (rank, solo) in outcomes.into_iter().enumerate() {
        assert_eq!(solo, Ok([false, true, false, rank < 2]));
    }
    let said = mock.said();
    let mut splits: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("colour"))
        .collect();
    splits.sort_unstable();
    let expected = [
        "  rank 0: colour -1 key 0",
        "  rank 0: colour 0 key 0",
        "  rank 0: colour 0 key 0",
        "  rank 1: colour -1 key 0",
        "  rank 1: colour 0 key 1",
        "  rank 1: colour 1 key 0",
        "  rank 2: colour 0 key 1",
        "  rank 2: colour 2 key 0",
        "  rank 2: colour 2 key 0",
        "  rank 3: colour 1 key 1",
        "  rank 3: colour 2 key 1",
        "  rank 3: colour 2 key 1",
    ];
    assert_eq!(splits, expected);
    let count = |call: &str| said.lines().filter(|line| *line == call).count();
    assert_eq!(count("ncclGetUniqueId"), 1);
    // The parent, two groups each and the one of some.
    assert_eq!(
        (count("ncclCommFinalize"), count("ncclCommDestroy")),
        (14, 14)
    );
    assert_eq!(count("ncclCommAbort"), 0);
    mock.assert_clean();
}

#[test]
fn ranks_that_ask_for_different_groups_are_told_before_they_hang() {
    let Some(mock) = mock() else { return };
    let outcomes = gpus(mock, 2, PATIENCE, |rank, device| {
        let name = ["tp", "dp"][rank.rank() as usize];
        swap(&rank.communicator(name, &[0, 1]), device)?;
        Ok(())
    });
    let error = outcomes[0].as_ref().expect_err("they differ");
    assert!(
        error.contains("making a group of 2 (number 0 of group tp [0, 1])")
            || error.contains("making a group of 2 (number 0 of group dp [0, 1])"),
        "{error}"
    );
    assert_eq!((mock.wrong().as_str(), mock.alive()), ("", 0));
}

#[test]
fn a_call_that_fails_aborts_every_communicator_and_says_what_it_was() {
    let Some(mock) = mock() else { return };
    let outcomes = gpus(mock, 2, PATIENCE, |rank, device| {
        let tp = pair(rank);
        let other = rank.communicator("dp", &[0, 1]);
        tp.all_reduce(&ones(device, &[4]))?;
        tp.barrier()?;
        if rank.rank() == 1 {
            mock.fail(1, 3, "ncclAllReduce");
            let error = tp.all_reduce(&ones(device, &[6])).expect_err("it fails");
            let again = swap(&other, device).expect_err("nothing works any more");
            assert_eq!(again, error);
            return Err(error.into());
        }
        tp.barrier()?;
        Ok(())
    });
    assert_eq!(
        outcomes[1].as_ref().expect_err("it failed"),
        "rank 1: NCCL failed in all_reduce of 6 f32 (number 1 of group tp [0, 1]), 24 bytes: \
         ncclAllReduce failed with 3 (internal error): f32[6] among 2 ranks; NCCL says: socket 7 of \
         peer 3 was closed; the rank's communicators were aborted"
    );
    let error = outcomes[0].as_ref().expect_err("it is told");
    assert!(
        error.contains("because rank 1 failed: rank 1: NCCL failed"),
        "{error}"
    );
    let said = mock.said();
    let aborted = said.lines().filter(|line| *line == "ncclCommAbort").count();
    assert!(aborted >= 3, "the parent and two groups: {aborted}");
    assert_eq!((mock.wrong().as_str(), mock.alive()), ("", 0));
}

#[test]
fn a_failure_in_the_background_ends_the_wait_for_it() {
    let Some(mock) = mock() else { return };
    let outcomes = gpus(mock, 2, PATIENCE, |rank, device| {
        let tp = pair(rank);
        swap(&tp, device)?;
        tp.barrier()?;
        if rank.rank() == 1 {
            mock.busy(-1);
            mock.break_down(1, 6);
        }
        swap(&tp, device)?;
        Ok(())
    });
    let place = "all_to_all of 6 f32 (number 1 of group tp [0, 1])";
    let broken = format!(
        "rank 1: NCCL failed in {place}, 24 bytes: ncclCommGetAsyncError failed with 6 (remote process \
         exited or there was a network error): a communicator of 2 ranks; NCCL says: socket 7 of peer 3 \
         was closed; the rank's communicators were aborted"
    );
    let told = format!("rank 0 stopped in {place} because rank 1 failed: {broken}");
    assert_eq!(outcomes, [Err(told), Err(broken)]);
    assert_eq!((mock.wrong().as_str(), mock.alive()), ("", 0));
}

#[test]
fn what_never_ends_is_aborted_at_the_deadline() {
    let Some(mock) = mock() else { return };
    let outcomes = gpus(mock, 2, Duration::from_millis(600), |rank, device| {
        let tp = pair(rank);
        swap(&tp, device)?;
        tp.barrier()?;
        mock.busy(-1);
        swap(&tp, device)?;
        Ok(())
    });
    let stuck = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
    let stuck: Vec<&String> = stuck
        .filter(|error| error.contains("for the GPU in"))
        .collect();
    assert!(!stuck.is_empty(), "{outcomes:?}");
    for error in stuck {
        assert!(
            error.contains(
                "waited 0.6 s for the GPU in all_to_all of 6 f32 (number 1 of group tp [0, 1])"
            ),
            "{error}"
        );
    }
    assert_eq!((mock.wrong().as_str(), mock.alive()), ("", 0));
}

#[test]
fn a_rank_that_fails_frees_those_that_wait_for_their_gpu() {
    let Some(mock) = mock() else { return };
    let begun = Instant::now();
    let outcomes: Vec<Result<(), String>> = gpus(mock, 2, PATIENCE, |rank, device| {
        let tp = pair(rank);
        swap(&tp, device)?;
        tp.barrier()?;
        if rank.rank() == 1 {
            return Err(Error::Request("a bad file".to_owned()));
        }
        mock.busy(-1);
        let Gpu::Ring(ring) = &rank.gpus else {
            panic!("there is one");
        };
        let device_hangs = || false;
        Err(ring
            .wait(&device_hangs)
            .expect_err("it would wait for ever")
            .into())
    });
    let error = outcomes[0].as_ref().expect_err("it is told");
    assert!(
        error.contains("because rank 1 failed: a bad file"),
        "{error}"
    );
    assert!(
        begun.elapsed() < PATIENCE / 2,
        "it did not wait for the deadline"
    );
    assert_eq!((mock.wrong().as_str(), mock.alive()), ("", 0));
}

#[test]
fn a_device_that_never_gets_done_is_given_up_with_the_collective_it_hangs_in() {
    let Some(mock) = mock() else { return };
    let outcomes = gpus(mock, 2, Duration::from_millis(500), |rank, device| {
        let tp = pair(rank);
        swap(&tp, device)?;
        let Gpu::Ring(ring) = &rank.gpus else {
            panic!("there is one");
        };
        // Emulated collectives are done at once, so none of them is the culprit.
        let error = ring.wait(&|| false).expect_err("it would wait for ever");
        let TransportError::Stuck { rank, place, .. } = &error else {
            return Err(error.into());
        };
        assert_eq!(place.op, "work without a collective");
        Ok(*rank)
    });
    assert!(outcomes.iter().any(Result::is_ok), "{outcomes:?}");
    assert_eq!((mock.wrong().as_str(), mock.alive()), ("", 0));
}

#[test]
fn without_nccl_every_use_says_what_is_missing() {
    let outcomes = processes(&world_of(2), PATIENCE, |rank| {
        let device = device(Dtype::F32);
        let absent = DeviceError {
            call: "ncclGetVersion",
            code: None,
            op: None,
            detail: "NCCL: not found; pip install nvidia-nccl-cu13".to_owned(),
        };
        let rank = rank.over_nccl(Err(absent), &device);
        assert!(rank.communicator("cp", &[rank.rank()]).is_solo());
        pair(&rank).barrier()?;
        Ok(())
    });
    for outcome in outcomes {
        let error = outcome.expect_err("there is none");
        assert!(error.contains("pip install nvidia-nccl-cu13"), "{error}");
    }
}
