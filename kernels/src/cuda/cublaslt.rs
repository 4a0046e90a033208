//! Dense products by cuBLASLt.
//!
//! Matrices here are row-major and cuBLASLt's are column-major, which is the same memory transposed:
//! `C = op(A) op(B)` is asked for as `C' = op(B)' op(A)'`. Products accumulate in f32, without TF32
//! for f32 operands, and partial sums of a split product stay f32 too. How to run a shape is asked
//! once and kept.
//!
//! # Why this is sound
//!
//! Functions come from a table with the signatures of `cublasLt.h`, of a library that stays open.
//! Descriptors are owned by values that destroy them once; attributes are set from a live value with
//! its size. Matrices lie where the tensors of the op say, which the op has checked; the workspace is
//! as long as said and outlives the handle's last product, see [`CublasLt::new`].
#![expect(
    unsafe_code,
    reason = "calls into cuBLASLt; see the module documentation"
)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::rc::Rc;

use cudarc::cublaslt::sys::{
    cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtReductionScheme_t,
    cublasStatus_t,
};
use moefold_profiles::Dtype;

use crate::cuda::error::DeviceError;
use crate::cuda::libraries::gate;
use crate::cuda::platform::{Address, Dense, Matrix};
use crate::cuda::table::table;

use descriptors::{Choice, Description, Layout, PreferenceOf, data_type};

mod descriptors;
mod grouped;

/// Results are numbers: see [`crate::cuda::table`].
type Code = c_uint;

/// What `cublasLtMatmulAlgoGetHeuristic` writes; `cudarc`'s own has an enum for the status.
#[repr(C)]
pub(super) struct Heuristic {
    algorithm: cublasLtMatmulAlgo_t,
    workspace: usize,
    status: Code,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Heuristic>() == size_of::<cublasLtMatmulHeuristicResult_t>());

table! {
    /// What is called of cuBLASLt.
    Functions {
        cublasLtGetVersion: fn() -> usize;
        cublasLtCreate: fn(*mut cublasLtHandle_t) -> Code;
        cublasLtDestroy: fn(cublasLtHandle_t) -> Code;
        cublasLtMatmulDescCreate: fn(*mut cublasLtMatmulDesc_t, c_uint, c_uint) -> Code;
        cublasLtMatmulDescDestroy: fn(cublasLtMatmulDesc_t) -> Code;
        cublasLtMatmulDescSetAttribute: fn(
            cublasLtMatmulDesc_t, c_uint, *const c_void, usize,
        ) -> Code;
        cublasLtMatrixLayoutCreate: fn(
            *mut cublasLtMatrixLayout_t, c_uint, u64, u64, i64,
        ) -> Code;
        cublasLtMatrixLayoutDestroy: fn(cublasLtMatrixLayout_t) -> Code;
        cublasLtMatmulPreferenceCreate: fn(*mut cublasLtMatmulPreference_t) -> Code;
        cublasLtMatmulPreferenceDestroy: fn(cublasLtMatmulPreference_t) -> Code;
        cublasLtMatmulPreferenceSetAttribute: fn(
            cublasLtMatmulPreference_t, c_uint, *const c_void, usize,
        ) -> Code;
        cublasLtMatmulAlgoGetHeuristic: fn(
            cublasLtHandle_t, cublasLtMatmulDesc_t,
            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
            cublasLtMatmulPreference_t, c_int, *mut Heuristic, *mut c_int,
        ) -> Code;
        cublasLtMatmul: fn(
            cublasLtHandle_t, cublasLtMatmulDesc_t,
            *const c_void, *const c_void, cublasLtMatrixLayout_t,
            *const c_void, cublasLtMatrixLayout_t,
            *const c_void, *const c_void, cublasLtMatrixLayout_t,
            *mut c_void, cublasLtMatrixLayout_t,
            *const cublasLtMatmulAlgo_t, *mut c_void, usize, *mut c_void,
        ) -> Code;
    }
    optional {
        cublasLtGroupedMatrixLayoutCreate: fn(
            *mut cublasLtMatrixLayout_t, c_uint, c_int,
            *const c_void, *const c_void, *const c_void,
        ) -> Code;
        cublasLtMatrixLayoutSetAttribute: fn(
            cublasLtMatrixLayout_t, c_uint, *const c_void, usize,
        ) -> Code;
    }
}

