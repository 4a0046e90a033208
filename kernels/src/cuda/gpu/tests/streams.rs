//! Streams and events: who waits for whom, and that the host does not.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::rc::Rc;

use moefold_profiles::Dtype;

use super::{IMAGE, compiler, device, driver, no_nvml, open};
use crate::cuda::Cuda;
use crate::cuda::error::catch;
use crate::cuda::gpu::Gpu;
use crate::cuda::gpu::tests::mock::Mock;
use crate::cuda::platform::{Platform, Stream};
use crate::device::{Backend, Device, TensorClass};
use crate::elementwise;
use crate::event::Event;

#[test]
fn queues_wait_for_each_other_only_where_they_are_told_to() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let [from, to] = [(); 2].map(|()| gpu.allocate(100).expect("memory"));
    let copied = |ordered: bool, byte: u8| {
        gpu.upload(from, &[byte; 100]).expect("it is queued");
        assert_eq!(gpu.switch(Stream::Communication), Stream::Compute);
        if ordered {
            gpu.after(Stream::Compute).expect("it is queued");
        }
        gpu.copy(from, to, 100).expect("it is queued");
        let mut back = [0; 100];
        gpu.download(to, &mut back).expect("it is copied");
        assert_eq!(gpu.switch(Stream::Compute), Stream::Communication);
        gpu.synchronize().expect("all is done");
        back == [byte; 100]
    };
    assert!(copied(true, 1));
    assert!(!copied(false, 2), "the mock does not tell streams apart");
    assert!(copied(true, 3));

    // And back: the compute stream reads what another one wrote, uploaded through its own ring.
    gpu.switch(Stream::Copies);
    gpu.upload(from, &[4; 100]).expect("it is queued");
    gpu.switch(Stream::Compute);
    gpu.after(Stream::Copies).expect("it is queued");
    let mut back = [0; 100];
    gpu.download(from, &mut back).expect("it is copied");
    assert_eq!(back, [4; 100]);
    gpu.free(from, 100);
    gpu.free(to, 100);
    drop(gpu);
    mock.assert_clean();
}

/// Two ranks on one GPU, each with a context and streams of its own, on threads of their own.
#[test]
fn a_queue_waits_for_a_moment_of_another_rank_and_the_host_does_not() {
    let Some(mock) = Mock::driver() else { return };
    let reader = open(mock, 0).expect("it opens");
    let [from, to] = [(); 2].map(|()| reader.allocate(100).expect("memory"));
    let written = |byte: u8| -> Event {
        let on_its_thread = move || {
            let writer = open(mock, 0).expect("it opens");
            writer.fill(from, byte, 100).expect("it is queued");
            let event = writer.record_event().expect("it is recorded");
            // Work that is still queued when the rank ends would be done then.
            std::mem::forget(writer);
            event
        };
        let thread = std::thread::scope(|scope| scope.spawn(on_its_thread).join());
        thread.expect("no panic")
    };
    let mut events = Vec::new();
    let mut copied = |waits: bool, byte: u8| {
        let event = written(byte);
        events.push(event.clone());
        let before = mock.said().len();
        if waits {
            reader.wait_for(&event).expect("it is queued");
        }
        reader.copy(from, to, 100).expect("it is queued");
        let said = mock.said();
        assert!(!said[before..].contains("Synchronize"), "the host waited");
        let mut back = [0; 100];
        reader.download(to, &mut back).expect("it is copied");
        back == [byte; 100]
    };
    assert!(copied(true, 1));
    assert!(!copied(false, 2), "the mock does not tell streams apart");
    assert!(copied(true, 3));
    for event in &events {
        reader.wait_for(event).expect("it is queued");
    }
    reader.free(from, 100);
    reader.free(to, 100);
    assert_eq!(mock.wrong(), "");
}

/// The reader's stream waits for the owner's, and the owner's for the reader's, before it writes again.
#[test]
fn what_one_rank_offers_another_reads_in_time() {
    let Some(mock) = Mock::driver() else { return };
    let (owner, reader) = (device(mock, IMAGE), device(mock, IMAGE));
    let x = owner.from_f32(TensorClass::Weights, &[1.0; 50], &[50]);
    let y = reader.zeros(TensorClass::Weights, Dtype::F32, &[50]);
    let started = reader.record_event();
    let before = mock.said().len();
    let offer = x.offer();
    let read = reader.beside_since(Stream::Communication, &started, || {
        let theirs = reader.accept(&offer);
        elementwise::copy(&theirs, &y);
        reader.record_event()
    });
    owner.wait_for(&read);
    x.copy_from_f32(&[2.0; 50]);
    assert!(
        !mock.said()[before..].contains("Synchronize"),
        "a host waited"
    );
    // The owner's write is done first if nothing holds it up.
    assert_eq!(x.to_f32(), [2.0; 50]);
    reader.join(Stream::Communication);
    assert_eq!(y.to_f32(), [1.0; 50]);

    let other = Gpu::new(
        driver(mock).expect("a driver"),
        compiler(IMAGE),
        None,
        no_nvml,
        1,
    );
    let other = Device::on(Backend::Cuda(Cuda::new(
        Rc::new(other.expect("a GPU")),
        Dtype::F32,
    )));
    let error = catch(|| other.accept(&offer)).expect_err("it is of another GPU");
    assert!(error.detail.contains("of another device"), "{error}");
    drop((offer, read, started, x, y, owner, reader, other));
    mock.assert_clean();
}

