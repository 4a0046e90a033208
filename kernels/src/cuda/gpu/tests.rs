//! The platform against a driver without a GPU: the order of its calls, what it makes of failures,
//! and that nothing is left behind.
#![expect(
    unsafe_code,
    reason = "loads the mock; its functions have the driver's signatures"
)]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use super::driver::Driver;
use super::{Gpu, SEGMENT_BYTES};
use crate::cuda::Cuda;
use crate::cuda::cache::Directory;
use crate::cuda::cache::pack::Pack;
use crate::cuda::compiler::Compiler;
use crate::cuda::error::{DeviceError, catch};
use crate::cuda::libraries::Version;
use crate::cuda::nvrtc::Cubin;
use crate::cuda::platform::{Address, Launch, Module, Overhead, Platform, Queue};
use crate::cuda::program::{Architecture, Arg, EncodedMap, Grid, Source, Swizzle, TensorMap};
use crate::cuda::programs::programs;
use crate::device::{Backend, Device, TensorClass};
use crate::elementwise;
use crate::moment::Moment;
use crate::testing::emulated;
use mock::Mock;
use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;

pub(crate) mod mock;

const CODE: Source = Source {
    stem: "code",
    text: "",
};

/// A compiler that has `image` for [`CODE`] and for what ops launch, and compiles nothing.
fn compiler(image: &str) -> Compiler {
    static PACKS: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut packs = PACKS.lock().expect("writing one does not fail");
    let folder = packs.entry(image.to_owned()).or_insert_with(|| pack(image));
    let pack = Pack::open(folder).expect("a pack");
    Compiler::new(Some(pack), None, Err(DeviceError::new("NVRTC", "none")))
}

fn pack(image: &str) -> PathBuf {
    let folder = tempfile::tempdir().expect("a folder").keep();
    let directory = Directory(folder.clone());
    let listed = programs().into_iter().map(|listed| listed.program);
    for program in listed.chain([CODE.with(&[])]) {
        let cubin = Cubin {
            // The driver's own images say how long they are; text ends with a zero.
            image: format!("{image}\0").into_bytes(),
            log: String::new(),
        };
        for architecture in [Architecture::SM80, Architecture::SM90] {
            let put = directory.put(&program, architecture, Version::new(13, 0, 0), &cubin);
            put.expect("it is written");
        }
    }
    folder
}

pub(crate) const IMAGE: &str = "kernel scale 256 8 4\nkernel wide 128 8 128\n";

fn driver(mock: Mock) -> Result<Arc<Driver>, DeviceError> {
    // SAFETY: the mock has the driver's signatures and stays loaded.
    unsafe { Driver::new(|name| mock.find(name)) }.map(Arc::new)
}

fn no_nvml(_: &str) -> Option<Bytes> {
    None
}

fn open(mock: Mock, index: usize) -> Result<Gpu, DeviceError> {
    Gpu::new(driver(mock)?, compiler(IMAGE), None, no_nvml, index)
}

/// A device on the mock.
pub(crate) fn device(mock: Mock, image: &str) -> Device {
    let gpu = Gpu::new(
        driver(mock).expect("a driver"),
        compiler(image),
        None,
        no_nvml,
        0,
    );
    let gpu = Rc::new(gpu.expect("a GPU"));
    Device::on(Backend::Cuda(Cuda::new(gpu, Dtype::F32)))
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let step = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..count).map(step).collect()
}

fn launch(
    gpu: &Gpu,
    module: Module,
    entry: &'static str,
    grid: Grid,
    args: &[Arg],
) -> Result<(), DeviceError> {
    gpu.launch(&Launch {
        module,
        entry,
        grid,
        args,
    })
}

#[test]
fn a_gpu_is_opened_in_order_and_left_clean() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 1).expect("it opens");
    let properties = gpu.properties();
    assert_eq!(properties.name, "Mock 1");
    assert_eq!(properties.architecture, Architecture::SM90);
    assert_eq!(properties.multiprocessors, 132);
    assert_eq!(properties.memory.0, 4 << 30);
    assert_eq!(properties.shared_per_block.0, 227 << 10);
    assert_eq!(properties.l2.0, 50 << 20);
    drop(gpu);
    let said = mock.said();
    let calls = said.lines().collect::<Vec<_>>();
    let first = [
        "cuInit",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
    ];
    assert_eq!(calls[..5], first);
    let last = ["cuCtxSetCurrent", "cuDevicePrimaryCtxRelease_v2"];
    assert_eq!(calls[calls.len() - 2..], last);
    let count = |name: &str| calls.iter().filter(|call| **call == name).count();
    assert_eq!(count("cuStreamCreate"), 3);
    assert_eq!(count("cuStreamDestroy_v2"), 3);
    mock.assert_clean();
}

