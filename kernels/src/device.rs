//! [`Device`]: who owns memory and runs ops, and the account of what is alive on it.
//!
//! One device per rank thread, cheap to clone, not `Send`. The account is exact: a buffer counts its
//! requested bytes under its [`TensorClass`] from allocation until the last handle on it drops, and
//! the peaks are those of the same counts. What is freed is kept for reuse; that is not part of the
//! account ([`Device::cached`] reports it, [`Device::reserved`] all that was taken from the system).

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Instant;

pub use moefold_profiles::TensorClass;
use moefold_profiles::units::Bytes;
use moefold_profiles::{ByClass, Dtype};

use crate::arena::Arena;
use crate::buffer::{Buffer, Storage};
use crate::cuda::error::DeviceError;
use crate::cuda::gpu::Gpu;
use crate::cuda::platform::Platform;
use crate::cuda::{Cuda, Overhead, Properties, Stream};
use crate::event::Event;
use crate::meta::Routing;
use crate::observe::Observer;
use crate::parallel::Cpu;
use crate::sizes;
use crate::tensor::Tensor;

/// Whose memory a tensor is in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Side {
    /// The device's.
    #[default]
    Device,
    /// The host's, beside the account of the device: pinned where the device is a GPU, ordinary memory where
    /// it is the CPU.
    Host,
}

/// A snapshot of the account of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    live: ByClass<u64>,
    peak: ByClass<u64>,
    peak_total: u64,
    at_peak: ByClass<u64>,
    on_host: u64,
    peak_on_host: u64,
}

impl Memory {
    /// Bytes alive in one class.
    pub fn live(&self, class: TensorClass) -> Bytes {
        Bytes(self.live[class])
    }

    /// The most bytes alive in one class since the last [`Device::reset_peak`].
    pub fn peak(&self, class: TensorClass) -> Bytes {
        Bytes(self.peak[class])
    }

    /// Bytes alive in all classes.
    pub fn live_total(&self) -> Bytes {
        Bytes(self.live.total())
    }

    /// The most bytes alive at one moment over all classes together.
    pub fn peak_total(&self) -> Bytes {
        Bytes(self.peak_total)
    }

    /// Bytes that were alive in one class at the moment of [`Memory::peak_total`]; over all classes
    /// they sum to it.
    pub fn at_peak(&self, class: TensorClass) -> Bytes {
        Bytes(self.at_peak[class])
    }

    /// Bytes of tensors in memory of the host ([`Side::Host`]), no part of the others.
    pub fn on_host(&self) -> Bytes {
        Bytes(self.on_host)
    }

    /// The most of them at one moment since the last [`Device::reset_peak`].
    pub fn peak_on_host(&self) -> Bytes {
        Bytes(self.peak_on_host)
    }

    pub(crate) fn add_on_host(&mut self, bytes: u64) {
        self.on_host += bytes;
        self.peak_on_host = self.peak_on_host.max(self.on_host);
    }

    pub(crate) fn remove_from_host(&mut self, bytes: u64) {
        self.on_host -= bytes;
    }

    pub(crate) fn add(&mut self, class: TensorClass, bytes: u64) {
        self.live[class] += bytes;
        self.peak[class] = self.peak[class].max(self.live[class]);
        let total = self.live.total();
        if total > self.peak_total {
            self.peak_total = total;
            self.at_peak = self.live;
        }
    }

    pub(crate) fn remove(&mut self, class: TensorClass, bytes: u64) {
        self.live[class] -= bytes;
    }

    fn reset_peak(&mut self) {
        self.peak = self.live;
        self.peak_total = self.live.total();
        self.at_peak = self.live;
        self.peak_on_host = self.on_host;
    }
}

/// Who runs the ops. A further kind of device is a further variant, and an arm in every op.
pub(crate) enum Backend {
    Cpu(Cpu),
    Cuda(Cuda),
}

