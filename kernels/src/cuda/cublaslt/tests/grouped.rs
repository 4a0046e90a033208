//! Grouped products through the mock, whose device memory is the emulator's: the whole way from the op
//! over the tables that a kernel makes to the library's call.

use std::rc::Rc;

use super::{Functions, Mock, STREAM, WORKSPACE, WORKSPACE_BYTES, mock};
use crate::check::{Sizes, agrees, cases};
use crate::cuda::cublaslt::CublasLt;
use crate::cuda::error::DeviceError;
use crate::cuda::platform::{Address, Dense, Grouped, Launch, Lent, Module, Platform, Properties};
use crate::cuda::program::{Architecture, EncodedMap, Program, TensorMap};
use crate::emulated::Emulated;
use crate::grouped_gemm::{Rows, dgrad_of, forward_of, wgrad_of};
use crate::testing::{integers, statistic, tensor};
use crate::{Device, Dtype, Tensor, catch};

/// The emulator with a vendor's library.
struct Assisted {
    emulator: Emulated,
    functions: Functions,
    library: CublasLt,
}

impl Platform for Assisted {
    fn properties(&self) -> &Properties {
        self.emulator.properties()
    }
    /// All of it written: the emulator does not see what the library writes.
    fn allocate(&self, bytes: u64) -> Result<Address, DeviceError> {
        let address = self.emulator.allocate(bytes)?;
        self.emulator.fill(address, 0xff, bytes)?;
        Ok(address)
    }
    fn free(&self, address: Address, bytes: u64) {
        self.emulator.free(address, bytes);
    }
    fn upload(&self, dst: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.emulator.upload(dst, bytes)
    }
    fn download(&self, src: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.emulator.download(src, bytes)
    }
    fn copy(&self, src: Address, dst: Address, bytes: u64) -> Result<(), DeviceError> {
        self.emulator.copy(src, dst, bytes)
    }
    fn fill(&self, dst: Address, byte: u8, bytes: u64) -> Result<(), DeviceError> {
        self.emulator.fill(dst, byte, bytes)
    }
    fn forget(&self, _: Address, _: u64) {}
    fn load(&self, program: &Program) -> Result<Module, DeviceError> {
        self.emulator.load(program)
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.emulator.launch(launch)
    }
    fn encode(&self, map: &TensorMap) -> Result<EncodedMap, DeviceError> {
        self.emulator.encode(map)
    }
    fn dense(&self, product: &Dense) -> Result<bool, DeviceError> {
        self.library.dense(STREAM, product)
    }
    fn has_grouped(&self) -> bool {
        self.functions.has_grouped(self.properties().architecture)
    }
    fn grouped(&self, product: &Grouped) -> Result<bool, DeviceError> {
        self.library.grouped(STREAM, product)
    }
    fn lend(&self, address: Address, bytes: u64) -> Result<Lent, DeviceError> {
        self.emulator.lend(address, bytes)
    }
    fn adopt(&self, lent: &Lent) -> Result<(), DeviceError> {
        self.emulator.adopt(lent)
    }
    fn disown(&self, address: Address) {
        self.emulator.disown(address);
    }
    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn functions(mock: Mock) -> Functions {
    // SAFETY: the mock has the library's signatures and stays loaded.
    unsafe { Functions::resolve(|name| mock.find(name)) }.expect("the mock has them all")
}

/// A Hopper of bf16 with the mock as its library.
fn device(functions: Functions) -> Option<Device> {
    let emulator = Emulated::new(Architecture::SM90, 1)?;
    let library = CublasLt::new(functions, WORKSPACE, WORKSPACE_BYTES).expect("a handle");
    let platform = Assisted {
        emulator,
        functions,
        library,
    };
    Some(Device::on_platform(Rc::new(platform), Dtype::Bf16))
}

fn version(mock: Mock, number: std::ffi::c_long) {
    // SAFETY: the signature is that of the mock.
    unsafe { mock.function::<extern "C" fn(std::ffi::c_long)>("mock_version")(number) }
}

/// Small whole numbers, which every dtype and order of sums has exactly.
fn whole(len: usize, seed: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 7 + seed) % 5) as f32 - 2.0)
        .collect()
}

/// Experts with rows and without, rows behind the last expert's.
const OFFSETS: [i32; 5] = [0, 0, 9, 9, 12];
const ROWS: usize = 14;

/// Forward, dgrad, and wgrad into gradients of either dtype, of weights `[4, n, k]`.
fn products(device: &Device, [n, k]: [usize; 2]) -> Vec<Vec<f32>> {
    let offsets = integers(device, &OFFSETS, &[5]);
    let at = Rows::Offsets(&offsets);
    let random = |dims: &[usize], seed| tensor(device, &whole(dims.iter().product(), seed), dims);
    let (x, dy) = (random(&[ROWS, k], 1), random(&[ROWS, n], 2));
    let w = random(&[4, n, k], 3);
    let used = |t: &Tensor| t.rows(0..12).to_f32();
    let mut all = vec![used(&forward_of(&x, &w, at)), used(&dgrad_of(&dy, &w, at))];
    let values = whole(4 * n * k, 4);
    for dw in [
        tensor(device, &values, &[4, n, k]),
        statistic(device, &values, &[4, n, k]),
    ] {
        wgrad_of(&dy, &x, at, &dw);
        all.push(dw.to_f32());
    }
    all
}

fn library_calls(mock: Mock) -> usize {
    mock.said()
        .lines()
        .filter(|line| *line == "cublasLtMatmul")
        .count()
}

