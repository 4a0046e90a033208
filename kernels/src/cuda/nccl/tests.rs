//! Communicators of an NCCL without GPUs, on a driver without one: the order of calls, what travels
//! where, what becomes of failures, and that nothing is left behind.

use std::thread;

use moefold_profiles::Dtype;

use super::mock::Mock;
use super::*;
use crate::cuda::Stream;
use crate::cuda::gpu::tests::mock::Mock as Driver;
use crate::cuda::gpu::tests::{IMAGE, device};
use crate::cuda::nvrtc::tests::skip;
use crate::device::{Device, TensorClass};
use crate::tensor::Tensor;

fn mock() -> Option<Mock> {
    let mock = Mock::load();
    if mock.is_none() {
        skip("stubs", "calls into NCCL (no C compiler, cc)");
    }
    mock
}

fn open(mock: Mock) -> Nccl {
    mock.nccl(&[]).expect("the mock has them all")
}

/// Waits without end.
#[expect(clippy::unnecessary_wraps, reason = "others lose their patience")]
fn patient() -> Result<(), DeviceError> {
    Ok(())
}

fn join(nccl: Nccl, device: &Device, rank: usize, size: usize) -> Result<Comm, DeviceError> {
    Comm::join(nccl, device, nccl.unique_id()?, rank, size, &mut patient)
}

fn calls(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.starts_with(' ')).collect()
}

#[test]
fn a_communicator_is_waited_for_and_ended_in_order() {
    let (Some(mock), Some(driver)) = (mock(), Driver::driver()) else {
        return;
    };
    let device = device(driver, IMAGE);
    let nccl = open(mock);
    mock.busy(2);
    let mut pauses = 0;
    let mut pause = || {
        pauses += 1;
        Ok::<(), DeviceError>(())
    };
    let id = UniqueId::from_bytes(nccl.unique_id().expect("an id").to_bytes());
    let world = Comm::join(nccl, &device, id, 3, 4, &mut pause).expect("it joins");
    assert_eq!((world.rank(), world.size()), (3, 4));
    let group = world
        .split(Some(2), 1, 2, Stream::Communication, &mut pause)
        .expect("it splits");
    let group = group.expect("a group");
    assert_eq!((group.rank(), group.size()), (1, 2));
    let none = world
        .split(None, 0, 1, Stream::Communication, &mut pause)
        .expect("it splits");
    assert!(none.is_none());
    group.finalize(&mut pause).expect("it ends");
    drop(group);
    world.finalize(&mut pause).expect("it ends");
    drop(world);
    // Twice each: joining, the parent and the group of a split, the parent of the other, two ends.
    assert_eq!(pauses, 12);
    let said = mock.said();
    let asked = "ncclCommGetAsyncError";
    let calls: Vec<&str> = said.lines().filter(|line| *line != asked).collect();
    let expected = [
        "ncclGetUniqueId",
        "ncclCommInitRankConfig",
        "  id 0, rank 3 of 4, version 21800, share 1",
        "ncclCommSplit",
        "  rank 3: colour 2 key 1",
        "ncclCommSplit",
        "  rank 3: colour -1 key 0",
        "ncclCommFinalize",
        "  1",
        "ncclCommDestroy",
        "  1",
        "ncclCommFinalize",
        "  0",
        "ncclCommDestroy",
        "  0",
    ];
    assert_eq!(calls, expected);
    drop(device);
    mock.assert_clean();
    driver.assert_clean();
}