#[test]
fn what_cannot_be_opened_is_refused_by_name() {
    let Some(mock) = Mock::driver() else { return };
    let refused = |index, capability| {
        mock.capability(capability);
        open(mock, index).err().expect("it is refused").to_string()
    };
    assert_eq!(
        refused(2, 90),
        "cuDeviceGet: there is no GPU 2: 2 found, numbered from 0"
    );
    let old = refused(0, 75);
    assert!(
        old.contains("GPU 0 is a Mock 0 of compute capability 7.5; kernels need 8.0"),
        "{old}"
    );
    mock.assert_clean();
}

#[test]
fn a_driver_without_a_function_is_refused_where_it_is_needed() {
    let Some(mock) = Mock::driver() else { return };
    let without = |missing: &'static str| {
        let find = move |name: &str| {
            if name == missing {
                None
            } else {
                mock.find(name)
            }
        };
        // SAFETY: the mock has the driver's signatures and stays loaded.
        unsafe { Driver::new(find) }
    };
    let error = without("cuLaunchKernel").err().expect("it is refused");
    assert!(
        error.to_string().contains("has no cuLaunchKernel"),
        "{error}"
    );

    let driver = without("cuTensorMapEncodeTiled").expect("it is not always needed");
    let gpu = Gpu::new(Arc::new(driver), compiler(IMAGE), None, no_nvml, 0).expect("it opens");
    let error = gpu.encode(&map()).expect_err("it is needed");
    let said = error.to_string();
    assert!(said.contains("cuTensorMapEncodeTiled: the driver has no such function"));
    drop(gpu);
    mock.assert_clean();
}

#[test]
fn bytes_go_up_and_down_unchanged_however_late_they_are_copied() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let size = 6 * SEGMENT_BYTES + 12_345;
    let memory = gpu.allocate(size as u64).expect("memory");
    let expected = bytes(size, 1);
    let mut host = expected.clone();
    gpu.upload(memory, &host).expect("it is queued");
    host.fill(0);
    let mut back = vec![1; size];
    gpu.download(memory, &mut back).expect("it is copied");
    assert!(back == expected, "a large upload");

    // Many small ones from one buffer, which is written again at once.
    let mut expected = vec![0; size];
    for (piece, chunk) in expected.chunks_mut(99_991).enumerate() {
        chunk.copy_from_slice(&bytes(chunk.len(), piece as u64));
        host[..chunk.len()].copy_from_slice(chunk);
        let place = memory.offset(99_991 * piece as u64);
        gpu.upload(place, &host[..chunk.len()])
            .expect("it is queued");
        host.fill(0xEE);
    }
    gpu.download(memory, &mut back).expect("it is copied");
    assert!(back == expected, "many small uploads");

    let half = size as u64 / 2;
    gpu.copy(memory, memory.offset(half), half)
        .expect("it is queued");
    gpu.fill(memory, 7, 100).expect("it is queued");
    gpu.download(memory, &mut back).expect("it is copied");
    expected.copy_within(..half as usize, half as usize);
    expected[..100].fill(7);
    assert!(back == expected, "a copy and a fill");

    // Nothing is no work.
    let before = mock.said();
    gpu.upload(memory, &[]).expect("nothing");
    gpu.copy(memory, memory.offset(8), 0).expect("nothing");
    gpu.fill(memory, 1, 0).expect("nothing");
    gpu.download(memory, &mut []).expect("nothing");
    assert_eq!(mock.said(), before);
    gpu.free(memory, size as u64);
    drop(gpu);
    mock.assert_clean();
}

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
fn a_kernel_is_found_once_and_launched_with_its_arguments() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let memory = gpu.allocate(64).expect("memory");
    let module = gpu.load(&CODE.with(&[])).expect("it loads");
    let grid = Grid {
        blocks: [3, 2, 1],
        threads: 256,
        shared: 1024,
    };
    let args = [Arg::Address(memory), Arg::F32(1.0)];
    launch(&gpu, module, "scale", grid, &args).expect("it is queued");
    launch(&gpu, module, "scale", grid, &args).expect("it is queued");
    let large = Grid {
        threads: 128,
        shared: 200 << 10,
        ..grid
    };
    let map = EncodedMap([5; 16]);
    let args = [Arg::Address(Address::NULL), Arg::Map(map)];
    launch(&gpu, module, "wide", large, &args).expect("it is queued");
    launch(&gpu, module, "wide", large, &args).expect("it is queued");
    let said = mock.said();
    let count = |what: &str| said.matches(what).count();
    assert_eq!(count("cuModuleGetFunction"), 2, "once a kernel");
    assert_eq!(
        count("scale [3 2 1] x 256, 1024 bytes shared: memory 0x3f800000\n"),
        2
    );
    assert_eq!(count("wide may have 204800 bytes of shared memory\n"), 1);
    assert_eq!(
        count("wide [3 2 1] x 128, 204800 bytes shared: null 0x5\n"),
        2
    );
    gpu.free(memory, 64);
    drop(gpu);
    mock.assert_clean();
}

