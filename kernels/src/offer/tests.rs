//! Tests of offers between emulated ranks, on threads of their own.

use std::panic;
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::cuda::error::{DeviceError, catch};
use crate::cuda::program::Architecture;
use crate::elementwise;
use crate::emulated::Emulated;
use crate::reduce;

fn device() -> Option<Device> {
    let emulator = Emulated::new(Architecture::SM80, 5)?;
    Some(Device::on_platform(Rc::new(emulator), Dtype::F32))
}

const VALUES: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];

/// Runs `read` with an offer of [`VALUES`] and of the first half of them, which another rank keeps
/// until it returns.
fn with_offers<R>(read: impl FnOnce(&Device, [Offer; 2]) -> R) -> Option<R> {
    let reader = device()?;
    let (offers, offered) = mpsc::channel();
    let (done, finished) = mpsc::channel::<()>();
    Some(thread::scope(|scope| {
        scope.spawn(move || {
            let owner = device().expect("there was one");
            let x = owner.from_f32(TensorClass::Weights, &VALUES, &[6]);
            offers
                .send([x.offer(), x.view(0, &[3]).offer()])
                .expect("it is read");
            let _ = finished.recv();
            assert_eq!(x.to_f32(), VALUES, "nobody wrote it");
        });
        let result = read(&reader, offered.recv().expect("it is sent"));
        drop(done);
        result
    }))
}

#[test]
fn what_is_accepted_reads_as_what_was_offered_and_is_in_no_account() {
    with_offers(|device, [all, first]| {
        let mine = device.from_f32(TensorClass::Gradients, &[10.0; 6], &[6]);
        let (live, cached) = (device.memory(), device.cached());
        let theirs = device.accept(&all);
        let half = device.accept(&first);
        assert_eq!((theirs.dims(), theirs.dtype()), (&[6][..], Dtype::F32));
        assert_eq!(device.memory(), live);
        reduce::sum_ordered(&[&theirs, &mine], &mine);
        assert_eq!(mine.to_f32(), [11.0, 12.0, 13.0, 14.0, 15.0, 16.0]);
        drop(theirs);
        // The other range of the same memory is still there.
        assert_eq!(half.to_f32(), VALUES[..3]);
        drop(half);
        assert_eq!((device.memory(), device.cached()), (live, cached));
        // And again.
        assert_eq!(device.accept(&all).to_f32(), VALUES);
    });
}

#[test]
fn what_is_accepted_may_not_be_written() {
    with_offers(|device, [all, _]| {
        let theirs = device.accept(&all);
        let mine = device.from_f32(TensorClass::Gradients, &[10.0; 6], &[6]);
        let write = panic::AssertUnwindSafe(|| elementwise::axpy(1.0, &mine, &theirs));
        let refused = panic::catch_unwind(write).expect_err("it is refused");
        let said = refused.downcast_ref::<String>().expect("a message");
        assert!(said.contains("another rank's memory"), "{said}");
        // Ops without other arguments, and copies by the host, find out on the device.
        let fault = |error: DeviceError, what: &str| {
            let said = error.to_string();
            assert!(said.contains(what), "{said}");
        };
        let error = catch(|| elementwise::scale(&theirs, 2.0)).expect_err("a fault");
        fault(error, "it is another rank's memory, which may only be read");
        let error = catch(|| theirs.copy_from_f32(&VALUES)).expect_err("a fault");
        fault(error, "upload of 24 bytes out of bounds");
    });
}

#[test]
fn only_what_was_offered_can_be_read_and_only_what_was_written() {
    with_offers(|device, [_, first]| {
        let half = device.accept(&first);
        let mine = device.zeros(TensorClass::Gradients, Dtype::F32, &[6]);
        let beyond = Tensor::whole(
            Rc::new(Buffer::new(
                device.clone(),
                (TensorClass::Transient, crate::Side::Device),
                24,
                0,
                Storage::Adopted(match &device.0.backend {
                    Backend::Cuda(gpu) => gpu.adopt(first.address, &first.lent),
                    Backend::Cpu(_) => unreachable!("the device is emulated"),
                }),
            )),
            Dtype::F32,
            &[6],
        );
        let error = catch(|| elementwise::axpy(1.0, &beyond, &mine)).expect_err("a fault");
        let said = error.to_string();
        assert!(said.contains("nothing was ever written"), "{said}");
        elementwise::axpy(1.0, &half, &mine.view(0, &[3]));
    });
    let Some(owner) = device() else { return };
    let unwritten = owner.empty(TensorClass::Weights, Dtype::F32, &[4]).offer();
    let reader = device().expect("there was one");
    let (theirs, mine) = (
        reader.accept(&unwritten),
        reader.zeros(TensorClass::Weights, Dtype::F32, &[4]),
    );
    let error = catch(|| elementwise::axpy(1.0, &theirs, &mine)).expect_err("a fault");
    assert!(
        error.to_string().contains("nothing was ever written"),
        "{error}"
    );
}

/// What is dropped and given back is gone for its owner and lives on for who accepted it: wrong where
/// a transport does so, found by the emulator, and no danger to the host.
#[test]
fn memory_outlives_its_owner_where_somebody_reads_it() {
    let Some(reader) = device() else { return };
    let offer = thread::spawn(|| {
        let owner = device().expect("there was one");
        owner.from_f32(TensorClass::Weights, &VALUES, &[6]).offer()
    });
    let offer = offer.join().expect("no panic");
    let theirs = reader.accept(&offer);
    let error = catch(|| theirs.to_f32()).expect_err("a fault");
    let said = error.to_string();
    assert!(
        said.contains("written by freeing in the compute stream of emulator"),
        "{said}"
    );
}

#[test]
fn ranks_that_read_each_other_at_once_do_not_wait_for_each_other() {
    let Some(first) = device() else { return };
    let second_offer = mpsc::channel();
    let first_offer = mpsc::channel();
    let rank =
        |device: Device, mine: f32, out: mpsc::Sender<Offer>, other: mpsc::Receiver<Offer>| {
            let x = device.from_f32(TensorClass::Weights, &[mine; 40], &[40]);
            out.send(x.offer()).expect("it is read");
            let theirs = device.accept(&other.recv().expect("it is sent"));
            let sum = device.zeros(TensorClass::Weights, Dtype::F32, &[40]);
            for _ in 0..20 {
                reduce::sum_ordered(&[&theirs, &x, &sum], &sum);
            }
            assert_eq!(sum.to_f32(), [60.0; 40]);
            // Until the other is done.
            let _ = out.send(x.offer());
            let _ = other.recv();
        };
    thread::scope(|scope| {
        let (to_second, of_first) = first_offer;
        let (to_first, of_second) = second_offer;
        scope.spawn(move || rank(device().expect("there was one"), 2.0, to_first, of_first));
        rank(first, 1.0, to_second, of_second);
    });
}

#[test]
#[should_panic(expected = "offer: f32[1] is the host's memory")]
fn memory_of_the_host_is_not_offered() {
    Device::cpu(1)
        .zeros(TensorClass::Weights, Dtype::F32, &[1])
        .offer();
}
