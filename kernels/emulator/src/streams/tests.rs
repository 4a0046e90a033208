//! Devices whose streams wait where they must, and the same with the wait left out: found under every
//! schedule. What orders work here is what orders it on a GPU, and nothing else.

use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;

use moefold_kernels::cuda::error::catch;
use moefold_kernels::cuda::platform::{Platform, Stream};
use moefold_kernels::cuda::program::Architecture;
use moefold_kernels::{Device, Dtype, Event, Tensor, TensorClass, elementwise};

use crate::streams::LostWait;
use crate::{Emulator, at_hand, losing};

const LEN: usize = 24;

fn device() -> Option<Device> {
    at_hand(crate::device(Architecture::SM80, Dtype::F32, 1))
}

fn tensor(device: &Device, value: f32) -> Tensor {
    device.from_f32(TensorClass::Transient, &[value; LEN], &[LEN])
}

/// Expects that `work` is found out of order.
#[track_caller]
fn refused(work: impl FnOnce(), what: &str) {
    let error = catch(work).expect_err("nothing waits");
    let said = error.to_string();
    assert!(said.contains("streams out of order"), "{said}");
    assert!(said.contains(what), "{said}");
}

#[test]
fn work_beside_is_joined_before_its_results_are_used() {
    for joined in [true, false] {
        let Some(device) = device() else { return };
        let (x, y) = (tensor(&device, 1.0), tensor(&device, 0.0));
        device.beside(Stream::Communication, || elementwise::copy(&x, &y));
        if joined {
            device.join(Stream::Communication);
            elementwise::scale(&y, 2.0);
            assert_eq!(y.to_f32(), [2.0; LEN]);
        } else {
            refused(
                || elementwise::scale(&y, 2.0),
                "in the compute stream of emulator ",
            );
        }
    }
}

#[test]
fn both_waits_of_work_beside_are_missed_where_they_are_left_out() {
    for number in 0.. {
        let lost = LostWait::number(number);
        let device = losing(Architecture::SM80, Dtype::F32, 1, &lost);
        let Some(device) = at_hand(device) else {
            return;
        };
        let (x, y) = (tensor(&device, 1.0), tensor(&device, 0.0));
        let work = || {
            device.beside(Stream::Copies, || elementwise::copy(&x, &y));
            device.join(Stream::Copies);
            elementwise::scale(&y, 2.0);
        };
        if number == 2 {
            work();
            assert!(!lost.happened());
            return;
        }
        refused(
            work,
            ["in the copies stream", "in the compute stream"][number as usize],
        );
    }
}

#[test]
fn what_work_beside_reads_is_not_written_before_the_join() {
    let Some(device) = device() else { return };
    let (x, y) = (tensor(&device, 1.0), tensor(&device, 0.0));
    device.beside(Stream::Communication, || elementwise::copy(&x, &y));
    // Reading beside it is fine.
    assert_eq!(x.to_f32(), [1.0; LEN]);
    refused(
        || x.copy_from_f32(&[2.0; LEN]),
        "an upload in the compute stream of emulator ",
    );
}

#[test]
fn work_since_a_moment_does_not_come_after_what_was_asked_since() {
    for late in [false, true] {
        let Some(device) = device() else { return };
        let (x, y) = (tensor(&device, 1.0), tensor(&device, 0.0));
        let early = device.record_event();
        elementwise::scale(&x, 3.0);
        let since = if late { device.record_event() } else { early };
        let copy = || {
            device.beside_since(Stream::Communication, &since, || elementwise::copy(&x, &y));
        };
        if late {
            copy();
            device.join(Stream::Communication);
        } else {
            refused(copy, "in the communication stream of emulator ");
        }
    }
}

#[test]
fn a_moment_that_is_waited_for_orders_what_came_before_it_and_no_more() {
    let Some(device) = device() else { return };
    let [a, b, x] = [0.0; 3].map(|value| tensor(&device, value));
    let beside = |to: &Tensor| {
        device.beside(Stream::Communication, || {
            elementwise::copy(&x, to);
            device.record_event()
        })
    };
    let first = beside(&a);
    beside(&b);
    device.wait_for(&first);
    elementwise::scale(&a, 2.0);
    refused(|| elementwise::scale(&b, 2.0), "in the compute stream");
}

#[test]
fn the_host_orders_what_it_waited_for_and_what_it_asks_after() {
    let waits: [fn(&Device, &Tensor, &Event); 5] = [
        |_, _, _| {},
        |device, _, _| device.synchronize(),
        |device, y, _| {
            // A download of the other stream, which also waits for all before it there.
            let since = device.record_event();
            device.beside_since(Stream::Communication, &since, || y.to_f32());
        },
        |_, _, done| while !done.is_reached() {},
        |device, _, _| assert!(device.is_idle()),
    ];
    for (number, wait) in waits.into_iter().enumerate() {
        let Some(device) = device() else { return };
        let (x, y) = (tensor(&device, 1.0), tensor(&device, 0.0));
        let done = device.beside(Stream::Communication, || {
            elementwise::copy(&x, &y);
            device.record_event()
        });
        wait(&device, &y, &done);
        let work = || elementwise::scale(&y, 2.0);
        if number == 0 {
            refused(work, "in the compute stream");
        } else {
            work();
        }
    }
}

