//! [`Tensor`]: a typed, contiguous, row-major view into a buffer of a device.
//!
//! A clone is another handle on the same memory, never a copy; [`crate::elementwise::copy`] copies.
//! Not `Send`: a tensor belongs to the thread of its device. Values leave and enter through the
//! host transfers at the end; no slice of device memory is ever handed out.

use std::ops::Range;
use std::rc::Rc;

use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;

use crate::bf16;
use crate::buffer::{Buffer, with};
use crate::cuda::platform::Address;
use crate::device::{Backend, Device, TensorClass};
use crate::sizes;

const MAX_DIMS: usize = 4;

/// A typed view `dims` into a buffer. At most four dims.
#[derive(Clone)]
pub struct Tensor {
    buffer: Rc<Buffer>,
    offset: usize,
    dims: [usize; MAX_DIMS],
    rank: usize,
    dtype: Dtype,
}

impl Tensor {
    pub(crate) fn whole(buffer: Rc<Buffer>, dtype: Dtype, dims: &[usize]) -> Self {
        let (dims, rank) = pack(dims);
        Self {
            buffer,
            offset: 0,
            dims,
            rank,
            dtype,
        }
    }

    /// The sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether there is no element (an expert without rows).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// What the memory counts as.
    pub fn class(&self) -> TensorClass {
        self.buffer.class
    }

    /// The device the memory is of.
    pub fn device(&self) -> &Device {
        &self.buffer.device
    }

    /// Handles on its buffer.
    pub(crate) fn handles(&self) -> usize {
        Rc::strong_count(&self.buffer)
    }

    /// Size of the view (not of the buffer behind it).
    pub fn bytes(&self) -> Bytes {
        self.dtype.bytes(self.len() as u64)
    }

