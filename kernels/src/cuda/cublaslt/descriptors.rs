//! What cuBLASLt is told of a product: the operation, how its matrices lie, what an algorithm may need.
//!
//! # Why this is sound
//!
//! Each value owns one descriptor of the library, keeps the handle open and destroys it once; attributes
//! are set from a live value with its size.
#![expect(
    unsafe_code,
    reason = "calls into cuBLASLt; see the module documentation"
)]

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::rc::Rc;

use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasStatus_t, cudaDataType,
};
use moefold_profiles::Dtype;

use super::{Code, Handle, Heuristic, check};
use crate::cuda::error::DeviceError;
use crate::cuda::platform::Address;

/// What is multiplied how.
pub(super) struct Description {
    pub(super) handle: Rc<Handle>,
    pub(super) raw: cublasLtMatmulDesc_t,
}

impl Description {
    pub(super) fn new(
        handle: &Rc<Handle>,
        first_transposed: bool,
        second_transposed: bool,
    ) -> Result<Self, DeviceError> {
        use cublasLtMatmulDescAttributes_t as Attribute;
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to.
        let code = unsafe {
            (handle.functions.cublasLtMatmulDescCreate)(
                &raw mut raw,
                cublasComputeType_t::CUBLAS_COMPUTE_32F as c_uint,
                cudaDataType::CUDA_R_32F as c_uint,
            )
        };
        check("cublasLtMatmulDescCreate", code, String::new)?;
        let description = Self {
            handle: Rc::clone(handle),
            raw,
        };
        for (attribute, transposed) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, first_transposed),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, second_transposed),
        ] {
            let operation = if transposed {
                cublasOperation_t::CUBLAS_OP_T
            } else {
                cublasOperation_t::CUBLAS_OP_N
            } as c_uint;
            description.set(attribute, &operation)?;
        }
        Ok(description)
    }

    /// Sets an attribute whose type is that of the value.
    pub(super) fn set<T: Copy>(
        &self,
        attribute: cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), DeviceError> {
        // SAFETY: a value of the size said, read during the call.
        let code = unsafe {
            (self.handle.functions.cublasLtMatmulDescSetAttribute)(
                self.raw,
                attribute as c_uint,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        check("cublasLtMatmulDescSetAttribute", code, || {
            format!("{attribute:?}")
        })
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed here alone.
        unsafe { (self.handle.functions.cublasLtMatmulDescDestroy)(self.raw) };
    }
}

/// How the library runs a product.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    pub(super) algorithm: cublasLtMatmulAlgo_t,
    pub(super) workspace_bytes: usize,
}

/// How a matrix, or those of all groups, lie in memory.
pub(super) struct Layout {
    handle: Rc<Handle>,
    pub(super) raw: cublasLtMatrixLayout_t,
}

impl Layout {
    /// A row-major matrix of these rows and columns: column-major, its transpose.
    pub(super) fn new(
        handle: &Rc<Handle>,
        dtype: cudaDataType,
        (rows, columns): (usize, usize),
        row_stride: usize,
    ) -> Result<Self, DeviceError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to.
        let code = unsafe {
            (handle.functions.cublasLtMatrixLayoutCreate)(
                &raw mut raw,
                dtype as c_uint,
                columns as u64,
                rows as u64,
                row_stride as i64,
            )
        };
        check("cublasLtMatrixLayoutCreate", code, || {
            format!("[{rows}, {columns}] with {row_stride} elements from row to row")
        })?;
        Ok(Self {
            handle: Rc::clone(handle),
            raw,
        })
    }
}

