//! Memory of a device as tensors have it: buffers, and the one door to their contents.
//!
//! # Why this is sound
//!
//! Tensors alias freely: clones and views share a buffer, and an op may read one part of it while
//! it writes another. So memory is kept as cells, and slices of it exist only inside [`with`]:
//!
//! 1. [`with`] turns the tensors of one op call into shared slices (inputs) and exclusive slices
//!    (outputs) and hands them to a closure. They live while it runs and no longer: it is generic
//!    over their lifetime, so they cannot leave it.
//! 2. Before that it checks that no output overlaps an input or another output, by buffer and word
//!    range.
//! 3. A device lends its memory to one [`with`] at a time: a nested call panics. Buffers are not
//!    `Send` and a device is one thread's, so no other thread can be inside either. The closure may
//!    hand the slices to worker threads, whom the borrow checker holds to its scope.
//! 4. All memory is initialized when it is first taken from the system, and every bit pattern is a
//!    valid f32, i32, u32 and u16, so reading recycled memory is defined (if useless).
//!
//! `unsafe` has these other homes in the crate: [`crate::matrix`] (strided tiles of such slices),
//! [`crate::product`] (the call into the matrix product), [`crate::turn`] (transposes) and
//! [`crate::simd`] (calls compiled for wider vectors). In [`crate::cuda`] (foreign libraries, kernels run
//! on the CPU) each module says why.
#![expect(
    unsafe_code,
    reason = "tensors share memory; see the module documentation"
)]

use std::cell::UnsafeCell;
use std::rc::Rc;

use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;

use crate::arena::Piece;
use crate::cuda::platform::Address;
use crate::cuda::{Adopted, Pinned};
use crate::device::{Device, Side, TensorClass};
use crate::meta::NOWHERE;
use crate::observe::Allocation;
use crate::tensor::Tensor;

/// A cache line of words: the unit of allocation, so that every buffer is 64-byte aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; WORDS_PER_LINE]);

const WORDS_PER_LINE: usize = 16;

/// Memory of the CPU.
pub(crate) struct CpuMemory(Box<[UnsafeCell<Line>]>);

impl CpuMemory {
    pub(crate) fn new(lines: usize) -> Self {
        Self(
            (0..lines)
                .map(|_| UnsafeCell::new(Line([0; WORDS_PER_LINE])))
                .collect(),
        )
    }

    fn base(&self) -> *mut u8 {
        // `UnsafeCell<Line>` has the layout of `Line`, which is sixteen words.
        self.0.as_ptr().cast::<u8>().cast_mut()
    }
}

/// Memory of either kind of device.
pub(crate) enum Storage {
    Cpu(CpuMemory),
    Cuda(Piece),
    /// Of the host of a CUDA device.
    Pinned(Pinned),
    /// Another rank's, which no arena has an account of.
    Adopted(Adopted),
    /// None, of a [meta device](crate::meta).
    Meta,
}

/// Bytes of a line: what memory of the CPU is handed out in.
pub(crate) const LINE_BYTES: usize = size_of::<Line>();

/// Memory that one or several tensors look at; counted until the last of them drops.
pub(crate) struct Buffer {
    pub(crate) device: Device,
    pub(crate) class: TensorClass,
    bytes: usize,
    /// Its number on its device, from 0.
    id: u64,
    side: Side,
    storage: Option<Storage>,
}

impl Buffer {
    /// `storage` holds at least `bytes`.
    pub(crate) fn new(
        device: Device,
        (class, side): (TensorClass, Side),
        bytes: usize,
        id: u64,
        storage: Storage,
    ) -> Self {
        Self {
            device,
            class,
            bytes,
            id,
            side,
            storage: Some(storage),
        }
    }

    /// Whose memory it is.
    pub(crate) fn side(&self) -> Side {
        self.side
    }

    /// As observers are told of it.
    pub(crate) fn allocation(&self) -> Allocation {
        Allocation {
            id: self.id,
            class: self.class,
            side: self.side,
            bytes: Bytes(self.bytes as u64),
        }
    }

    fn storage(&self) -> &Storage {
        self.storage.as_ref().expect("memory leaves only on drop")
    }

    /// Whether the memory is another rank's, to be read alone.
    fn is_adopted(&self) -> bool {
        matches!(self.storage(), Storage::Adopted(_))
    }

    fn base(&self) -> *mut u8 {
        match self.storage() {
            Storage::Cpu(memory) => memory.base(),
            Storage::Cuda(_) | Storage::Pinned(_) | Storage::Adopted(_) | Storage::Meta => {
                panic!("memory of {:?} is not the host's", self.device)
            }
        }
    }

    /// Where the memory starts on a CUDA device.
    pub(crate) fn address(&self) -> Address {
        match self.storage() {
            Storage::Cuda(piece) => piece.address(),
            Storage::Pinned(pinned) => pinned.address(),
            Storage::Adopted(adopted) => adopted.address(),
            Storage::Meta => NOWHERE,
            Storage::Cpu(_) => panic!("memory of {:?} has no device address", self.device),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.storage.take() {
            None | Some(Storage::Adopted(_)) => {}
            Some(storage) => {
                let mut arena = self.device.0.arena.borrow_mut();
                arena.give((self.class, self.side), self.bytes, storage);
                drop(arena);
                self.device.tell_freed(self.allocation());
            }
        }
    }
}

/// What an op reads.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    bytes: &'a [u8],
    dtype: Dtype,
}