pub(crate) struct Inner {
    pub(crate) backend: Backend,
    pub(crate) arena: RefCell<Arena>,
    /// Whether an op holds slices of this device's memory right now.
    pub(crate) leased: Cell<bool>,
    poison: Cell<bool>,
    /// Streams that work beside the compute stream until they are joined, a bit each.
    beside: Cell<u8>,
    /// Streams that may use memory which was freed in them ([`Device::beside_since`]), a bit each.
    using: Cell<u8>,
    /// Whether this is a [meta device](crate::meta).
    pub(crate) meta: bool,
    /// See [`Device::assume_routing`].
    pub(crate) routing: RefCell<Option<Rc<Routing>>>,
    /// See [`Device::observe`].
    pub(crate) observer: RefCell<Option<Weak<dyn Observer>>>,
    /// Ops under way, each called by the one before.
    pub(crate) op_depth: Cell<u32>,
    /// Buffers so far.
    buffers: Cell<u64>,
    /// Whether the current stream has not waited for all that the compute stream was asked for, so that
    /// freed memory may still be in use there.
    ahead: Cell<bool>,
}

/// A device: memory and the ops on it. Clones are handles on the same device.
#[derive(Clone)]
pub struct Device(pub(crate) Rc<Inner>);

impl Device {
    /// The CPU, its ops running on at most `threads` threads (at least one).
    pub fn cpu(threads: usize) -> Self {
        Self::on(Backend::Cpu(Cpu::new(threads, false)))
    }

    /// The GPU of this number, which the driver counts from 0; weights and activations are stored in
    /// `dtype`: f32 or bf16.
    ///
    /// # Panics
    /// When `dtype` is another.
    pub fn cuda(index: usize, dtype: Dtype) -> Result<Self, DeviceError> {
        let gpu = Gpu::open(index)?;
        Ok(Self::on_platform(Rc::new(gpu), dtype))
    }

    /// How many GPUs [`Device::cuda`] can open; the error says why none.
    pub fn cuda_count() -> Result<usize, DeviceError> {
        crate::cuda::gpu::count()
    }

    /// A CPU that shares even the smallest work among its threads: slower, and for tests of what that
    /// must not change.
    pub fn cpu_sharing_all(threads: usize) -> Self {
        Self::on(Backend::Cpu(Cpu::new(threads, true)))
    }

    /// A CUDA device on a machine of the caller's making; weights and activations are stored in
    /// `dtype`: f32 or bf16.
    ///
    /// # Panics
    /// When `dtype` is another.
    pub fn on_platform(platform: Rc<dyn Platform>, dtype: Dtype) -> Self {
        Self::on(Backend::Cuda(Cuda::new(platform, dtype)))
    }

    pub(crate) fn on(backend: Backend) -> Self {
        Self::of(backend, false)
    }

    /// A [meta device](crate::meta).
    pub(crate) fn without_memory(backend: Backend) -> Self {
        Self::of(backend, true)
    }

    fn of(backend: Backend, meta: bool) -> Self {
        Self(Rc::new(Inner {
            backend,
            meta,
            routing: RefCell::default(),
            observer: RefCell::default(),
            op_depth: Cell::new(0),
            buffers: Cell::new(0),
            arena: RefCell::new(Arena::default()),
            leased: Cell::new(false),
            poison: Cell::new(cfg!(debug_assertions) && !meta),
            beside: Cell::new(0),
            using: Cell::new(0),
            ahead: Cell::new(false),
        }))
    }