impl Layout {
    /// Matrices of `groups` groups, each column-major: what the three arrays of 64-bit numbers on the
    /// device say they are, when the product runs. Nothing where the library has no such layouts.
    pub(super) fn grouped(
        handle: &Rc<Handle>,
        dtype: cudaDataType,
        groups: usize,
        [rows, columns, stride]: [Address; 3],
    ) -> Result<Option<Self>, DeviceError> {
        // `cublasLt.h` of CUDA 13.1: how wide the numbers of rows and columns, and of strides, are.
        const WIDTHS: [c_uint; 2] = [12, 13];
        const SIXTY_FOUR_BITS: c_int = 1;
        let functions = &handle.functions;
        let (Some(create), Some(set)) = (
            functions.cublasLtGroupedMatrixLayoutCreate,
            functions.cublasLtMatrixLayoutSetAttribute,
        ) else {
            return Ok(None);
        };
        let pointer = |array: Address| array.0 as *const c_void;
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to; the arrays are only remembered.
        let code = unsafe {
            create(
                &raw mut raw,
                dtype as c_uint,
                groups as c_int,
                pointer(rows),
                pointer(columns),
                pointer(stride),
            )
        };
        check("cublasLtGroupedMatrixLayoutCreate", code, || {
            format!("{groups} groups")
        })?;
        let layout = Self {
            handle: Rc::clone(handle),
            raw,
        };
        for attribute in WIDTHS {
            // SAFETY: a value of the size said, read during the call.
            let code = unsafe {
                set(
                    layout.raw,
                    attribute,
                    ptr::from_ref(&SIXTY_FOUR_BITS).cast(),
                    size_of_val(&SIXTY_FOUR_BITS),
                )
            };
            check("cublasLtMatrixLayoutSetAttribute", code, || {
                format!("attribute {attribute}")
            })?;
        }
        Ok(Some(layout))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed here alone.
        unsafe { (self.handle.functions.cublasLtMatrixLayoutDestroy)(self.raw) };
    }
}

/// What an algorithm may need.
pub(super) struct PreferenceOf<'a> {
    handle: &'a Handle,
    pub(super) raw: cublasLtMatmulPreference_t,
}

impl<'a> PreferenceOf<'a> {
    pub(super) fn new(handle: &'a Handle) -> Result<Self, DeviceError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to.
        let code = unsafe { (handle.functions.cublasLtMatmulPreferenceCreate)(&raw mut raw) };
        check("cublasLtMatmulPreferenceCreate", code, String::new)?;
        Ok(Self { handle, raw })
    }

    pub(super) fn set<T: Copy>(
        &self,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), DeviceError> {
        self.set_number(attribute as c_uint, value)
    }

    /// Sets an attribute by its number, whose type is that of the value.
    pub(super) fn set_number<T: Copy>(
        &self,
        attribute: c_uint,
        value: &T,
    ) -> Result<(), DeviceError> {
        // SAFETY: a value of the size said, read during the call.
        let code = unsafe {
            (self.handle.functions.cublasLtMatmulPreferenceSetAttribute)(
                self.raw,
                attribute,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        check("cublasLtMatmulPreferenceSetAttribute", code, || {
            format!("attribute {attribute}")
        })
    }

    /// What the library would run; nothing where it cannot do this product.
    pub(super) fn ask(
        &self,
        description: &Description,
        [first, second, result]: [&Layout; 3],
        product: impl FnOnce() -> String,
    ) -> Result<Option<Choice>, DeviceError> {
        let mut best = Heuristic {
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
            status: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut found = 0;
        // SAFETY: descriptors are alive; room for the one result asked for.
        let code = unsafe {
            (self.handle.functions.cublasLtMatmulAlgoGetHeuristic)(
                self.handle.raw,
                description.raw,
                first.raw,
                second.raw,
                result.raw,
                result.raw,
                self.raw,
                1,
                &raw mut best,
                &raw mut found,
            )
        };
        if code == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as Code {
            return Ok(None);
        }
        check("cublasLtMatmulAlgoGetHeuristic", code, product)?;
        let usable = found > 0 && best.status == 0;
        Ok(usable.then_some(Choice {
            algorithm: best.algorithm,
            workspace_bytes: best.workspace,
        }))
    }
}

impl Drop for PreferenceOf<'_> {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed here alone.
        unsafe { (self.handle.functions.cublasLtMatmulPreferenceDestroy)(self.raw) };
    }
}

pub(super) fn data_type(dtype: Dtype) -> Option<cudaDataType> {
    match dtype {
        Dtype::F32 => Some(cudaDataType::CUDA_R_32F),
        Dtype::Bf16 => Some(cudaDataType::CUDA_R_16BF),
        Dtype::I32 | Dtype::Fp8 | Dtype::Fp4 => None,
    }
}