#[test]
fn whoever_loses_patience_leaves_nothing_behind() {
    let (Some(mock), Some(driver)) = (mock(), Driver::driver()) else {
        return;
    };
    let device = device(driver, IMAGE);
    let nccl = open(mock);
    let world = join(nccl, &device, 0, 2).expect("it joins");
    mock.busy(-1);
    let mut left = 5;
    let mut impatient = || {
        left -= 1;
        let error = DeviceError::new("waiting", "too long");
        if left > 0 { Ok(()) } else { Err(error) }
    };
    let id = nccl.unique_id().expect("an id");
    let error = Comm::join(nccl, &device, id, 0, 2, &mut impatient).expect_err("it hangs");
    assert_eq!(error.call, "waiting");
    assert_eq!(mock.alive(), 1, "what did not come to be was aborted");
    let split = world.split(Some(0), 0, 2, Stream::Communication, &mut impatient);
    assert_eq!(split.expect_err("it hangs").call, "waiting");
    world.abort();
    world.abort();
    assert!(world.is_aborted());
    let before = mock.said();
    let tensor = device.zeros(TensorClass::Activations, Dtype::F32, &[4]);
    for refused in [
        world.all_reduce(&tensor, Reduce::Sum).map(drop),
        world.send(&tensor, 1).map(drop),
        world.progress().map(drop),
        world
            .split(Some(0), 0, 2, Stream::Communication, &mut patient)
            .map(drop),
        world.finalize(&mut patient),
    ] {
        let error = refused.expect_err("it is gone").to_string();
        assert!(error.contains("the communicator was aborted"), "{error}");
    }
    drop((world, tensor, device));
    assert_eq!(mock.said(), before, "nothing more is asked");
    mock.assert_clean();
}

#[test]
fn a_split_that_gives_a_member_no_communicator_is_an_error() {
    let (Some(mock), Some(driver)) = (mock(), Driver::driver()) else {
        return;
    };
    let device = device(driver, IMAGE);
    let nccl = open(mock);
    let world = join(nccl, &device, 0, 2).expect("it joins");
    // In progress, it says, and then done, with nothing to show.
    mock.fail(1, 7, "ncclCommSplit");
    let error = world.split(Some(0), 0, 2, Stream::Communication, &mut patient);
    let error = error.expect_err("it has a colour").to_string();
    assert!(
        error.contains("a group of 2 out of 2, and NCCL gave no communicator"),
        "{error}"
    );
    drop((world, device));
    mock.assert_clean();
}

#[test]
fn a_failure_in_the_background_is_told_with_all_that_nccl_says() {
    let (Some(mock), Some(driver)) = (mock(), Driver::driver()) else {
        return;
    };
    let device = device(driver, IMAGE);
    let world = join(open(mock), &device, 0, 2).expect("it joins");
    mock.break_down(0, 6);
    let error = world.progress().expect_err("it is broken");
    assert_eq!(
        error.to_string(),
        "ncclCommGetAsyncError failed with 6 (remote process exited or there was a network error): \
         a communicator of 2 ranks; NCCL says: socket 7 of peer 3 was closed"
    );
    drop((world, device));
    assert_eq!(calls(&mock.said()).last(), Some(&"ncclCommAbort"));
    mock.assert_clean();
}

#[test]
fn a_library_without_a_function_is_refused_unless_there_is_another_way() {
    let Some(mock) = mock() else { return };
    for required in gate::Nccl::FUNCTIONS {
        // That one is the gate's.
        if required != "ncclGetVersion" {
            let error = mock.nccl(&[required]).expect_err("it is required");
            let error = error.to_string();
            assert!(error.contains(&format!("has no {required}")), "{error}");
        }
    }
    assert!(open(mock).has_all_to_all());
    let older = mock.nccl(&["ncclAlltoAll"]).expect("it is optional");
    assert!(!older.has_all_to_all());
    let mute = mock.nccl(&["ncclGetLastError"]).expect("it is optional");
    mock.fail(1, 3, "ncclGetUniqueId");
    let error = mute.unique_id().expect_err("it fails");
    assert_eq!(
        error.to_string(),
        "ncclGetUniqueId failed with 3 (internal error): a new communicator"
    );
}

/// Numbers of a rank that every dtype has, and whose sums it has.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7 + rank * 3) % 11) as f32 - 5.0)
        .collect()
}

fn tensor(device: &Device, dtype: Dtype, values: &[f32]) -> Tensor {
    let tensor = device.zeros(TensorClass::Activations, dtype, &[values.len()]);
    match dtype {
        Dtype::I32 => {
            let whole: Vec<i32> = values.iter().map(|&value| value as i32).collect();
            tensor.copy_from_i32(&whole);
        }
        _ => tensor.copy_from_f32(values),
    }
    tensor
}

fn values(tensor: &Tensor) -> Vec<f32> {
    match tensor.dtype() {
        Dtype::I32 => tensor.to_i32().into_iter().map(|v| v as f32).collect(),
        _ => tensor.to_f32(),
    }
}

