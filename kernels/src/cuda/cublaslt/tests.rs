//! Products through a cuBLASLt without a GPU, which multiplies on the host: the same numbers for
//! every layout, heuristics asked once a shape, failures told, nothing left behind.
#![expect(
    unsafe_code,
    reason = "loads the mock; its functions have the library's signatures"
)]

use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;

use moefold_profiles::Dtype;

use super::{CublasLt, Functions};
use crate::cuda::gpu::tests::mock::{Mock, library};
use crate::cuda::platform::{Address, Dense, Matrix};

fn mock() -> Option<Mock> {
    static CUBLASLT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let source = include_str!("cublaslt.c");
    library(&CUBLASLT, "mock-cublaslt", source).map(Mock::copy_of)
}

const WORKSPACE: Address = Address(0x7000);
const WORKSPACE_BYTES: usize = 1 << 20;

fn open(mock: Mock) -> CublasLt {
    // SAFETY: the mock has the library's signatures and stays loaded.
    let functions = unsafe { Functions::resolve(|name| mock.find(name)) };
    let functions = functions.expect("the mock has them all");
    CublasLt::new(functions, WORKSPACE, WORKSPACE_BYTES).expect("a handle")
}

/// A stored matrix of small whole numbers, which every dtype and order of sums has exactly.
struct Stored {
    words: Vec<u32>,
    dtype: Dtype,
    stride: usize,
    transposed: bool,
}

impl Stored {
    fn new(rows: usize, columns: usize, dtype: Dtype, transposed: bool, seed: usize) -> Self {
        let (rows, columns) = if transposed {
            (columns, rows)
        } else {
            (rows, columns)
        };
        let stride = columns + 3;
        let mut stored = Self {
            words: vec![0; rows * stride],
            dtype,
            stride,
            transposed,
        };
        for at in 0..rows * stride {
            stored.set(at, ((at * 7 + seed * 5) % 11) as f32 - 5.0);
        }
        stored
    }

    fn at(&self, row: usize, column: usize) -> usize {
        if self.transposed {
            column * self.stride + row
        } else {
            row * self.stride + column
        }
    }

    fn set(&mut self, at: usize, value: f32) {
        if self.dtype == Dtype::F32 {
            self.words[at] = value.to_bits();
        } else {
            let halves: &mut [u16] = bytemuck::cast_slice_mut(&mut self.words);
            halves[at] = (value.to_bits() >> 16) as u16;
        }
    }

    fn get(&self, row: usize, column: usize) -> f32 {
        let at = self.at(row, column);
        if self.dtype == Dtype::F32 {
            f32::from_bits(self.words[at])
        } else {
            let halves: &[u16] = bytemuck::cast_slice(&self.words);
            f32::from_bits(u32::from(halves[at]) << 16)
        }
    }

    fn matrix(&self) -> Matrix {
        Matrix {
            address: Address(self.words.as_ptr() as u64),
            dtype: self.dtype,
            row_stride: self.stride,
            transposed: self.transposed,
        }
    }
}

mod grouped;

fn dense([m, n, k]: [usize; 3], a: &Stored, b: &Stored, c: &Stored, beta: f32) -> Dense {
    Dense {
        op: "gemm::forward",
        m,
        n,
        k,
        a: a.matrix(),
        b: b.matrix(),
        c: c.matrix(),
        bias: None,
        beta,
    }
}

const STREAM: *mut c_void = ptr::dangling_mut();

