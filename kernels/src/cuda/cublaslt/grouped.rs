//! One product per group, of sizes that only the device knows.
//!
//! The library reads the matrices' addresses, sizes and strides from arrays on the device when the
//! product runs (`cublasLtGroupedMatrixLayoutCreate`, cuBLAS 13.2 and later), so the host waits for
//! nothing. It checks little of them; that rows start at multiples of 16 bytes is for the caller to
//! see to.
//!
//! # Which versions are trusted
//!
//! From 13.4 on, on Hopper and on Blackwell. Hopper has no kernels before it (`TransformerEngine` asks
//! for as much). On Blackwell 13.2 gives wrong gradients of weights where a group has no rows
//! (`TransformerEngine`, pull request 2765). Operands that are not transposed work from CUDA 13.3 on,
//! whose cuBLAS is 13.4 (`PyTorch`, pull request 190372).
#![expect(
    unsafe_code,
    reason = "calls into cuBLASLt; soundness as in the module above, and the arrays and matrices are \
              where the caller says for as long as the product runs"
)]

use std::ffi::{c_uint, c_void};
use std::ptr;

use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t as Preference;
use moefold_profiles::Dtype;

use super::{CublasLt, Description, Functions, Layout, PLANS, check, data_type, preference};
use crate::cuda::error::DeviceError;
use crate::cuda::platform::{Field, Grouped};
use crate::cuda::program::Architecture;

/// As `cublasLtGetVersion` counts: 13.4.0.
const OLDEST: usize = 13_04_00;

/// What addresses in the arrays are multiples of, in bytes.
const ALIGNMENT: c_uint = 16;

/// `cublasLt.h` of CUDA 13.1, of `cublasLtMatmulPreferenceAttributes_t`: what groups have on average of
/// what is summed over, of rows of D and of its columns.
const AVERAGES: [c_uint; 3] = [13, 14, 15];

/// Everything that the choice of how to run a product depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    groups: usize,
    /// m, n and k of a group on average: what varies from step to step, rounded up to a power of two.
    sizes: [usize; 3],
    transposed: [bool; 2],
    dtypes: [Dtype; 2],
    adds: bool,
}

impl Functions {
    /// Whether the library has such products for this architecture.
    pub(in crate::cuda) fn has_grouped(&self, architecture: Architecture) -> bool {
        // SAFETY: it takes nothing.
        let version = unsafe { (self.cublasLtGetVersion)() };
        matches!(architecture.major, 9..=11)
            && version >= OLDEST
            && self.cublasLtGroupedMatrixLayoutCreate.is_some()
            && self.cublasLtMatrixLayoutSetAttribute.is_some()
    }
}

impl CublasLt {
    /// Streams the products; false where the library has no way to do them.
    pub(in crate::cuda) fn grouped(
        &self,
        stream: *mut c_void,
        product: &Grouped,
    ) -> Result<bool, DeviceError> {
        let (Some(input), Some(output)) = (data_type(product.input), data_type(product.output))
        else {
            return Ok(false);
        };
        let [ta, tb] = product.transposed;
        let description = Description::new(&self.handle, tb, ta)?;
        // Rows and columns as stored, row-major; column-major they are each other.
        let layout = |dtype, rows: Field, columns: Field, transposed, pitch: Field| {
            let (rows, columns) = if transposed {
                (columns, rows)
            } else {
                (rows, columns)
            };
            let arrays = [columns, rows, pitch].map(|field| product.array(field));
            Layout::grouped(&self.handle, dtype, product.groups, arrays)
        };
        let (Some(first), Some(second), Some(result)) = (
            layout(input, Field::K, Field::N, tb, Field::PitchB)?,
            layout(input, Field::M, Field::K, ta, Field::PitchA)?,
            layout(output, Field::M, Field::N, false, Field::PitchC)?,
        ) else {
            return Ok(false);
        };
        let key = Key {
            groups: product.groups,
            sizes: product.average,
            transposed: product.transposed,
            dtypes: [product.input, product.output],
            adds: product.beta != 0.0,
        };
        let known = self.grouped.borrow().get(&key).copied();
        let choice = if let Some(known) = known {
            known
        } else {
            let preference = preference(&self.handle, self.workspace_bytes)?;
            for attribute in [
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                preference.set(attribute, &ALIGNMENT)?;
            }
            // Rows there are columns here.
            let [m, n, k] = product.average.map(|size| size as i64);
            for (attribute, average) in AVERAGES.into_iter().zip([k, n, m]) {
                preference.set_number(attribute, &average)?;
            }
            let layouts = [&first, &second, &result];
            let choice = preference.ask(&description, layouts, || format!("{product:?}"))?;
            let mut known = self.grouped.borrow_mut();
            if known.len() >= PLANS {
                known.clear();
            }
            known.insert(key, choice);
            choice
        };
        let Some(choice) = choice else {
            return Ok(false);
        };
        let alpha = 1.0_f32;
        let matrices = |field| product.array(field).0 as *mut c_void;
        let c = matrices(Field::C);
        // SAFETY: descriptors are alive until the work is queued, the scalars until after the call,
        // which reads them; the arrays of addresses have an entry a group; the stream is alive.
        let code = unsafe {
            (self.handle.functions.cublasLtMatmul)(
                self.handle.raw,
                description.raw,
                ptr::from_ref(&alpha).cast(),
                matrices(Field::B),
                first.raw,
                matrices(Field::A),
                second.raw,
                ptr::from_ref(&product.beta).cast(),
                c,
                result.raw,
                c,
                result.raw,
                &raw const choice.algorithm,
                self.workspace.0 as *mut c_void,
                choice.workspace_bytes,
                stream,
            )
        };
        check("cublasLtMatmul", code, || format!("{product:?}"))?;
        Ok(true)
    }
}
