//! Device memory: when it is freed, what is told where it runs out, and what is taken beside tensors.

use std::cell::Cell;

use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;

use super::{CODE, IMAGE, compiler, device, driver, open};
use crate::cuda::error::catch;
use crate::cuda::gpu::Gpu;
use crate::cuda::gpu::tests::mock::Mock;
use crate::cuda::platform::{Overhead, Platform, Stream};
use crate::device::TensorClass;
use crate::transfer::{start_to_device, start_to_host};

#[test]
fn memory_is_freed_after_the_work_on_it_and_what_is_not_freed_is_seen() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let memory = gpu.allocate(1000).expect("memory");
    gpu.fill(memory, 1, 1000).expect("it is queued");
    gpu.free(memory, 1000);
    assert_eq!(mock.wrong(), "");
    gpu.allocate(1000).expect("memory that is lost");
    drop(gpu);
    assert!(mock.wrong().contains("a context is released before"));
    assert_eq!(mock.alive(), 1);
}

#[test]
fn where_memory_runs_out_the_error_says_what_was_asked_and_what_is_free() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let error = gpu.allocate(3 << 30).expect_err("it does not fit");
    assert_eq!(
        error.during("gemm::forward").to_string(),
        "gemm::forward: cuMemAlloc_v2 failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): asked for 3.00 GiB, \
         1.00 GiB of 4.00 GiB is free"
    );
    drop(gpu);
    mock.assert_clean();
}

#[test]
fn what_is_taken_beside_tensors_is_told_apart_and_shared_by_ranks() {
    const GIB: u64 = 1 << 30;
    let Some(mock) = Mock::driver() else { return };
    let first = device(mock, IMAGE);
    let told = |context, workspaces, other| Overhead {
        context: Bytes(context),
        workspaces: Bytes(workspaces),
        other: Bytes(other),
        others: None,
    };
    assert_eq!(first.memory_info(), Some((Bytes(GIB), Bytes(4 * GIB))));
    assert_eq!(first.overhead(), Some(told(3 * GIB, 0, 0)));
    let tensor = first.empty(TensorClass::Weights, Dtype::F32, &[1 << 20]);
    // A slab, of which the tensor has a part.
    let free = Bytes(GIB - (8 << 20));
    assert_eq!(first.memory_info(), Some((free, Bytes(4 * GIB))));
    assert_eq!(first.overhead(), Some(told(3 * GIB, 0, 0)));

    // A rank that comes later: what is there is no context of its own.
    let gpu = open(mock, 0).expect("it opens");
    gpu.load(&CODE.with(&[])).expect("it loads");
    assert_eq!(gpu.overhead(), Ok(Some(told(3 * GIB, 0, 1 << 20))));
    assert_eq!(first.overhead(), Some(told(3 * GIB, 0, 1 << 20)));
    drop(gpu);
    drop(tensor);
    // Freed memory that is kept for reuse is the tensors'.
    assert_eq!(first.overhead(), Some(told(3 * GIB, 0, 0)));

    mock.fail(1, 999, "cuMemGetInfo_v2");
    let error = catch(|| first.overhead()).expect_err("it is told");
    assert_eq!(
        (error.call, error.op),
        ("cuMemGetInfo_v2", Some("overhead"))
    );
    mock.fail(1, 999, "cuMemGetInfo_v2");
    assert!(catch(|| first.memory_info()).is_err());
    drop(first);
    mock.assert_clean();
}

#[test]
fn what_was_taken_before_the_gpu_was_opened_is_not_the_contexts() {
    const TAKEN: u64 = 700 << 20;
    // NVML counts 100 MiB that the driver does not, and sees 500 MiB more once there is a context.
    thread_local! {
        static ASKED: Cell<u64> = const { Cell::new(0) };
    }
    fn used(pci: &str) -> Option<Bytes> {
        ASKED.set(ASKED.get() + 1);
        let context = if ASKED.get() == 1 { 0 } else { 500 << 20 };
        (pci == "0000:1b:00.0").then_some(Bytes(TAKEN + (100 << 20) + context))
    }
    let Some(mock) = Mock::driver() else { return };
    let open = || Gpu::new(driver(mock)?, compiler(IMAGE), None, used, 0);
    let overhead = |gpu: &Gpu| gpu.overhead().expect("it tells").expect("a GPU tells");
    let gpu = open().expect("it opens");
    let told = overhead(&gpu);
    // The mock has 3 GiB taken when it is opened.
    assert_eq!(told.context, Bytes(500 << 20));
    assert_eq!(told.others, Some(Bytes((3 << 30) - (500 << 20))));
    assert_eq!((told.workspaces, told.other), (Bytes(0), Bytes(0)));
    // A rank that comes later measures nothing anew.
    let second = open().expect("it opens");
    assert_eq!(overhead(&second), told);
    assert_eq!(ASKED.get(), 2, "before and after the first");
    drop((gpu, second));
    mock.assert_clean();
}

#[test]
fn memory_freed_beside_the_compute_queue_is_kept_until_the_join() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, IMAGE);
    let tensor = || device.zeros(TensorClass::Transient, Dtype::F32, &[100]);
    let used = device.beside(Stream::Communication, || {
        let used = tensor();
        used.address()
    });
    let other = tensor();
    assert!(other.address() != used, "memory in use was given out again");
    drop(other);
    device.join(Stream::Communication);
    let [one, two] = [tensor(), tensor()];
    assert!([one.address(), two.address()].contains(&used));
    drop((one, two));

    // A device that is synchronized has nothing in use either.
    let used = device.beside(Stream::Copies, || tensor().address());
    device.synchronize();
    let tensors = [tensor(), tensor()];
    assert!(tensors.iter().any(|tensor| tensor.address() == used));
    drop(tensors);
    drop(device);
    mock.assert_clean();
}

/// To pinned memory and back, in the stream of copies; the host waits for neither, and what is taken for the next
/// tensor is not touched before the copy out of it is done.
#[test]
fn what_leaves_for_the_host_comes_back_and_nobody_waits() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, IMAGE);
    let values: Vec<f32> = (0_u8..100).map(f32::from).collect();
    let class = TensorClass::Activations;
    let tensor = device.from_f32(class, &values, &[100]);
    let reads = device.host_reads();
    let (parcels, leaving) = start_to_host(&device, vec![tensor]);
    assert_eq!(device.memory().on_host(), Bytes(400));
    leaving.settle(&device);
    let next = device.zeros(class, Dtype::F32, &[100]);
    let back = start_to_device(&device, parcels).settle(&device);
    assert_eq!(device.memory().on_host(), Bytes::ZERO);
    assert_eq!(device.host_reads(), reads);
    assert_eq!(back[0].to_f32(), values);
    assert_eq!(next.to_f32(), [0.0; 100]);
    // What is free of the host's memory is taken again.
    let (parcels, leaving) = start_to_host(&device, back);
    leaving.settle(&device);
    drop((parcels, next, device));
    mock.assert_clean();
}