/// What is asked for after the event that a stream waits for goes on beside it, until memory that may
/// still be in use is given out there.
#[test]
fn work_since_a_moment_goes_on_beside_a_queue_that_takes_no_memory() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, IMAGE);
    device.poison(false);
    let tensor = || device.empty(TensorClass::Weights, Dtype::F32, &[50]);
    let [a, b, c] = [tensor(), tensor(), tensor()];
    a.copy_from_f32(&[1.0; 50]);
    let copied = |takes: bool| {
        let since = device.record_event();
        elementwise::copy(&a, &b);
        device.beside_since(Stream::Communication, &since, || {
            if takes {
                drop(tensor());
            }
            elementwise::copy(&b, &c);
            c.to_f32()
        })
    };
    b.copy_from_f32(&[3.0; 50]);
    assert_eq!(copied(false), [3.0; 50], "the copy to b waits for nobody");
    device.join(Stream::Communication);
    assert_eq!(b.to_f32(), [1.0; 50]);
    b.copy_from_f32(&[3.0; 50]);
    assert_eq!(copied(true), [1.0; 50]);
    device.join(Stream::Communication);
    drop((a, b, c, device));
    mock.assert_clean();
}

#[test]
fn a_device_is_idle_once_its_queues_are_done_and_asking_does_not_wait() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, IMAGE);
    device.synchronize();
    assert!(device.is_idle());
    let tensor = device.zeros(TensorClass::Weights, Dtype::F32, &[8]);
    assert!(!device.is_idle(), "the fill is queued");
    let synchronized = mock.said().matches("cuStreamSynchronize").count();
    while !device.is_idle() {}
    let still = mock.said().matches("cuStreamSynchronize").count();
    assert_eq!(still, synchronized);
    let event = device.record_event();
    assert!(!event.is_reached());
    while !event.is_reached() {}
    mock.fail(1, 700, "cuStreamQuery");
    let error = catch(|| device.is_idle()).expect_err("it fails");
    assert_eq!(error.call, "cuStreamQuery");
    drop((tensor, event, device));
    mock.assert_clean();
}

#[test]
fn a_wait_that_is_watched_asks_for_the_queue_that_is_read_or_for_all() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, IMAGE);
    let asked = Rc::new(Cell::new(0));
    let count = Rc::clone(&asked);
    device.wait_by(move |is_done| {
        while !is_done() {
            count.set(count.get() + 1);
        }
    });
    let [x, y] = [3.0, 0.0].map(|value| device.from_f32(TensorClass::Weights, &[value; 8], &[8]));
    let since = device.record_event();
    let done = device.beside_since(Stream::Communication, &since, || {
        elementwise::copy(&x, &y);
        device.record_event()
    });
    let before = mock.said().len();
    assert_eq!(x.to_f32(), [3.0; 8]);
    assert_eq!(mock.said()[before..].matches("cuStreamQuery").count(), 0);
    assert!(
        asked.get() > 0,
        "the upload was done before it was waited for"
    );
    assert!(!done.is_reached(), "the other stream was waited for");
    device.synchronize();
    let queried = mock.said()[before..].matches("cuStreamQuery").count();
    assert!(queried >= 3, "{queried}");
    mock.fail(1, 700, "cuEventQuery");
    let error = catch(|| x.to_f32()).expect_err("it fails");
    assert_eq!(
        (error.call, error.op),
        ("cuEventQuery", Some("copy_to_f32"))
    );
    drop((x, y, since, done, device));
    mock.assert_clean();
}

#[test]
fn a_moment_outlives_its_device_and_its_event_is_used_again() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let made = || mock.said().matches("cuEventCreate").count();
    let before = made();
    for _ in 0..5 {
        let start = gpu.record_event().expect("it is recorded");
        gpu.synchronize().expect("all is done");
        let end = gpu.record_event().expect("it is recorded");
        gpu.synchronize().expect("all is done");
        assert!(end.seconds_since(&start) > 0.0);
    }
    assert_eq!(made() - before, 2, "two events were alive at once");

    let kept = gpu.record_event().expect("it is recorded");
    gpu.synchronize().expect("all is done");
    drop(gpu);
    assert_eq!(mock.wrong(), "");
    assert!(mock.alive() > 0, "the event and its context");
    std::thread::spawn(move || drop(kept))
        .join()
        .expect("no panic");
    mock.assert_clean();
    // The thread's context is gone, although it was not this thread that let go of it.
    let gpu = open(mock, 0).expect("it opens again");
    let memory = gpu.allocate(8).expect("memory");
    gpu.free(memory, 8);
    drop(gpu);
    mock.assert_clean();
}

#[test]
fn a_time_that_is_not_known_yet_is_a_failure_and_so_is_one_across_clocks() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, IMAGE);
    let (start, end) = (device.record_event(), device.record_event());
    let error = catch(|| end.seconds_since(&start)).expect_err("nothing was waited for");
    assert_eq!(error.call, "cuEventElapsedTime");
    assert_eq!(error.op, Some("seconds_since"));
    device.synchronize();
    assert!(end.seconds_since(&start) > 0.0);
    let host = Device::cpu(1).record_event();
    let mixed = std::panic::catch_unwind(AssertUnwindSafe(|| end.seconds_since(&host)));
    assert!(mixed.is_err(), "clocks that have nothing in common");
    drop((start, end, device));
    mock.assert_clean();
}