impl Functions {
    /// Those of the cuBLASLt that is found, if one is and has them.
    pub(super) fn find() -> Option<Self> {
        let found = gate::CublasLt::get().ok()?.library();
        // SAFETY: the library is cuBLASLt and stays open.
        unsafe { Self::resolve(|symbol| found.symbol(symbol)) }.ok()
    }
}

/// Plans kept: beyond it, shapes vary without end and all are forgotten.
const PLANS: usize = 4096;

/// Products by cuBLASLt on one device.
pub(super) struct CublasLt {
    /// Dropped before the handle they were made with.
    plans: RefCell<HashMap<Key, Option<Plan>>>,
    grouped: RefCell<HashMap<grouped::Key, Option<Choice>>>,
    handle: Rc<Handle>,
    workspace: Address,
    workspace_bytes: usize,
}

/// Everything that the choice of how to run a product depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    operands: [Operand; 3],
    adds: bool,
    has_bias: bool,
}

/// The layout of a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Operand {
    dtype: Dtype,
    row_stride: usize,
    transposed: bool,
    /// Bytes that its address is a multiple of, at most 256.
    alignment: u32,
}

impl Operand {
    fn new(matrix: &Matrix) -> Self {
        Self {
            dtype: matrix.dtype,
            row_stride: matrix.row_stride,
            transposed: matrix.transposed,
            alignment: 1 << matrix.address.0.trailing_zeros().min(8),
        }
    }
}

impl CublasLt {
    /// A handle on the current context. `workspace` is device memory for the products' partial sums,
    /// used only by work on the streams that are given to [`CublasLt::dense`].
    pub(super) fn new(
        functions: Functions,
        workspace: Address,
        workspace_bytes: usize,
    ) -> Result<Self, DeviceError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to.
        let code = unsafe { (functions.cublasLtCreate)(&raw mut raw) };
        check("cublasLtCreate", code, || "a handle".to_owned())?;
        Ok(Self {
            plans: RefCell::default(),
            grouped: RefCell::default(),
            handle: Rc::new(Handle { functions, raw }),
            workspace,
            workspace_bytes,
        })
    }

    pub(super) fn workspace(&self) -> Address {
        self.workspace
    }

    /// Streams a product; false where the library has no way to do it.
    pub(super) fn dense(&self, stream: *mut c_void, product: &Dense) -> Result<bool, DeviceError> {
        let Dense { m, n, k, .. } = *product;
        if m == 0 || n == 0 || k == 0 {
            // Nothing to multiply; what becomes of C is the op's own matter.
            return Ok(false);
        }
        assert!(!product.c.transposed, "{}: C is not transposed", product.op);
        let matrices = [&product.a, &product.b, &product.c];
        let key = Key {
            sizes: [m, n, k],
            operands: matrices.map(Operand::new),
            adds: product.beta != 0.0,
            has_bias: product.bias.is_some(),
        };
        let mut plans = self.plans.borrow_mut();
        if plans.len() >= PLANS && !plans.contains_key(&key) {
            plans.clear();
        }
        let plan = match plans.entry(key) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                new.insert(Plan::new(&self.handle, &key, self.workspace_bytes)?)
            }
        };
        let Some(plan) = plan else {
            return Ok(false);
        };
        plan.run(stream, product, self.workspace)?;
        Ok(true)
    }
}

/// cuBLASLt's state on a device.
struct Handle {
    functions: Functions,
    raw: cublasLtHandle_t,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed here alone.
        unsafe { (self.functions.cublasLtDestroy)(self.raw) };
    }
}

/// How one product runs. Its first operand is B, its second A: see the module documentation.
struct Plan {
    choice: Choice,
    description: Description,
    first: Layout,
    second: Layout,
    result: Layout,
}

