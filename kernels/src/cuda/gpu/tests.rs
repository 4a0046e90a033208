//! The platform against a driver without a GPU: the order of its calls, what it makes of failures,
//! and that nothing is left behind.
#![expect(
    unsafe_code,
    reason = "loads the mock; its functions have the driver's signatures"
)]

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
use crate::cuda::platform::{Address, Launch, Module, Platform, Stream};
use crate::cuda::program::{Architecture, Arg, EncodedMap, Grid, Source, Swizzle, TensorMap};
use crate::device::{Backend, Device, TensorClass};
use crate::programs::programs;
use mock::Mock;
use moefold_profiles::Dtype;
use moefold_profiles::random::SplitMix64;
use moefold_profiles::units::Bytes;

mod memory;
pub(crate) mod mock;
mod streams;

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
    let mut random = SplitMix64::new(seed);
    (0..count).map(|_| random.draw() as u8).collect()
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
    assert_eq!(count("cuStreamCreate"), 6);
    assert_eq!(count("cuStreamDestroy_v2"), 6);
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
        device.beside(Stream::Copies, || {
            device.zeros(TensorClass::Transient, Dtype::F32, &[1000])
        });
        device.join(Stream::Copies);
        let start = device.record_event();
        let theirs = device.beside_since(Stream::Communication, &start, || {
            device.accept(&tensor.offer())
        });
        drop(theirs);
        device.join(Stream::Communication);
        let end = device.record_event();
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
    let device = device(mock, "kernel rms_norm_forward 256 8 8 8 8 8 4 4 4 4\n");
    device.poison(false);
    let x = device.from_f32(TensorClass::Activations, &[1.0; 40 * 64], &[40, 64]);
    let w = device.from_f32(TensorClass::Weights, &[1.0; 64], &[64]);
    let outputs = crate::rms_norm::forward(&x, &w, 1e-5);
    device.synchronize();
    // 40 rows, 32 a block; no sums of squares of other ranks; then rows, width, what the mean is over, and eps.
    let launch = "rms_norm_forward [2 1 1] x 256, 128 bytes shared: memory memory null memory memory \
                  0x28 0x40 0x40 0x3727c5ac\n";
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