impl<'a> Input<'a> {
    pub(crate) fn f32(self) -> &'a [f32] {
        assert!(
            self.dtype == Dtype::F32,
            "expected an f32 tensor, got {}",
            self.dtype
        );
        bytemuck::cast_slice(self.bytes)
    }

    pub(crate) fn i32(self) -> &'a [i32] {
        assert!(
            self.dtype == Dtype::I32,
            "expected an i32 tensor, got {}",
            self.dtype
        );
        bytemuck::cast_slice(self.bytes)
    }

    /// The bits of bf16.
    pub(crate) fn bf16(self) -> &'a [u16] {
        assert!(
            self.dtype == Dtype::Bf16,
            "expected a bf16 tensor, got {}",
            self.dtype
        );
        bytemuck::cast_slice(self.bytes)
    }

    /// Of a tensor whose elements are words.
    pub(crate) fn words(self) -> &'a [u32] {
        bytemuck::cast_slice(self.bytes)
    }
}

/// What an op writes (and may read).
pub(crate) struct Output<'a> {
    bytes: &'a mut [u8],
    dtype: Dtype,
}

impl<'a> Output<'a> {
    pub(crate) fn f32(self) -> &'a mut [f32] {
        assert!(
            self.dtype == Dtype::F32,
            "expected an f32 tensor, got {}",
            self.dtype
        );
        bytemuck::cast_slice_mut(self.bytes)
    }

    pub(crate) fn i32(self) -> &'a mut [i32] {
        assert!(
            self.dtype == Dtype::I32,
            "expected an i32 tensor, got {}",
            self.dtype
        );
        bytemuck::cast_slice_mut(self.bytes)
    }

    /// The bits of bf16.
    pub(crate) fn bf16(self) -> &'a mut [u16] {
        assert!(
            self.dtype == Dtype::Bf16,
            "expected a bf16 tensor, got {}",
            self.dtype
        );
        bytemuck::cast_slice_mut(self.bytes)
    }

    /// Of a tensor whose elements are words.
    pub(crate) fn words(self) -> &'a mut [u32] {
        bytemuck::cast_slice_mut(self.bytes)
    }

    pub(crate) fn bytes(self) -> &'a mut [u8] {
        self.bytes
    }
}

/// Returns the device's memory when the op is done, also by panic.
struct Lease<'a>(&'a Device);

impl<'a> Lease<'a> {
    fn take(op: &str, device: &'a Device) -> Self {
        assert!(
            !device.0.leased.replace(true),
            "{op}: called from inside another op"
        );
        Self(device)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.0.0.leased.set(false);
    }
}

/// Checks the arguments of an op and returns their device.
///
/// # Panics
/// When an output overlaps another argument or is memory of another rank, or when the tensors are of
/// several devices.
pub(crate) fn disjoint<'a>(op: &str, inputs: &[&'a Tensor], outputs: &[&'a Tensor]) -> &'a Device {
    let mut arguments = inputs.iter().chain(outputs);
    let device = arguments.next().expect("an op has arguments").device();
    assert!(
        arguments.all(|t| Rc::ptr_eq(&t.device().0, &device.0)),
        "{op}: arguments are of several devices"
    );
    for (i, output) in outputs.iter().enumerate() {
        assert!(
            !output.buffer().is_adopted(),
            "{op}: an output {output:?} is another rank's memory, which may only be read"
        );
        let mut others = inputs.iter().chain(&outputs[..i]);
        if let Some(other) = others.find(|other| output.overlaps(other)) {
            panic!("{op}: an output {output:?} overlaps another argument {other:?}");
        }
    }
    device
}

/// Runs `body` on the contents of `inputs` (shared) and `outputs` (exclusive). See the module
/// documentation for why this is sound. A [meta device](crate::meta) has no contents: there `body` is left
/// out, after the same checks.
///
/// # Panics
/// When an output overlaps another argument, when the tensors are of several devices, or inside
/// another `with` of the device.
pub(crate) fn with<const I: usize, const O: usize, R: Default>(
    op: &str,
    inputs: [&Tensor; I],
    outputs: [&Tensor; O],
    body: impl FnOnce([Input<'_>; I], [Output<'_>; O]) -> R,
) -> R {
    let device = disjoint(op, &inputs, &outputs);
    if device.is_meta() {
        return R::default();
    }
    let _lease = Lease::take(op, device);
    let range = |t: &Tensor| {
        let bytes = |elements: usize| t.dtype().bytes(elements as u64).0 as usize;
        (bytes(t.offset()), bytes(t.len()))
    };
    // SAFETY: the range is inside the buffer (an invariant of `Tensor`), the memory is initialized,
    // no exclusive slice overlaps it (checked above), and no other slice of the device is alive
    // (the lease).
    let inputs = inputs.map(|t| {
        let (start, len) = range(t);
        Input {
            bytes: unsafe { std::slice::from_raw_parts(t.buffer().base().add(start), len) },
            dtype: t.dtype(),
        }
    });
    // SAFETY: as above, and outputs do not overlap each other.
    let outputs = outputs.map(|t| {
        let (start, len) = range(t);
        Output {
            bytes: unsafe { std::slice::from_raw_parts_mut(t.buffer().base().add(start), len) },
            dtype: t.dtype(),
        }
    });
    body(inputs, outputs)
}