#[test]
fn oracle_every_layout_gives_the_product() {
    let Some(mock) = mock() else { return };
    let library = open(mock);
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    for (inputs, output) in [(f32, f32), (bf16, bf16), (bf16, f32)] {
        for flags in 0..8 {
            let [ta, tb, adds] = [1, 2, 4].map(|flag| flags & flag != 0);
            for [m, n, k] in [[1, 1, 1], [5, 3, 4], [2, 7, 3]] {
                let a = Stored::new(m, k, inputs, ta, 1);
                let b = Stored::new(k, n, inputs, tb, 2);
                let c = Stored::new(m, n, output, false, 3);
                let beta = f32::from(u8::from(adds));
                let mut expected = Vec::new();
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let sum: f32 = (0..k).map(|p| a.get(i, p) * b.get(p, j)).sum();
                    expected.push(sum + beta * c.get(i, j));
                }
                let done = library.dense(STREAM, &dense([m, n, k], &a, &b, &c, beta));
                assert!(done.expect("nothing fails"));
                let found = (0..m).flat_map(|i| (0..n).map(move |j| (i, j)));
                let found = found.map(|(i, j)| c.get(i, j)).collect::<Vec<_>>();
                assert_eq!(found, expected, "{m} {n} {k}, {ta} {tb} {adds}, {output}");
            }
        }
    }
    drop(library);
    mock.assert_clean();
}

/// The bias is one of C's columns; two biases of one shape are one question, and another than none.
#[test]
fn oracle_a_bias_is_added_to_every_row() {
    let Some(mock) = mock() else { return };
    let library = open(mock);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let [m, n, k] = [3, 5, 4];
        let a = Stored::new(m, k, dtype, false, 1);
        let b = Stored::new(k, n, dtype, true, 2);
        let c = Stored::new(m, n, dtype, false, 5);
        let before = mock.said().matches("GetHeuristic").count();
        for seed in [None, Some(3), Some(4)] {
            let bias = seed.map(|seed| Stored::new(1, n, dtype, false, seed));
            for beta in [0.0, 1.0] {
                let mut product = dense([m, n, k], &a, &b, &c, beta);
                product.bias = bias.as_ref().map(|bias| bias.matrix().address);
                let mut expected = Vec::new();
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let sum: f32 = (0..k).map(|p| a.get(i, p) * b.get(p, j)).sum();
                    let bias = bias.as_ref().map_or(0.0, |bias| bias.get(0, j));
                    expected.push(sum + bias + beta * c.get(i, j));
                }
                assert!(library.dense(STREAM, &product).expect("nothing fails"));
                let found = (0..m).flat_map(|i| (0..n).map(move |j| (i, j)));
                let found = found.map(|(i, j)| c.get(i, j)).collect::<Vec<_>>();
                assert_eq!(found, expected, "{dtype} {seed:?} {beta}");
            }
        }
        let asked = mock.said().matches("GetHeuristic").count() - before;
        assert_eq!(asked, 4, "with and without a bias, adding and not");
    }
    drop(library);
    mock.assert_clean();
}

#[test]
fn a_shape_is_asked_about_once_with_what_it_depends_on() {
    let Some(mock) = mock() else { return };
    let library = open(mock);
    let a = Stored::new(4, 8, Dtype::Bf16, false, 1);
    let b = Stored::new(8, 4, Dtype::Bf16, false, 2);
    let c = Stored::new(4, 4, Dtype::F32, false, 3);
    let run = |product: &Dense| library.dense(STREAM, product).expect("nothing fails");
    let mut product = dense([4, 4, 8], &a, &b, &c, 0.0);
    // Addresses of these alignments in bytes: of B, A and C in the library's order.
    product.a.address = Address(product.a.address.0.next_multiple_of(8));
    let asked = || {
        mock.said()
            .matches("cublasLtMatmulAlgoGetHeuristic")
            .count()
    };
    assert!(run(&product) && run(&product));
    assert_eq!(asked(), 1);
    let alignment = |matrix: &Matrix| 1 << matrix.address.0.trailing_zeros().min(8);
    let [a_bytes, b_bytes, c_bytes] = [&product.a, &product.b, &product.c].map(alignment);
    let said = format!(
        "compute 68 scale 0 workspace {WORKSPACE_BYTES} reduction 2 \
         alignment {b_bytes} {a_bytes} {c_bytes} {c_bytes}\n"
    );
    assert!(
        mock.said().contains(&said),
        "{said} is not in {}",
        mock.said()
    );
    let said = "stream 0x1 workspace 0x7000 4096\n";
    assert!(mock.said().contains(said), "{}", mock.said());
    // Another length of row and another alignment are other questions.
    product.b.row_stride += 1;
    product.n = 3;
    assert!(run(&product));
    product.c.address = product.c.address.offset(4);
    product.m = 3;
    product.c.row_stride = 5;
    assert!(run(&product));
    assert_eq!(asked(), 3);
    drop(library);
    mock.assert_clean();
}