    /// Size of the last dim: the width of a row. 1 for a scalar.
    pub fn width(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// Rows of [`Tensor::width`]: the product of all dims but the last.
    pub fn num_rows(&self) -> usize {
        self.dims()[..self.rank.saturating_sub(1)].iter().product()
    }

    /// Another view of the same memory: `dims` elements from element `offset` of this view on.
    ///
    /// # Panics
    /// When it would reach beyond this view.
    #[must_use]
    pub fn view(&self, offset: usize, dims: &[usize]) -> Self {
        let len = sizes::elements("view", dims);
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len()),
            "view: elements {offset}..{} are not inside {self:?}",
            offset.saturating_add(len)
        );
        let (packed, rank) = pack(dims);
        Self {
            buffer: Rc::clone(&self.buffer),
            offset: self.offset + offset,
            dims: packed,
            rank,
            dtype: self.dtype,
        }
    }

    /// The same elements under other dims.
    ///
    /// # Panics
    /// When the number of elements differs.
    #[must_use]
    pub fn reshape(&self, dims: &[usize]) -> Self {
        let len = sizes::elements("reshape", dims);
        assert!(
            len == self.len(),
            "reshape: {dims:?} has {len} elements, {self:?} has {}",
            self.len()
        );
        self.view(0, dims)
    }

    /// Entries `range` of the outermost dim.
    ///
    /// # Panics
    /// When the range is not inside it.
    #[must_use]
    pub fn rows(&self, range: Range<usize>) -> Self {
        assert!(
            self.rank > 0 && range.start <= range.end && range.end <= self.dims[0],
            "rows: {range:?} is not inside {self:?}"
        );
        let inner: usize = self.dims[1..self.rank].iter().product();
        let mut dims = self.dims;
        dims[0] = range.len();
        self.view(range.start * inner, &dims[..self.rank])
    }

    /// Whether two tensors look at the same elements of the same memory.
    pub fn same_memory(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.buffer, &other.buffer)
            && self.offset == other.offset
            && self.len() == other.len()
    }

    /// Whether some element is seen by both.
    pub fn overlaps(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.buffer, &other.buffer)
            && !self.is_empty()
            && !other.is_empty()
            && self.offset < other.offset + other.len()
            && other.offset < self.offset + self.len()
    }

    /// Copies the values to the host; those of bf16 as the same numbers in f32.
    ///
    /// # Panics
    /// When the tensor is of integers.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut host = vec![0.0; self.len()];
        self.copy_to_f32(&mut host);
        host
    }

    /// Copies the values to the host.
    ///
    /// # Panics
    /// When the tensor is not i32.
    pub fn to_i32(&self) -> Vec<i32> {
        match &self.device().0.backend {
            Backend::Cpu(_) => {
                let mut host = vec![0; self.len()];
                with("to_i32", [self], [], |[t], []| {
                    host.copy_from_slice(t.i32());
                });
                host
            }
            Backend::Cuda(gpu) => {
                self.expect_dtype("to_i32", Dtype::I32);
                let mut host = vec![0; self.len()];
                gpu.download("to_i32", self, bytemuck::cast_slice_mut(&mut host));
                host
            }
        }
    }

    /// Copies the values to `host`, which has the tensor's length.
    ///
    /// # Panics
    /// When the lengths differ or the tensor is of integers.
    pub fn copy_to_f32(&self, host: &mut [f32]) {
        assert!(
            host.len() == self.len(),
            "copy_to_f32: {} values for {self:?}",
            host.len()
        );
        match &self.device().0.backend {
            _ if self.dtype == Dtype::Bf16 => {
                for (wide, &bits) in host.iter_mut().zip(&self.to_halves()) {
                    *wide = bf16::widen(bits);
                }
            }
            Backend::Cpu(_) => with("copy_to_f32", [self], [], |[t], []| {
                host.copy_from_slice(t.f32());
            }),
            Backend::Cuda(gpu) => {
                self.expect_dtype("copy_to_f32", Dtype::F32);
                gpu.download("copy_to_f32", self, bytemuck::cast_slice_mut(host));
            }
        }
    }

    /// Overwrites the tensor with values of the host; one of bf16 with the nearest, ties to even.
    ///
    /// # Panics
    /// When the lengths differ or the tensor is of integers.
    pub fn copy_from_f32(&self, values: &[f32]) {
        assert!(
            values.len() == self.len(),
            "copy_from_f32: {} values for {self:?}",
            values.len()
        );
        match &self.device().0.backend {
            _ if self.dtype == Dtype::Bf16 => {
                let narrow: Vec<u16> = values.iter().map(|&value| bf16::narrow(value)).collect();
                self.copy_from_halves(&narrow);
            }
            Backend::Cpu(_) => with("copy_from_f32", [], [self], |[], [t]| {
                t.f32().copy_from_slice(values);
            }),
            Backend::Cuda(gpu) => {
                self.expect_dtype("copy_from_f32", Dtype::F32);
                gpu.upload("copy_from_f32", self, bytemuck::cast_slice(values));
            }
        }
    }

    /// Copies the bits of a tensor of bf16 to the host, whatever they stand for.
    pub(crate) fn to_halves(&self) -> Vec<u16> {
        self.expect_dtype("to_halves", Dtype::Bf16);
        let mut host = vec![0; self.len()];
        match &self.device().0.backend {
            Backend::Cpu(_) => with("to_halves", [self], [], |[t], []| {
                host.copy_from_slice(t.bf16());
            }),
            Backend::Cuda(gpu) => {
                gpu.download("to_halves", self, bytemuck::cast_slice_mut(&mut host));
            }
        }
        host
    }

    /// Overwrites a tensor of bf16 with bits of the host, as many as it has elements.
    pub(crate) fn copy_from_halves(&self, bits: &[u16]) {
        self.expect_dtype("copy_from_halves", Dtype::Bf16);
        assert!(
            bits.len() == self.len(),
            "copy_from_halves: {} values for {self:?}",
            bits.len()
        );
        match &self.device().0.backend {
            Backend::Cpu(_) => with("copy_from_halves", [], [self], |[], [t]| {
                t.bf16().copy_from_slice(bits);
            }),
            Backend::Cuda(gpu) => {
                gpu.upload("copy_from_halves", self, bytemuck::cast_slice(bits));
            }
        }
    }

    /// Overwrites the tensor with values of the host.
    ///
    /// # Panics
    /// When the lengths differ or the tensor is not i32.
    pub fn copy_from_i32(&self, values: &[i32]) {
        assert!(
            values.len() == self.len(),
            "copy_from_i32: {} values for {self:?}",
            values.len()
        );
        match &self.device().0.backend {
            Backend::Cpu(_) => with("copy_from_i32", [], [self], |[], [t]| {
                t.i32().copy_from_slice(values);
            }),
            Backend::Cuda(gpu) => {
                self.expect_dtype("copy_from_i32", Dtype::I32);
                gpu.upload("copy_from_i32", self, bytemuck::cast_slice(values));
            }
        }
    }

    /// Fills the tensor with zeros.
    pub(crate) fn fill_zero(&self) {
        match &self.device().0.backend {
            Backend::Cpu(_) => with("fill", [], [self], |[], [t]| t.bytes().fill(0)),
            Backend::Cuda(gpu) => gpu.fill_bytes("fill", self, 0),
        }
    }

    /// Fills the tensor with what no op computes: NaN, or -1 of integers.
    pub(crate) fn fill_poison(&self) {
        match &self.device().0.backend {
            // All bits set is NaN in either float.
            Backend::Cpu(_) => with("fill", [], [self], |[], [t]| t.bytes().fill(0xFF)),
            Backend::Cuda(gpu) => gpu.fill_bytes("fill", self, 0xFF),
        }
    }

    /// The address of the first element on a CUDA device.
    pub fn address(&self) -> Address {
        let offset = self.dtype.bytes(self.offset as u64);
        self.buffer.address().offset(offset.0)
    }

    #[track_caller]
    pub(crate) fn expect_dtype(&self, op: &str, dtype: Dtype) {
        assert!(
            self.dtype == dtype,
            "{op}: expected a tensor of {dtype}, got {self:?}"
        );
    }

    pub(crate) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.dims())
    }
}

fn pack(dims: &[usize]) -> ([usize; MAX_DIMS], usize) {
    assert!(
        dims.len() <= MAX_DIMS,
        "a tensor has at most {MAX_DIMS} dims, got {dims:?}"
    );
    let mut packed = [0; MAX_DIMS];
    packed[..dims.len()].copy_from_slice(dims);
    (packed, dims.len())
}

/// Asserts the dims of an argument, naming the op, the argument, what was expected and found.
#[track_caller]
pub(crate) fn expect_dims(op: &str, argument: &str, tensor: &Tensor, dims: &[usize]) {
    assert!(
        tensor.dims() == dims,
        "{op}: {argument} is {tensor:?}, expected {dims:?}"
    );
}

#[cfg(test)]
mod tests;