#[test]
fn a_launch_that_cannot_be_is_refused_before_the_driver_sees_it() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let module = gpu.load(&CODE.with(&[])).expect("it loads");
    let grid = Grid::linear(1, 32, 0);
    let args = [Arg::Address(Address::NULL), Arg::I32(1)];
    let refused = |entry, grid, args: &[Arg], said: &str| {
        let error = launch(&gpu, module, entry, grid, args).expect_err("it is refused");
        let error = error.to_string();
        assert!(error.contains(said), "{said} is not in: {error}");
    };
    let threads = Grid {
        threads: 512,
        ..grid
    };
    refused(
        "scale",
        threads,
        &args,
        "the kernel takes 256 threads a block",
    );
    let shared = Grid {
        shared: 228 << 10,
        ..grid
    };
    refused(
        "scale",
        shared,
        &args,
        "a block has 232448 bytes of shared memory",
    );
    let sizes = "the kernel takes parameters of [8, 4] bytes, and was handed [8]";
    refused("scale", grid, &args[..1], sizes);
    let sizes = "the kernel takes parameters of [8, 4] bytes, and was handed [4, 8]";
    refused("scale", grid, &[args[1], args[0]], sizes);
    assert!(!mock.said().contains("cuLaunchKernel"));
    let missing = "cuModuleGetFunction failed with 500 (CUDA_ERROR_NOT_FOUND): absent of code.cu";
    refused("absent", grid, &args, missing);
    drop(gpu);
    mock.assert_clean();
}

fn map() -> TensorMap {
    TensorMap {
        address: Address(1 << 20),
        dtype: Dtype::Bf16,
        dims: vec![100, 70, 3],
        strides: vec![208, 14_560],
        tile: vec![64, 128, 1],
        swizzle: Swizzle::B128,
    }
}

#[test]
fn a_tensor_map_is_handed_over_field_by_field() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let encoded = gpu.encode(&map()).expect("it encodes");
    let expected: [u64; 16] = std::array::from_fn(|i| 0x1000 + i as u64);
    assert_eq!(encoded.0, expected);
    let said = "type 9 swizzle 3 interleave 0 promotion 3 fill 0: 100/64 70/128+208 3/1+14560\n";
    assert!(mock.said().contains(said), "{}", mock.said());
    let mut unaligned = map();
    unaligned.strides[0] = 200;
    let error = gpu.encode(&unaligned).expect_err("it is refused");
    assert!(
        error
            .to_string()
            .contains("failed with 1 (CUDA_ERROR_INVALID_VALUE)")
    );
    drop(gpu);
    mock.assert_clean();
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
    for other in [Some(Device::cpu(1)), emulated(1).pop()]
        .into_iter()
        .flatten()
    {
        assert_eq!((other.memory_info(), other.overhead()), (None, None));
    }
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
    let moment = device.moment();
    assert!(!moment.is_reached());
    while !moment.is_reached() {}
    mock.fail(1, 700, "cuStreamQuery");
    let error = catch(|| device.is_idle()).expect_err("it fails");
    assert_eq!(error.call, "cuStreamQuery");
    drop((tensor, moment, device));
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
    let since = device.moment();
    let done = device.beside_since(Queue::Communication, &since, || {
        elementwise::copy(&x, &y);
        device.moment()
    });
    let before = mock.said().len();
    assert_eq!(x.to_f32(), [3.0; 8]);
    assert_eq!(mock.said()[before..].matches("cuStreamQuery").count(), 0);
    assert!(
        asked.get() > 0,
        "the upload was done before it was waited for"
    );
    assert!(!done.is_reached(), "the other queue was waited for");
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
fn a_failure_has_its_call_its_code_and_its_name() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let failed = |code| {
        mock.fail(1, code, "cuStreamSynchronize");
        gpu.synchronize().expect_err("it fails")
    };
    let error = failed(700);
    assert_eq!(error.call, "cuStreamSynchronize");
    let name = "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned();
    assert_eq!(error.code, Some((700, name)));
    assert!(error.detail.contains("a kernel that ran before failed"));
    let error = failed(12345);
    let name = "CUDA_ERROR_OF_THE_FUTURE".to_owned();
    assert_eq!(error.code, Some((12345, name)));
    let error = failed(54321);
    let name = "a code that this version does not know".to_owned();
    assert_eq!(error.code, Some((54321, name)));
    assert!(!error.detail.contains("a kernel that ran before"));
    drop(gpu);
    mock.assert_clean();
}