#[test]
fn what_the_library_cannot_do_is_left_to_others() {
    let Some(mock) = mock() else { return };
    let library = open(mock);
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    let with = |a, b, c, sizes: [usize; 3]| {
        let [m, n, k] = sizes;
        let a = Stored::new(m, k, a, false, 1);
        let b = Stored::new(k, n, b, false, 1);
        let c = Stored::new(m, n, c, false, 1);
        let product = dense(sizes, &a, &b, &c, 0.0);
        library.dense(STREAM, &product).expect("nothing fails")
    };
    let some = [2, 2, 2];
    assert!(!with(f32, bf16, f32, some), "operands of two types");
    assert!(
        !with(f32, f32, bf16, some),
        "a result shorter than its operands"
    );
    assert!(!with(Dtype::I32, Dtype::I32, f32, some), "whole numbers");
    for empty in [[0, 2, 2], [2, 0, 2], [2, 2, 0]] {
        assert!(!with(f32, f32, f32, empty), "nothing to multiply");
    }
    assert!(!mock.said().contains("cublasLtMatmulAlgoGetHeuristic"));
    for how in [1, 2] {
        mock.capability(how);
        let asked = || {
            mock.said()
                .matches("cublasLtMatmulAlgoGetHeuristic")
                .count()
        };
        let before = asked();
        let sizes = [how as usize + 2, 3, 4];
        assert!(!with(f32, f32, f32, sizes) && asked() == before + 1);
    }
    assert!(!mock.said().contains("cublasLtMatmul\n"));
    drop(library);
    mock.assert_clean();
}

#[test]
fn law_whichever_call_fails_it_is_told_and_nothing_is_left_behind() {
    let Some(mock) = mock() else { return };
    // SAFETY: the mock has the library's signatures and stays loaded.
    let functions = unsafe { Functions::resolve(|name| mock.find(name)) };
    let functions = functions.expect("the mock has them all");
    let a = Stored::new(3, 4, Dtype::F32, false, 1);
    let b = Stored::new(4, 2, Dtype::F32, true, 2);
    let c = Stored::new(3, 2, Dtype::F32, false, 3);
    let bias = Stored::new(1, 2, Dtype::F32, false, 4);
    let mut product = dense([3, 2, 4], &a, &b, &c, 1.0);
    product.bias = Some(bias.matrix().address);
    let scenario = || {
        let library = CublasLt::new(functions, WORKSPACE, WORKSPACE_BYTES)?;
        library.dense(STREAM, &product)
    };
    mock.fail(0, 0, "");
    assert_eq!(scenario(), Ok(true));
    let calls = mock.calls();
    for n in 1..=calls {
        let before = mock.said().len();
        mock.fail(n, 14, "");
        let outcome = scenario();
        let said = mock.said();
        let mut since = said[before..].lines().filter(|line| !line.starts_with(' '));
        let failed = since.nth(n as usize - 1).expect("it was called");
        match outcome {
            Err(error) => {
                let code = Some((14, "CUBLAS_STATUS_INTERNAL_ERROR".to_owned()));
                assert_eq!((error.call, error.code), (failed, code));
            }
            Ok(_) => assert!(failed.ends_with("Destroy"), "{failed} failed unheard"),
        }
        mock.assert_clean();
    }
    assert!(calls > 15, "{calls} calls");
}