/// Runs `body` on `size` ranks, threads with a GPU each.
fn on_ranks(mock: Mock, size: usize, body: impl Fn(Nccl, &Device, &Comm) + Sync) {
    let nccl = open(mock);
    let id = nccl.unique_id().expect("an id");
    thread::scope(|scope| {
        for rank in 0..size {
            let body = &body;
            scope.spawn(move || {
                let driver = Driver::driver().expect("there is a compiler");
                mock.drain_by(driver.find("cuStreamSynchronize").expect("it is there"));
                let device = device(driver, IMAGE);
                let world = Comm::join(nccl, &device, id, rank, size, &mut patient);
                let world = world.expect("it joins");
                body(nccl, &device, &world);
                world.finalize(&mut patient).expect("it ends");
                drop((world, device));
                driver.assert_clean();
            });
        }
    });
    mock.assert_clean();
}

const LEN: usize = 5;

#[test]
fn oracle_collectives_move_what_they_say_in_every_dtype() {
    let Some(mock) = mock() else { return };
    on_ranks(mock, 3, |_, device, world| {
        let (rank, size) = (world.rank(), world.size());
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::I32] {
            let done = |progress: Result<Progress, DeviceError>| {
                assert_eq!(progress.expect("nothing fails"), Progress::Done);
                device.join(Stream::Communication);
            };
            let own = |len| tensor(device, dtype, &numbers(rank, len));
            let folded = |len: usize, fold: fn(f32, f32) -> f32| -> Vec<f32> {
                let at = |i: usize| (0..size).map(move |other| numbers(other, len)[i]);
                (0..len)
                    .map(|i| at(i).reduce(fold).expect("ranks"))
                    .collect()
            };
            let sum = own(LEN);
            done(world.all_reduce(&sum, Reduce::Sum));
            assert_eq!(values(&sum), folded(LEN, |a, b| a + b), "{dtype}");
            let max = own(LEN);
            done(world.all_reduce(&max, Reduce::Max));
            assert_eq!(values(&max), folded(LEN, f32::max), "{dtype}");

            let shard = tensor(device, dtype, &[0.0; LEN]);
            done(world.reduce_scatter(&own(LEN * size), &shard));
            let whole = folded(LEN * size, |a, b| a + b);
            assert_eq!(values(&shard), whole[rank * LEN..][..LEN], "{dtype}");

            let gathered = tensor(device, dtype, &vec![0.0; LEN * size]);
            done(world.all_gather(&own(LEN), &gathered));
            let all: Vec<f32> = (0..size).flat_map(|r| numbers(r, LEN)).collect();
            assert_eq!(values(&gathered), all, "{dtype}");

            let copied = own(LEN);
            done(world.broadcast(&copied, 1));
            assert_eq!(values(&copied), numbers(1, LEN), "{dtype}");

            let next = tensor(device, dtype, &[0.0; LEN]);
            done(world.grouped(|group| {
                group.send(&own(LEN), (rank + 1) % size)?;
                group.receive(&next, (rank + size - 1) % size)
            }));
            assert_eq!(values(&next), numbers((rank + size - 1) % size, LEN));
        }
    });
}

/// Rows from one rank to another; some have none.
fn rows_between(from: usize, to: usize) -> usize {
    (from * 2 + to * 3) % 4
}

const WIDTH: usize = 2;

#[test]
fn oracle_rows_arrive_in_the_order_of_their_senders() {
    let Some(mock) = mock() else { return };
    on_ranks(mock, 4, |_, device, world| {
        let (me, size) = (world.rank(), world.size());
        let row = |from: usize, to: usize, n: usize| [(from * 8 + to) as f32, n as f32];
        let rows = |from, to| (0..rows_between(from, to)).flat_map(move |n| row(from, to, n));
        let send: Vec<usize> = (0..size).map(|to| rows_between(me, to)).collect();
        let receive: Vec<usize> = (0..size).map(|from| rows_between(from, me)).collect();
        let sent: Vec<f32> = (0..size).flat_map(|to| rows(me, to)).collect();
        let expected: Vec<f32> = (0..size).flat_map(|from| rows(from, me)).collect();
        let src = tensor(device, Dtype::Bf16, &sent).reshape(&[send.iter().sum(), WIDTH]);
        let dst = tensor(device, Dtype::Bf16, &vec![0.0; expected.len()]);
        let dst = dst.reshape(&[receive.iter().sum(), WIDTH]);
        let progress = world.all_to_all(&src, &send, &dst, &receive);
        assert_eq!(progress.expect("nothing fails"), Progress::Done);
        device.join(Stream::Communication);
        assert_eq!(values(&dst), expected);
    });
    let sends: usize = (0..4)
        .flat_map(|a| (0..4).map(move |b| (a, b)))
        .filter(|&(a, b)| rows_between(a, b) > 0)
        .count();
    let said = mock.said();
    assert_eq!(
        calls(&said).iter().filter(|c| **c == "ncclSend").count(),
        sends
    );
    assert_eq!(
        calls(&said).iter().filter(|c| **c == "ncclRecv").count(),
        sends
    );
}