/// A bit of everything: what a training run asks of the platform.
fn scenario(mock: Mock) -> Result<(), DeviceError> {
    let gpu = Rc::new(open(mock, 0)?);
    let device = Device::on(Backend::Cuda(Cuda::new(gpu.clone(), Dtype::F32)));
    catch(|| {
        let values = (0..300_000).map(|i| i as f32).collect::<Vec<_>>();
        let tensor = device.from_f32(TensorClass::Weights, &values, &[300, 1000]);
        let other = device.zeros(TensorClass::Gradients, Dtype::F32, &[300, 1000]);
        assert!(tensor.to_f32() == values);
        assert!(other.to_f32().iter().all(|&value| value == 0.0));
        drop(other);
        device.trim();
        device.beside(Queue::Copies, || {
            device.zeros(TensorClass::Transient, Dtype::F32, &[1000])
        });
        device.join(Queue::Copies);
        let start = device.moment();
        let theirs = device.beside_since(Queue::Communication, &start, || {
            device.accept(&tensor.offer())
        });
        drop(theirs);
        device.join(Queue::Communication);
        let end = device.moment();
        device.synchronize();
        assert!(end.seconds_since(&start) >= 0.0);
    })?;
    let module = gpu.load(&CODE.with(&[]))?;
    let grid = Grid::linear(4, 128, 64 << 10);
    let args = [Arg::Address(Address::NULL), Arg::Map(gpu.encode(&map())?)];
    launch(&gpu, module, "wide", grid, &args)?;
    gpu.timed(&mut || ())?;
    gpu.synchronize()
}

#[test]
fn law_whichever_call_fails_it_is_told_and_nothing_is_left_behind() {
    let Some(mock) = Mock::driver() else { return };
    mock.fail(0, 0, "");
    scenario(mock).expect("nothing fails");
    mock.assert_clean();
    let calls = mock.calls();
    assert!(calls > 40, "{calls} calls");
    let mut told = 0;
    for n in 1..=calls {
        let said_before = mock.said().len();
        mock.fail(n, 999, "");
        let outcome = scenario(mock);
        let said = mock.said();
        let since = said[said_before..]
            .lines()
            .filter(|line| !line.starts_with(' '));
        let failed = since.clone().nth(n as usize - 1).expect("it was called");
        if let Err(error) = outcome {
            let code = Some((999, "CUDA_ERROR_UNKNOWN".to_owned()));
            assert_eq!((error.call, error.code), (failed, code));
            told += 1;
        } else {
            // What is destroyed on drop fails to nobody; allocations are tried twice; a driver need
            // not tell a kernel's parameters.
            let silent = [
                "Free",
                "Destroy",
                "Release",
                "Unload",
                "SetCurrent",
                "Synchronize",
            ];
            let silent = silent.iter().any(|part| failed.contains(part));
            let optional = ["cuMemAlloc_v2", "cuFuncGetParamInfo", "cuMemGetInfo_v2"];
            assert!(
                silent || optional.contains(&failed),
                "{failed} failed unheard"
            );
        }
        mock.assert_clean();
    }
    assert!(told > 30, "{told} of {calls} failures were told");
}