#[test]
fn differential_the_library_does_what_the_kernels_do() {
    let Some(mock) = mock() else { return };
    let Some(device) = device(functions(mock)) else {
        return;
    };
    let own = products(&device, [16, 24]);
    assert_eq!(
        library_calls(mock),
        0,
        "the kernels do it unless told otherwise"
    );
    assert!(device.prefer_library(true));
    let theirs = products(&device, [16, 24]);
    assert_eq!(library_calls(mock), 4);
    assert_eq!(theirs, own);
    // A product again: its layouts are new, how to run it is not asked again.
    let asked = || {
        mock.said()
            .matches("cublasLtMatmulAlgoGetHeuristic")
            .count()
    };
    assert_eq!(asked(), 4);
    products(&device, [16, 24]);
    assert_eq!((asked(), library_calls(mock)), (4, 8));
    // Rows of 14 over 4 groups, up to a power of two: summed over 24 for 4 rows of 16 outputs, which
    // are its rows.
    let said = mock.said();
    assert!(
        said.contains("  groups 4 on average 24 of 16 x 4\n"),
        "{said}"
    );
    assert!(said.contains("alignment 16 16 16 16\n"), "{said}");
    assert!(!device.prefer_library(false));
    products(&device, [16, 24]);
    assert_eq!(library_calls(mock), 8);
    drop(device);
    mock.assert_clean();
}

#[test]
fn the_kernels_do_what_the_library_cannot() {
    let Some(mock) = mock() else { return };
    let Some(device) = device(functions(mock)) else {
        return;
    };
    assert!(device.prefer_library(true));
    // Rows of 40 bytes and of 30 are no whole number of 16 bytes.
    for sizes in [[20, 16], [16, 15]] {
        products(&device, sizes);
    }
    assert_eq!(library_calls(mock), 0);
    for how in [1, 2] {
        mock.capability(how);
        let sizes = [16, 8 * how as usize];
        let fallen_back = products(&device, sizes);
        device.prefer_library(false);
        assert_eq!(fallen_back, products(&device, sizes));
        device.prefer_library(true);
    }
    assert_eq!(library_calls(mock), 0);
    assert!(mock.said().contains("cublasLtMatmulAlgoGetHeuristic"));
    drop(device);
    mock.assert_clean();
}

#[test]
fn only_trusted_versions_with_the_functions_are_used() {
    let Some(mock) = mock() else { return };
    let all = functions(mock);
    let blackwell = Architecture::SM100;
    for (number, expected) in [
        (130_100, false),
        (130_399, false),
        (130_400, true),
        (140_000, true),
    ] {
        version(mock, number);
        for architecture in [Architecture::SM90, blackwell] {
            assert_eq!(all.has_grouped(architecture), expected, "{number}");
        }
        assert!(!all.has_grouped(Architecture::SM80), "no kernels for it");
    }
    for absent in [
        "cublasLtGroupedMatrixLayoutCreate",
        "cublasLtMatrixLayoutSetAttribute",
    ] {
        let find = |name: &str| {
            if name == absent {
                None
            } else {
                mock.find(name)
            }
        };
        // SAFETY: as above.
        let functions = unsafe { Functions::resolve(find) }.expect("what is missing is optional");
        assert!(!functions.has_grouped(blackwell), "{absent}");
        let Some(device) = device(functions) else {
            return;
        };
        assert!(!device.prefer_library(true), "{absent}");
        products(&device, [8, 8]);
    }
    assert!(!mock.said().contains("Grouped"));
    mock.assert_clean();
}

#[test]
fn law_whichever_call_of_a_grouped_product_fails_it_is_told() {
    let Some(mock) = mock() else { return };
    let functions = functions(mock);
    let Some(kept) = device(functions) else {
        return;
    };
    drop(kept);
    let scenario = || {
        let device = device(functions).expect("it was there just now");
        device.prefer_library(true);
        catch(|| {
            let offsets = integers(&device, &OFFSETS, &[5]);
            let x = tensor(&device, &whole(ROWS * 8, 1), &[ROWS, 8]);
            let w = tensor(&device, &whole(4 * 64, 2), &[4, 8, 8]);
            forward_of(&x, &w, Rows::Offsets(&offsets)).to_f32()
        })
    };
    // The handle is made before the count starts.
    let counted = |n| {
        mock.fail(n + 1, 14, "");
        scenario()
    };
    mock.fail(0, 0, "");
    scenario().expect("nothing fails");
    let calls = mock.calls() - 1;
    for n in 1..=calls {
        let before = mock.said().len();
        let outcome = counted(n);
        let said = mock.said();
        let mut since = said[before..].lines().filter(|line| !line.starts_with(' '));
        let failed = since.nth(n as usize).expect("it was called");
        match outcome {
            Err(error) => {
                assert_eq!(error.call, failed);
                assert_eq!(error.op, Some("grouped_gemm::forward"));
            }
            Ok(_) => assert!(failed.ends_with("Destroy"), "{failed} failed unheard"),
        }
        mock.assert_clean();
    }
    assert!(calls > 20, "{calls} calls");
}

#[test]
fn cases_for_the_library_run_where_it_is() {
    let Some(mock) = mock() else { return };
    let Some(device) = device(functions(mock)) else {
        return;
    };
    let sizes = Sizes::small()
        .into_iter()
        .find(|sizes| sizes.name == "ragged");
    let cases = cases(&sizes.expect("there are such sizes"), Dtype::Bf16);
    let cases: Vec<_> = cases
        .iter()
        .filter(|case| case.name.ends_with("by cuBLASLt"))
        .collect();
    assert!(!cases.is_empty());
    for case in cases {
        assert!(case.is_for(&device), "{}", case.name);
        for verdict in agrees(case, &device, &Device::cpu(1), 1) {
            assert!(verdict.passes(), "{}: {verdict}", case.name);
        }
        assert!(!case.is_for(&Device::cpu(1)));
    }
    assert!(library_calls(mock) > 0);
    drop(device);
    mock.assert_clean();
}