#[test]
fn equal_parts_go_by_nccls_own_all_to_all_where_it_has_one() {
    for missing in ["nothing", "ncclAlltoAll"] {
        let Some(mock) = mock() else { return };
        on_ranks(mock, 2, |_, device, world| {
            // The same communicator as a library of another version would have it.
            let nccl = mock.nccl(&[missing]).expect("it is optional");
            let mut id = [0; UNIQUE_ID_BYTES];
            id[0] = b'7';
            let id = UniqueId::from_bytes(id);
            let world =
                Comm::join(nccl, device, id, world.rank(), 2, &mut patient).expect("it joins");
            let me = world.rank();
            let src = tensor(device, Dtype::F32, &numbers(me, 6));
            let dst = tensor(device, Dtype::F32, &[0.0; 6]);
            let progress = world.all_to_all_even(&src, &dst);
            assert_eq!(progress.expect("nothing fails"), Progress::Done);
            device.join(Stream::Communication);
            let part = |rank| numbers(rank, 6)[me * 3..][..3].to_vec();
            assert_eq!(values(&dst), [part(0), part(1)].concat());
            world.finalize(&mut patient).expect("it ends");
        });
        let said = mock.said();
        let own = calls(&said).contains(&"ncclAlltoAll");
        let grouped = calls(&said).contains(&"ncclSend");
        assert_eq!((own, grouped), (missing == "nothing", missing != "nothing"));
    }
}

#[test]
fn law_whichever_call_fails_it_is_told_and_nothing_is_left_behind() {
    let (Some(mock), Some(driver)) = (mock(), Driver::driver()) else {
        return;
    };
    let device = device(driver, IMAGE);
    let nccl = open(mock);
    let scenario = || {
        let world = join(nccl, &device, 0, 2)?;
        let group = world
            .split(Some(0), 0, 2, Stream::Communication, &mut patient)?
            .expect("a colour");
        let whole = device.zeros(TensorClass::Activations, Dtype::F32, &[4]);
        let half = device.zeros(TensorClass::Activations, Dtype::F32, &[2]);
        let other = device.zeros(TensorClass::Activations, Dtype::F32, &[4]);
        let _ = world.all_reduce(&whole, Reduce::Sum)?;
        let _ = world.reduce_scatter(&whole, &half)?;
        let _ = group.all_gather(&half, &whole)?;
        let _ = group.broadcast(&half, 1)?;
        let _ = group.all_to_all_even(&whole, &other)?;
        let sent = group.all_to_all(&half, &[1, 1], &whole, &[1, 3])?;
        assert_eq!(sent, Progress::Busy);
        group.settle(&mut patient)?;
        device.join(Stream::Communication);
        group.finalize(&mut patient)?;
        world.finalize(&mut patient)
    };
    mock.busy(1);
    mock.fail(0, 0, "");
    scenario().expect("nothing fails");
    let count = mock.calls();
    for n in 1..=count {
        let before = mock.said().len();
        mock.fail(n, 3, "");
        let outcome = scenario();
        let said = mock.said();
        let failed = calls(&said[before..])[n as usize - 1].to_owned();
        match outcome {
            Err(error) => {
                let code = Some((3, "internal error".to_owned()));
                assert_eq!((error.call, error.code), (failed.as_str(), code));
            }
            Ok(()) => assert_eq!(failed, "ncclCommDestroy", "failed unheard"),
        }
        device.join(Stream::Communication);
        mock.assert_clean();
    }
    assert!(count >= 30, "{count} calls");
}