#[test]
fn a_gpu_that_died_leaves_nothing_behind_either() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, IMAGE);
    let tensor = device.zeros(TensorClass::Weights, Dtype::F32, &[1 << 20]);
    tensor.copy_from_f32(&vec![1.0; 1 << 20]);
    mock.poison(719);
    let error = catch(|| tensor.to_f32()).expect_err("it died");
    assert_eq!(error.op, Some("copy_to_f32"));
    assert_eq!(error.code.as_ref().map(|(code, _)| *code), Some(719));
    drop((tensor, device));
    mock.assert_clean();
}

#[test]
fn two_gpus_on_one_thread_keep_their_memory_apart() {
    let Some(mock) = Mock::driver() else { return };
    let (first, second) = (open(mock, 0), open(mock, 1));
    let (first, second) = (first.expect("it opens"), second.expect("it opens"));
    let (a, b) = (first.allocate(100), second.allocate(100));
    let (a, b) = (a.expect("memory"), b.expect("memory"));
    first.upload(a, &[1; 100]).expect("it is queued");
    second.upload(b, &[2; 100]).expect("it is queued");
    let mut back = [0; 100];
    first.download(a, &mut back).expect("it is copied");
    assert_eq!(back, [1; 100]);
    second.download(b, &mut back).expect("it is copied");
    assert_eq!(back, [2; 100]);
    first.free(a, 100);
    second.free(b, 100);
    drop(first);
    second.synchronize().expect("the other is still there");
    drop(second);
    mock.assert_clean();
}

#[test]
fn an_op_runs_from_its_public_function_to_the_launch() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, "kernel rms_norm_forward 256 8 8 8 8 4 4 4\n");
    device.poison(false);
    let x = device.from_f32(TensorClass::Activations, &[1.0; 40 * 64], &[40, 64]);
    let w = device.from_f32(TensorClass::Weights, &[1.0; 64], &[64]);
    let outputs = crate::rms_norm::forward(&x, &w, 1e-5);
    device.synchronize();
    // 40 rows, 32 a block; then rows, width and eps.
    let launch = "rms_norm_forward [2 1 1] x 256, 128 bytes shared: memory memory memory memory \
                  0x28 0x40 0x3727c5ac\n";
    assert!(mock.said().contains(launch), "{}", mock.said());
    drop((x, w, outputs, device));
    mock.assert_clean();
}

#[test]
fn without_a_gpu_the_answer_says_what_is_missing() {
    match Device::cuda_count() {
        Ok(count) => assert!(count > 0),
        Err(error) => {
            let opened = Device::cuda(0, Dtype::Bf16).expect_err("there is none");
            assert_eq!(opened, error);
            assert!(!error.detail.is_empty(), "{error}");
        }
    }
}

