//! The CUDA backend: a platform, the programs loaded on it, and the door through which ops launch.
//!
//! An op's CUDA half computes a grid and hands a kernel of its `.cu` file to [`Cuda::launch`]. What
//! runs it is behind [`platform::Platform`]: the driver of a GPU, or in tests the emulator, which
//! runs the same source on the CPU. So an op is one piece of code on both, host side and device
//! side.
//!
//! What is deliberately absent: streams and events in the interface of ops (they queue on the
//! compute stream), and results (see [`error`] for how failures travel).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;

use crate::cuda::error::DeviceError;
use crate::cuda::platform::{Address, Dense, Direction, Grouped, Launch, Lent, Module, Platform};
use crate::cuda::program::{Arg, Grid, Program, TensorMap};
use crate::event::Event;
use crate::tensor::Tensor;

pub(crate) mod cache;
pub(crate) mod compiler;
mod cublaslt;
pub mod error;
pub(crate) mod flat;
pub(crate) mod gpu;
pub mod libraries;
pub mod model;
pub mod nccl;
pub mod nvrtc;
pub(crate) mod operand;
pub mod platform;
pub mod prelude;
pub mod program;
pub mod survey;
mod table;

pub use platform::{Overhead, Properties, Stream};
pub use program::Architecture;

/// A CUDA device as the ops see it.
pub(crate) struct Cuda {
    platform: Rc<dyn Platform>,
    dtype: Dtype,
    modules: RefCell<HashMap<Program, Module>>,
    /// Copies to the host so far.
    downloads: Cell<u64>,
    prefers_library: Cell<bool>,
    library_products: Cell<u64>,
    wait: RefCell<Option<Rc<Wait>>>,
}

/// Asks again and again whether what the host waits for is done; see [`crate::Device::wait_by`].
type Wait = dyn Fn(&dyn Fn() -> bool);