impl Plan {
    /// Asks the library; nothing where it cannot do this product.
    fn new(
        handle: &Rc<Handle>,
        key: &Key,
        workspace_bytes: usize,
    ) -> Result<Option<Self>, DeviceError> {
        use cublasLtMatmulPreferenceAttributes_t as Preference;
        let [m, n, k] = key.sizes;
        let [a, b, c] = &key.operands;
        let (Some(input), Some(other), Some(output)) =
            (data_type(a.dtype), data_type(b.dtype), data_type(c.dtype))
        else {
            return Ok(None);
        };
        if input != other || (a.dtype == Dtype::F32 && c.dtype != Dtype::F32) {
            return Ok(None);
        }
        let description = Description::new(handle, b.transposed, a.transposed)?;
        if key.has_bias {
            // Along the rows of what is C here, columns there.
            let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as c_uint;
            description.set(
                cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &epilogue,
            )?;
        }
        let stored = |rows: usize, columns: usize, transposed: bool| {
            if transposed {
                (columns, rows)
            } else {
                (rows, columns)
            }
        };
        // Rows and columns as stored, row-major; `Layout` turns them round.
        let first = Layout::new(handle, input, stored(k, n, b.transposed), b.row_stride)?;
        let second = Layout::new(handle, input, stored(m, k, a.transposed), a.row_stride)?;
        let result = Layout::new(handle, output, (m, n), c.row_stride)?;
        let preference = preference(handle, workspace_bytes)?;
        for (attribute, operand) in [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ] {
            preference.set(attribute, &operand.alignment)?;
        }
        let layouts = [&first, &second, &result];
        let choice = preference.ask(&description, layouts, || {
            format!("a product of [{m}, {k}] and [{k}, {n}]")
        })?;
        Ok(choice.map(|choice| Self {
            choice,
            description,
            first,
            second,
            result,
        }))
    }

    fn run(
        &self,
        stream: *mut c_void,
        product: &Dense,
        workspace: Address,
    ) -> Result<(), DeviceError> {
        let alpha = 1.0_f32;
        let pointer = |matrix: &Matrix| matrix.address.0 as *mut c_void;
        let c = pointer(&product.c);
        let handle = &self.description.handle;
        if let Some(bias) = product.bias {
            let attribute = cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            self.description.set(attribute, &bias.0)?;
        }
        // SAFETY: descriptors are alive and describe the matrices; the scalars live until after the
        // call, which reads them; the stream is alive.
        let code = unsafe {
            (handle.functions.cublasLtMatmul)(
                handle.raw,
                self.description.raw,
                ptr::from_ref(&alpha).cast(),
                pointer(&product.b),
                self.first.raw,
                pointer(&product.a),
                self.second.raw,
                ptr::from_ref(&product.beta).cast(),
                c,
                self.result.raw,
                c,
                self.result.raw,
                &raw const self.choice.algorithm,
                workspace.0 as *mut c_void,
                self.choice.workspace_bytes,
                stream,
            )
        };
        check("cublasLtMatmul", code, || format!("{product:?}"))
    }
}

/// What any product may use.
fn preference(handle: &Handle, workspace_bytes: usize) -> Result<PreferenceOf<'_>, DeviceError> {
    use cublasLtMatmulPreferenceAttributes_t as Preference;
    let preference = PreferenceOf::new(handle)?;
    preference.set(
        Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        &workspace_bytes,
    )?;
    // Partial sums of a product split along k stay f32, whatever C is.
    let reduction = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as c_uint;
    preference.set(
        Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        &reduction,
    )?;
    Ok(preference)
}

fn check(
    call: &'static str,
    code: Code,
    detail: impl FnOnce() -> String,
) -> Result<(), DeviceError> {
    if code == 0 {
        return Ok(());
    }
    let mut error = DeviceError::new(call, detail());
    let known = KNOWN.iter().find(|known| **known as Code == code);
    let name = known.map_or_else(
        || "a code that this version does not know".to_owned(),
        |known| format!("{known:?}"),
    );
    error.code = Some((i64::from(code), name));
    Err(error)
}

/// The codes of `cublasStatus_t`, of which every one but success is a failure.
const KNOWN: [cublasStatus_t; 9] = [
    cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED,
    cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED,
    cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE,
    cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH,
    cublasStatus_t::CUBLAS_STATUS_MAPPING_ERROR,
    cublasStatus_t::CUBLAS_STATUS_EXECUTION_FAILED,
    cublasStatus_t::CUBLAS_STATUS_INTERNAL_ERROR,
    cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
    cublasStatus_t::CUBLAS_STATUS_LICENSE_ERROR,
];

#[cfg(test)]
mod tests;