#[test]
fn queues_wait_for_each_other_only_where_they_are_told_to() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let [from, to] = [(); 2].map(|()| gpu.allocate(100).expect("memory"));
    let copied = |ordered: bool, byte: u8| {
        gpu.upload(from, &[byte; 100]).expect("it is queued");
        assert_eq!(gpu.switch(Queue::Communication), Queue::Compute);
        if ordered {
            gpu.after(Queue::Compute).expect("it is queued");
        }
        gpu.copy(from, to, 100).expect("it is queued");
        let mut back = [0; 100];
        gpu.download(to, &mut back).expect("it is copied");
        assert_eq!(gpu.switch(Queue::Compute), Queue::Communication);
        gpu.synchronize().expect("all is done");
        back == [byte; 100]
    };
    assert!(copied(true, 1));
    assert!(!copied(false, 2), "the mock does not tell queues apart");
    assert!(copied(true, 3));

    // And back: the compute queue reads what another one wrote, uploaded through its own ring.
    gpu.switch(Queue::Copies);
    gpu.upload(from, &[4; 100]).expect("it is queued");
    gpu.switch(Queue::Compute);
    gpu.after(Queue::Copies).expect("it is queued");
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
    let written = |byte: u8| -> Moment {
        let on_its_thread = move || {
            let writer = open(mock, 0).expect("it opens");
            writer.fill(from, byte, 100).expect("it is queued");
            let moment = writer.moment().expect("it is recorded");
            // Work that is still queued when the rank ends would be done then.
            std::mem::forget(writer);
            moment
        };
        let thread = std::thread::scope(|scope| scope.spawn(on_its_thread).join());
        thread.expect("no panic")
    };
    let mut moments = Vec::new();
    let mut copied = |waits: bool, byte: u8| {
        let moment = written(byte);
        moments.push(moment.clone());
        let before = mock.said().len();
        if waits {
            reader.wait_for(&moment).expect("it is queued");
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
    for moment in &moments {
        reader.wait_for(moment).expect("it is queued");
    }
    reader.free(from, 100);
    reader.free(to, 100);
    assert_eq!(mock.wrong(), "");
}

/// The reader's queue waits for the owner's, and the owner's for the reader's, before it writes again.
#[test]
fn what_one_rank_offers_another_reads_in_time() {
    let Some(mock) = Mock::driver() else { return };
    let (owner, reader) = (device(mock, IMAGE), device(mock, IMAGE));
    let x = owner.from_f32(TensorClass::Weights, &[1.0; 50], &[50]);
    let y = reader.zeros(TensorClass::Weights, Dtype::F32, &[50]);
    let started = reader.moment();
    let before = mock.said().len();
    let offer = x.offer();
    let read = reader.beside_since(Queue::Communication, &started, || {
        let theirs = reader.accept(&offer);
        elementwise::copy(&theirs, &y);
        reader.moment()
    });
    owner.wait_for(&read);
    x.copy_from_f32(&[2.0; 50]);
    assert!(
        !mock.said()[before..].contains("Synchronize"),
        "a host waited"
    );
    // The owner's write is done first if nothing holds it up.
    assert_eq!(x.to_f32(), [2.0; 50]);
    reader.join(Queue::Communication);
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

/// What is asked for after the moment that a queue waits for goes on beside it, until memory that may
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
        let since = device.moment();
        elementwise::copy(&a, &b);
        device.beside_since(Queue::Communication, &since, || {
            if takes {
                drop(tensor());
            }
            elementwise::copy(&b, &c);
            c.to_f32()
        })
    };
    b.copy_from_f32(&[3.0; 50]);
    assert_eq!(copied(false), [3.0; 50], "the copy to b waits for nobody");
    device.join(Queue::Communication);
    assert_eq!(b.to_f32(), [1.0; 50]);
    b.copy_from_f32(&[3.0; 50]);
    assert_eq!(copied(true), [1.0; 50]);
    device.join(Queue::Communication);
    drop((a, b, c, device));
    mock.assert_clean();
}

#[test]
fn a_moment_outlives_its_device_and_its_event_is_used_again() {
    let Some(mock) = Mock::driver() else { return };
    let gpu = open(mock, 0).expect("it opens");
    let made = || mock.said().matches("cuEventCreate").count();
    let before = made();
    for _ in 0..5 {
        let start = gpu.moment().expect("it is recorded");
        gpu.synchronize().expect("all is done");
        let end = gpu.moment().expect("it is recorded");
        gpu.synchronize().expect("all is done");
        assert!(end.seconds_since(&start) > 0.0);
    }
    assert_eq!(made() - before, 2, "two moments were alive at once");

    let kept = gpu.moment().expect("it is recorded");
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
    let (start, end) = (device.moment(), device.moment());
    let error = catch(|| end.seconds_since(&start)).expect_err("nothing was waited for");
    assert_eq!(error.call, "cuEventElapsedTime");
    assert_eq!(error.op, Some("seconds_since"));
    device.synchronize();
    assert!(end.seconds_since(&start) > 0.0);
    let host = Device::cpu(1).moment();
    let mixed = std::panic::catch_unwind(|| end.seconds_since(&host));
    assert!(mixed.is_err(), "clocks that have nothing in common");
    drop((start, end, device));
    mock.assert_clean();
}

#[test]
fn memory_freed_beside_the_compute_queue_is_kept_until_the_join() {
    let Some(mock) = Mock::driver() else { return };
    let device = device(mock, IMAGE);
    let tensor = || device.zeros(TensorClass::Transient, Dtype::F32, &[100]);
    let used = device.beside(Queue::Communication, || {
        let used = tensor();
        used.address()
    });
    let other = tensor();
    assert!(other.address() != used, "memory in use was given out again");
    drop(other);
    device.join(Queue::Communication);
    let [one, two] = [tensor(), tensor()];
    assert!([one.address(), two.address()].contains(&used));
    drop((one, two));

    // A device that is synchronized has nothing in use either.
    let used = device.beside(Queue::Copies, || tensor().address());
    device.synchronize();
    let tensors = [tensor(), tensor()];
    assert!(tensors.iter().any(|tensor| tensor.address() == used));
    drop(tensors);
    drop(device);
    mock.assert_clean();
}