/// The arena keeps what is freed beside the compute stream until the join. What an event orders it gives
/// out again at once, to tensors of any size, so its tensors have to live until somebody waited.
#[test]
fn memory_is_not_used_again_while_another_queue_reads_it() {
    for (early, len) in [
        (false, LEN),
        (true, LEN),
        (false, 50 * LEN),
        (true, 50 * LEN),
    ] {
        let Some(device) = device() else { return };
        let (x, y) = (tensor(&device, 1.0), tensor(&device, 0.0));
        let since = device.record_event();
        let done = device.beside_since(Stream::Communication, &since, || {
            elementwise::copy(&x, &y);
            device.record_event()
        });
        if !early {
            device.wait_for(&done);
        }
        drop(x);
        let again = || drop(device.from_f32(TensorClass::Transient, &vec![2.0; len], &[len]));
        if early {
            refused(again, "memory given back in the compute stream");
        } else {
            again();
        }
    }
}

#[test]
fn a_moment_may_not_be_reached_yet_and_a_no_orders_nothing() {
    let mut denied = 0;
    for seed in 1..=8 {
        let device = at_hand(crate::device(Architecture::SM80, Dtype::F32, seed));
        let Some(device) = device else { return };
        let (x, y) = (tensor(&device, 1.0), tensor(&device, 0.0));
        let since = device.record_event();
        let done = device.beside_since(Stream::Communication, &since, || {
            elementwise::copy(&x, &y);
            device.record_event()
        });
        if done.is_reached() {
            elementwise::scale(&y, 2.0);
            continue;
        }
        denied += 1;
        if denied % 2 == 0 {
            refused(|| elementwise::scale(&y, 2.0), "in the compute stream");
        } else {
            device.synchronize();
            assert!(done.is_reached(), "all is done");
        }
    }
    assert!((2..8).contains(&denied), "{denied} of 8");
}

/// So it is where somebody watches the waits of the host, as NCCL's ranks do.
#[test]
fn who_reads_a_tensor_waits_for_the_queue_that_it_is_read_in_alone() {
    let Some(device) = device() else { return };
    device.wait_by(|is_done| while !is_done() {});
    let [x, y, z] = [1.0, 0.0, 3.0].map(|value| tensor(&device, value));
    let since = device.record_event();
    device.beside_since(Stream::Communication, &since, || elementwise::copy(&x, &y));
    assert_eq!(z.to_f32(), [3.0; LEN]);
    refused(|| elementwise::scale(&y, 2.0), "in the compute stream");
}

#[test]
fn a_fault_that_no_call_comes_after_is_told_as_the_device_ends() {
    for waits in [true, false] {
        let Some(emulator) = at_hand(Emulator::new(Architecture::SM80, 1)) else {
            return;
        };
        let emulator = Rc::new(emulator);
        let device = Device::on_platform(emulator.clone(), Dtype::F32);
        let (x, y) = (tensor(&device, 1.0), tensor(&device, 0.0));
        let since = device.record_event();
        let done = device.beside_since(Stream::Communication, &since, || {
            elementwise::copy(&x, &y);
            device.record_event()
        });
        if waits {
            device.wait_for(&done);
        }
        emulator.wrote(y.address(), y.bytes().0);
        device.wait_for(&done);
        let ended = panic::catch_unwind(AssertUnwindSafe(|| drop((x, y, device, emulator))));
        if waits {
            ended.expect("all was waited for");
            continue;
        }
        let payload = ended.expect_err("nothing waits");
        let said = payload.downcast_ref::<String>().expect("a message");
        assert!(said.contains("a library in the compute stream"), "{said}");
    }
}

#[test]
fn what_is_freed_beside_is_in_use_until_the_join() {
    let Some(device) = device() else { return };
    device.poison(false);
    let since = device.record_event();
    let make = || tensor(&device, 1.0);
    device.beside_since(Stream::Communication, &since, || drop(make()));
    // It is held, so this is other memory.
    drop(make());
    device.join(Stream::Communication);
    drop([make(), make()]);
}

/// Every wait of an exchange between two ranks is needed, in either order of what they do.
#[test]
fn each_wait_between_ranks_is_missed_where_it_is_left_out() {
    for number in 0.. {
        let lost = LostWait::number(number);
        let make = || at_hand(losing(Architecture::SM80, Dtype::F32, 1, &lost));
        let (Some(owner), Some(reader)) = (make(), make()) else {
            return;
        };
        let (x, y) = (tensor(&owner, 1.0), tensor(&reader, 0.0));
        let outcome = catch(|| {
            elementwise::scale(&x, 2.0);
            let offer = x.offer();
            let since = reader.record_event();
            let read = reader.beside_since(Stream::Communication, &since, || {
                elementwise::copy(&reader.accept(&offer), &y);
                reader.record_event()
            });
            owner.wait_for(&read);
            elementwise::scale(&x, 2.0);
            reader.wait_for(&read);
            elementwise::scale(&y, 2.0);
        });
        if !lost.happened() {
            outcome.expect("nothing is missing");
            // The reader's stream for its own, for the owner's; the owner's; the reader's for its own.
            assert_eq!(number, 4);
            return;
        }
        let error = outcome.expect_err("a wait is missing");
        let said = error.to_string();
        assert!(
            said.contains("streams out of order"),
            "wait {number}: {said}"
        );
    }
}