impl Cuda {
    /// A device whose weights and activations are `dtype`.
    ///
    /// # Panics
    /// When that is neither f32 nor bf16.
    pub(crate) fn new(platform: Rc<dyn Platform>, dtype: Dtype) -> Self {
        assert!(
            matches!(dtype, Dtype::F32 | Dtype::Bf16),
            "a CUDA device computes in f32 or bf16, got {dtype}"
        );
        Self {
            platform,
            dtype,
            modules: RefCell::default(),
            downloads: Cell::new(0),
            prefers_library: Cell::new(false),
            library_products: Cell::new(0),
            wait: RefCell::default(),
        }
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn properties(&self) -> &Properties {
        self.platform.properties()
    }

    pub(crate) fn architecture(&self) -> Architecture {
        self.properties().architecture
    }

    pub(crate) fn multiprocessors(&self) -> u32 {
        self.properties().multiprocessors
    }

    /// Runs a kernel of `program`; nothing happens on an empty grid.
    pub(crate) fn launch(
        &self,
        op: &'static str,
        program: &Program,
        entry: &'static str,
        grid: Grid,
        args: &[Arg],
    ) {
        if grid.is_empty() || !self.platform.runs() {
            return;
        }
        let launch = || {
            let module = self.module(program)?;
            self.platform.launch(&Launch {
                module,
                entry,
                grid,
                args,
            })
        };
        done(op, launch());
    }

    fn module(&self, program: &Program) -> Result<Module, DeviceError> {
        if let Some(&module) = self.modules.borrow().get(program) {
            return Ok(module);
        }
        let module = self.platform.load(program)?;
        self.modules.borrow_mut().insert(program.clone(), module);
        Ok(module)
    }

    /// A tensor map as an argument; on a device that launches nothing, any.
    pub(crate) fn tensor_map(&self, op: &'static str, map: impl FnOnce() -> TensorMap) -> Arg {
        if !self.platform.runs() {
            return Arg::I32(0);
        }
        Arg::Map(done(op, self.platform.encode(&map())))
    }

    /// A dense product by the vendor's library; false where it has to be done otherwise.
    pub(crate) fn dense(&self, product: &Dense) -> bool {
        done(product.op, self.platform.dense(product))
    }

    /// See [`crate::Device::prefer_library`].
    pub(crate) fn prefer_library(&self, prefer: bool) -> bool {
        self.prefers_library
            .set(prefer && self.platform.has_grouped());
        self.prefers_library.get()
    }

    pub(crate) fn prefers_library(&self) -> bool {
        self.prefers_library.get()
    }

    /// Products of groups by the vendor's library; false where they have to be done otherwise.
    pub(crate) fn grouped(&self, product: &Grouped) -> bool {
        let did = done(product.op, self.platform.grouped(product));
        let count = self.library_products.get();
        self.library_products.set(count + u64::from(did));
        did
    }

    /// Products of groups that the vendor's library did so far.
    pub(crate) fn library_products(&self) -> u64 {
        self.library_products.get()
    }

    pub(crate) fn upload(&self, op: &'static str, dst: &Tensor, bytes: &[u8]) {
        done(op, self.platform.upload(dst.address(), bytes));
    }

    /// Copies the bytes of `src` to the host, which waits for them.
    pub(crate) fn download(&self, op: &'static str, src: &Tensor, bytes: &mut [u8]) {
        self.downloads.set(self.downloads.get() + 1);
        self.before_reading(op);
        done(op, self.platform.download(src.address(), bytes));
    }

    /// Copies all bytes of `src` over those of `dst`, of the same size and dtype.
    pub(crate) fn copy(&self, op: &'static str, src: &Tensor, dst: &Tensor) {
        let bytes = src.bytes().0;
        done(op, self.platform.copy(src.address(), dst.address(), bytes));
    }

    /// Copies all bytes of `src` over those of `dst`, one of which is in memory of the host.
    pub(crate) fn transfer(&self, src: &Tensor, dst: &Tensor, direction: Direction) {
        let (from, to, bytes) = (src.address(), dst.address(), src.bytes().0);
        done(
            "transfer",
            self.platform.transfer(from, to, bytes, direction),
        );
    }

    pub(crate) fn fill_bytes(&self, op: &'static str, dst: &Tensor, byte: u8) {
        done(op, self.platform.fill(dst.address(), byte, dst.bytes().0));
    }

    /// See [`Platform::forget`].
    pub(crate) fn forget(&self, dst: &Tensor) {
        self.platform.forget(dst.address(), dst.bytes().0);
    }

    /// Runs `body` with its work on `stream`, after everything asked for so far.
    ///
    /// # Panics
    /// Inside another such call.
    pub(crate) fn beside<R>(&self, stream: Stream, body: impl FnOnce() -> R) -> R {
        self.on_stream(stream, |platform| platform.after(Stream::Compute), body)
    }

    /// Runs `body` with its work on `stream`, after `event`.
    ///
    /// # Panics
    /// Inside another such call.
    pub(crate) fn beside_since<R>(
        &self,
        stream: Stream,
        event: &Event,
        body: impl FnOnce() -> R,
    ) -> R {
        self.on_stream(stream, |platform| platform.wait_for(event), body)
    }

    fn on_stream<R>(
        &self,
        stream: Stream,
        ordered: impl FnOnce(&dyn Platform) -> Result<(), DeviceError>,
        body: impl FnOnce() -> R,
    ) -> R {
        struct Back<'a>(&'a dyn Platform, Stream);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                self.0.switch(self.1);
            }
        }
        let back = Back(&*self.platform, self.platform.switch(stream));
        assert!(back.1 == Stream::Compute, "beside: called inside another");
        done("beside", ordered(&*self.platform));
        body()
    }

    /// Lets what is asked from now on wait for what `stream` was asked.
    pub(crate) fn join(&self, stream: Stream) {
        done("join", self.platform.after(stream));
    }

    /// How often [`Cuda::download`] was called.
    pub(crate) fn downloads(&self) -> u64 {
        self.downloads.get()
    }

    pub(crate) fn record_event(&self) -> Event {
        done("record_event", self.platform.record_event())
    }

    pub(crate) fn wait_for(&self, event: &Event) {
        done("wait_for", self.platform.wait_for(event));
    }

    pub(crate) fn synchronize(&self) {
        self.before_waiting("synchronize");
        done("synchronize", self.platform.synchronize());
    }

    /// See [`Platform::raw_stream`].
    pub(crate) fn raw_stream(&self) -> Result<*mut c_void, DeviceError> {
        self.platform.raw_stream()
    }

    /// See [`crate::Device::wait_by`].
    pub(crate) fn wait_by(&self, wait: Rc<Wait>) {
        self.wait.replace(Some(wait));
    }

    /// Before the host waits for all streams.
    pub(crate) fn before_waiting(&self, op: &'static str) {
        let wait = self.wait.borrow().clone();
        if let Some(wait) = wait {
            wait(&|| done(op, self.platform.is_idle()));
        }
    }

    /// Before the host waits for the current stream: what others still do is nothing to it.
    fn before_reading(&self, op: &'static str) {
        let wait = self.wait.borrow().clone();
        if let Some(wait) = wait {
            let asked = done(op, self.platform.record_event());
            wait(&|| done(op, asked.reached()));
        }
    }

    /// See [`Platform::is_idle`].
    pub(crate) fn is_idle(&self) -> Result<bool, DeviceError> {
        self.platform.is_idle()
    }

    /// See [`Platform::read`].
    pub(crate) fn read(&self, src: &Tensor) {
        self.platform.read(src.address(), src.bytes().0);
    }

    /// See [`Platform::wrote`].
    pub(crate) fn wrote(&self, dst: &Tensor) {
        self.platform.wrote(dst.address(), dst.bytes().0);
    }

    pub(crate) fn timed(&self, work: &mut dyn FnMut()) -> f64 {
        done("timed", self.platform.timed(work))
    }

    pub(crate) fn memory_info(&self) -> Option<(Bytes, Bytes)> {
        done("memory_info", self.platform.memory_info())
    }

    pub(crate) fn overhead(&self) -> Option<Overhead> {
        done("overhead", self.platform.overhead())
    }

    /// See [`Platform::lend`].
    pub(crate) fn lend(&self, src: &Tensor) -> Lent {
        let lent = self.platform.lend(src.address(), src.bytes().0);
        done("offer", lent)
    }

    /// Another rank's memory, until it is dropped.
    pub(crate) fn adopt(&self, address: Address, lent: &Lent) -> Adopted {
        done("accept", self.platform.adopt(lent));
        Adopted {
            address,
            platform: Rc::clone(&self.platform),
        }
    }

    /// See [`Platform::divides`].
    pub(crate) fn divides(&self) -> bool {
        self.platform.divides()
    }

    /// Pinned memory of the host, of at least `bytes`.
    pub(crate) fn allocate_host(&self, bytes: u64) -> Result<Pinned, DeviceError> {
        Ok(Pinned {
            address: self.platform.allocate_host(bytes)?,
            bytes,
            platform: Rc::clone(&self.platform),
        })
    }

    /// Memory of at least `bytes`.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<Allocation, DeviceError> {
        Ok(Allocation {
            address: self.platform.allocate(bytes)?,
            bytes,
            platform: Rc::clone(&self.platform),
        })
    }
}

/// The value, or the failure on its way to whoever started the rank.
fn done<T>(op: &'static str, outcome: Result<T, DeviceError>) -> T {
    outcome.unwrap_or_else(|error| error.during(op).raise())
}

/// Device memory of another rank, let go of on drop.
pub(crate) struct Adopted {
    address: Address,
    platform: Rc<dyn Platform>,
}

impl Adopted {
    pub(crate) fn address(&self) -> Address {
        self.address
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        self.platform.disown(self.address);
    }
}

/// Pinned memory of the host, given back on drop.
pub(crate) struct Pinned {
    address: Address,
    bytes: u64,
    platform: Rc<dyn Platform>,
}

impl Pinned {
    pub(crate) fn address(&self) -> Address {
        self.address
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.platform.free_host(self.address, self.bytes);
    }
}

/// Device memory, given back on drop.
pub(crate) struct Allocation {
    address: Address,
    bytes: u64,
    platform: Rc<dyn Platform>,
}

impl Allocation {
    pub(crate) fn address(&self) -> Address {
        self.address
    }

    /// See [`Platform::give`]; of its first `bytes`.
    pub(crate) fn give(&self, bytes: u64) {
        self.platform.give(self.address, bytes);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.platform.free(self.address, self.bytes);
    }
}