    /// The kind of device, as on the command line.
    pub fn name(&self) -> &'static str {
        match self.0.backend {
            Backend::Cpu(_) => "cpu",
            Backend::Cuda(_) => "cuda",
        }
    }

    /// Threads of this machine that an op runs on.
    pub fn threads(&self) -> usize {
        match &self.0.backend {
            Backend::Cpu(cpu) => cpu.threads(),
            Backend::Cuda(_) => 1,
        }
    }

    /// Whether ops are queued and done later, rather than done when they return.
    pub fn is_queued(&self) -> bool {
        matches!(self.0.backend, Backend::Cuda(_))
    }

    /// What weights and activations are stored in; f32 on the CPU.
    pub fn dtype(&self) -> Dtype {
        match &self.0.backend {
            Backend::Cpu(_) => Dtype::F32,
            Backend::Cuda(gpu) => gpu.dtype(),
        }
    }

    /// What the device is, where it is not the CPU.
    pub fn properties(&self) -> Option<&Properties> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(gpu) => Some(gpu.properties()),
        }
    }

    /// Whether the products of experts ([`crate::grouped_gemm`]) are the vendor's library's from now on,
    /// where it does them: bf16 whose rows start at multiples of 16 bytes, in a version that is trusted
    /// with it. What comes back is whether there is such a library; without one nothing changes.
    ///
    /// Off from the start: the kernels of this crate do them, until a measurement on the device says
    /// that the library is faster (`moefold gpu-check` takes both).
    pub fn prefer_library(&self, prefer: bool) -> bool {
        match &self.0.backend {
            Backend::Cpu(_) => false,
            Backend::Cuda(gpu) => gpu.prefer_library(prefer),
        }
    }

    /// Grouped products that the vendor's library did so far.
    pub(crate) fn library_products(&self) -> u64 {
        match &self.0.backend {
            Backend::Cpu(_) => 0,
            Backend::Cuda(gpu) => gpu.library_products(),
        }
    }

    /// Whether what [`Device::empty`] returns is filled with NaN (f32) or -1 (i32) from now on, so
    /// that an op that leaves a part of its output unwritten is found out. On from the start where
    /// debug assertions are.
    pub fn poison(&self, on: bool) {
        self.0.poison.set(on);
    }

    /// The account: bytes alive and peaks, by class.
    pub fn memory(&self) -> Memory {
        self.0.arena.borrow().memory
    }

    /// Free bytes of the GPU's memory and all of them, whoever holds the rest; none where the device is
    /// not a GPU.
    pub fn memory_info(&self) -> Option<(Bytes, Bytes)> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(gpu) => gpu.memory_info(),
        }
    }

    /// What of the GPU's memory is taken beside tensors; none where the device is not a GPU.
    pub fn overhead(&self) -> Option<Overhead> {
        match &self.0.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(gpu) => gpu.overhead(),
        }
    }

    /// Peaks start again from what is alive now.
    pub fn reset_peak(&self) {
        self.0.arena.borrow_mut().memory.reset_peak();
    }

    /// Takes so much memory from the device up front, in one piece less what was taken before, so that
    /// tensors which fit into it never wait for the system again. The CPU, whose memory the system
    /// hands out page by page, takes none.
    ///
    /// The error says how much there is.
    pub fn reserve(&self, bytes: Bytes) -> Result<(), DeviceError> {
        match &self.0.backend {
            Backend::Cpu(_) => Ok(()),
            Backend::Cuda(gpu) => {
                let reserved = self.0.arena.borrow_mut().reserve(gpu, bytes);
                reserved.map_err(|error| error.during("reserve"))
            }
        }
    }

    /// Bytes taken from the system and not given back: those of tensors, and those kept for reuse.
    pub fn reserved(&self) -> Bytes {
        self.0.arena.borrow().reserved()
    }

    /// Bytes of them that tensors ever reached into: the peak with the holes that lay between tensors,
    /// and so what [`Device::reserve`] would have had to take.
    pub fn extent(&self) -> Bytes {
        self.0.arena.borrow().extent()
    }

    /// Bytes of them that are free for reuse.
    pub fn cached(&self) -> Bytes {
        self.0.arena.borrow().cached()
    }

    /// How often memory was taken from the system so far, because none that was free would do
    /// ([`Device::reserve`] is one time). Steps that ask for the same sizes take none after the first.
    /// On CUDA devices what was freed serves any size; on the CPU sizes that vary (rows routed to an
    /// expert) are rounded up to one of eight an octave, and take new memory until each of those few
    /// has been met.
    pub fn allocations(&self) -> u64 {
        self.0.arena.borrow().growths()
    }

    /// Gives memory that no tensor has a part of back to the system.
    pub fn trim(&self) {
        if let Backend::Cuda(gpu) = &self.0.backend {
            gpu.before_waiting("trim");
        }
        self.0.arena.borrow_mut().trim();
    }

    /// Waits until every op started on the device is done. Ops on the CPU are done when they
    /// return; a device with a stream drains it here, before a clock is read.
    pub fn synchronize(&self) {
        match self.0.backend {
            Backend::Cpu(_) => {}
            Backend::Cuda(ref gpu) => {
                gpu.synchronize();
                self.0.beside.set(0);
                self.0.using.set(0);
                self.0.arena.borrow_mut().release();
            }
        }
    }

    /// From now on `wait` is called before the host waits for the device, with a way to ask whether what
    /// it waits for is done: one stream where it reads a tensor, else all of them. It returns once that
    /// says yes, or ends the rank. For whoever has work of other machines in the streams, which may never
    /// come: the driver's own waits have no end. Nothing on the CPU.
    pub fn wait_by(&self, wait: impl Fn(&dyn Fn() -> bool) + 'static) {
        if let Backend::Cuda(gpu) = &self.0.backend {
            gpu.wait_by(Rc::new(wait));
        }
    }

    /// Whether everything that was asked of the device is done; does not wait.
    pub fn is_idle(&self) -> bool {
        match &self.0.backend {
            Backend::Cpu(_) => true,
            Backend::Cuda(gpu) => gpu.is_idle().unwrap_or_else(|error| error.raise()),
        }
    }

    /// Runs `body` with its ops on `stream` of the device: after everything asked for so far, and
    /// beside what is asked for next, until [`Device::join`]. On a device with one stream the ops are
    /// done when it returns. What `body` writes is not to be touched, nor what it reads written,
    /// before the join.
    ///
    /// # Panics
    /// Inside another such call.
    pub fn beside<R>(&self, stream: Stream, body: impl FnOnce() -> R) -> R {
        match &self.0.backend {
            Backend::Cpu(_) => body(),
            Backend::Cuda(gpu) => {
                let beside = &self.0.beside;
                beside.set(beside.get() | stream.bit());
                self.0.arena.borrow_mut().hold(true);
                gpu.beside(stream, body)
            }
        }
    }

    /// As [`Device::beside`], but only after `event`: what was asked for since then goes on beside it
    /// too. What `body` reads and writes has to live until the compute stream has waited for an event of
    /// its end ([`Device::wait_for`]), or the join.
    ///
    /// # Panics
    /// Inside another such call.
    pub fn beside_since<R>(&self, stream: Stream, event: &Event, body: impl FnOnce() -> R) -> R {
        struct Back<'a>(&'a Device, bool);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                self.0.0.arena.borrow_mut().hold(self.1);
                self.0.0.ahead.set(false);
            }
        }
        let Backend::Cuda(gpu) = &self.0.backend else {
            return body();
        };
        // What `body` itself frees may be in use until the join; the rest is the compute stream's.
        let arena = &self.0.arena;
        let held = arena.borrow().held();
        let result = {
            let _back = Back(self, arena.borrow_mut().hold(true));
            self.0.ahead.set(true);
            gpu.beside_since(stream, event, body)
        };
        if arena.borrow().held() > held {
            self.0.using.set(self.0.using.get() | stream.bit());
        }
        result
    }

    /// Lets what is asked for from now on see what `stream` was asked for.
    pub fn join(&self, stream: Stream) {
        let Backend::Cuda(gpu) = &self.0.backend else {
            return;
        };
        gpu.join(stream);
        let (beside, using) = (&self.0.beside, &self.0.using);
        beside.set(beside.get() & !stream.bit());
        using.set(using.get() & !stream.bit());
        let mut arena = self.0.arena.borrow_mut();
        if beside.get() | using.get() == 0 {
            arena.release();
        } else if beside.get() == 0 {
            arena.hold(false);
        }
    }

    /// How far the device has come with what it was asked for: a place in the stream that ops go to
    /// now, and its time. The time now on a device whose ops are done when they return.
    pub fn record_event(&self) -> Event {
        match &self.0.backend {
            Backend::Cpu(_) => Event::host(),
            Backend::Cuda(gpu) => gpu.record_event(),
        }
    }

    /// Lets what the current stream is asked for from now on wait for an event, of this device or of
    /// another rank's on the same GPU. The host does not wait.
    pub fn wait_for(&self, event: &Event) {
        match &self.0.backend {
            Backend::Cpu(_) => {}
            Backend::Cuda(gpu) => gpu.wait_for(event),
        }
    }

    /// How often the host has read the device's memory so far, and with that waited for it. 0 on the
    /// CPU, whose memory is the host's.
    pub fn host_reads(&self) -> u64 {
        match &self.0.backend {
            Backend::Cpu(_) => 0,
            Backend::Cuda(gpu) => gpu.downloads(),
        }
    }

    /// Seconds that `work` took the device: by its own clock where it has a stream and a clock.
    pub fn timed(&self, mut work: impl FnMut()) -> f64 {
        match &self.0.backend {
            Backend::Cpu(_) => {
                let start = Instant::now();
                work();
                start.elapsed().as_secs_f64()
            }
            Backend::Cuda(gpu) => gpu.timed(&mut work),
        }
    }

    /// A tensor of unspecified contents: the op that follows writes all of it.
    pub fn empty(&self, class: TensorClass, dtype: Dtype, dims: &[usize]) -> Tensor {
        let tensor = self.allocate((class, Side::Device), dtype, dims);
        if self.0.poison.get() {
            tensor.fill_poison();
            if let Backend::Cuda(gpu) = &self.0.backend {
                gpu.forget(&tensor);
            }
        }
        tensor
    }

    /// A tensor of unspecified contents in memory of the host, which only [`crate::transfer`] reads and
    /// writes. `class` is that of what it is a copy of.
    pub fn empty_on_host(&self, class: TensorClass, dtype: Dtype, dims: &[usize]) -> Tensor {
        self.allocate((class, Side::Host), dtype, dims)
    }

    /// A tensor of zeros.
    pub fn zeros(&self, class: TensorClass, dtype: Dtype, dims: &[usize]) -> Tensor {
        let tensor = self.allocate((class, Side::Device), dtype, dims);
        tensor.fill_zero();
        tensor
    }

    /// A tensor with these f32 values, row-major.
    pub fn from_f32(&self, class: TensorClass, values: &[f32], dims: &[usize]) -> Tensor {
        let tensor = self.allocate((class, Side::Device), Dtype::F32, dims);
        tensor.copy_from_f32(values);
        tensor
    }

    /// A tensor with these i32 values, row-major.
    pub fn from_i32(&self, class: TensorClass, values: &[i32], dims: &[usize]) -> Tensor {
        let tensor = self.allocate((class, Side::Device), Dtype::I32, dims);
        tensor.copy_from_i32(values);
        tensor
    }

    fn allocate(&self, (class, side): (TensorClass, Side), dtype: Dtype, dims: &[usize]) -> Tensor {
        // A CPU computes nothing in bf16, and stores it.
        let stored = matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::I32);
        assert!(stored, "{self:?} stores no {dtype}");
        let len = sizes::elements("empty", dims);
        let bytes = dtype.bytes(len as u64).0 as usize;
        let storage = self.storage(side, bytes);
        let storage = storage.unwrap_or_else(|error| error.raise());
        let memory = &mut self.0.arena.borrow_mut().memory;
        match side {
            Side::Device => memory.add(class, bytes as u64),
            Side::Host => memory.add_on_host(bytes as u64),
        }
        let id = self.0.buffers.get();
        self.0.buffers.set(id + 1);
        let buffer = Buffer::new(self.clone(), (class, side), bytes, id, storage);
        self.tell_allocated(buffer.allocation());
        let tensor = Tensor::whole(Rc::new(buffer), dtype, dims);
        if let Backend::Cuda(gpu) = &self.0.backend {
            gpu.forget(&tensor);
        }
        tensor
    }

    /// Memory for `bytes`, recycled where there is some.
    fn storage(&self, side: Side, bytes: usize) -> Result<Storage, DeviceError> {
        if self.0.meta {
            return Ok(Storage::Meta);
        }
        match &self.0.backend {
            Backend::Cpu(_) => Ok(self.0.arena.borrow_mut().take_pages(bytes)),
            Backend::Cuda(gpu) if side == Side::Host => {
                self.0.arena.borrow_mut().take_pinned(gpu, bytes)
            }
            Backend::Cuda(gpu) => {
                if self.0.ahead.replace(false) {
                    gpu.join(Stream::Compute);
                }
                self.0.arena.borrow_mut().take(gpu, bytes)
            }
        }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0.backend {
            Backend::Cpu(cpu) => write!(f, "cpu({} threads)", cpu.threads()),
            Backend::Cuda(gpu) => {
                let properties = gpu.properties();
                let (name, architecture) = (&properties.name, properties.architecture);
                write!(f, "cuda({name}, {architecture}, {})", gpu.dtype())
            }
        }
    }
}
