//! [`Platform`]: what the ops need of the machine below them. For who makes such a machine
//! ([`crate::Device::on_platform`]); ops and their callers have no use for it.
//!
//! Two implement it: the driver of a GPU, and the emulator that tests use. Work is ordered within a
//! [`Stream`]: what is asked later sees what was asked before. Everything goes to the compute stream
//! unless [`Platform::switch`] says otherwise. Failures of work that is still queued
//! may come with a later call.

use std::any::Any;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;

use crate::cuda::error::DeviceError;
use crate::cuda::program::{Architecture, Arg, EncodedMap, Grid, Program, TensorMap};
use crate::event::Event;

/// An address in device memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// Where nothing is.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// The vendor's name of it.
    pub name: String,
    /// Its generation.
    pub architecture: Architecture,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Device memory in all.
    pub memory: Bytes,
    /// Shared memory that one block may ask for.
    pub shared_per_block: Bytes,
    /// Level-two cache.
    pub l2: Bytes,
}

impl Properties {
    /// Those of a GPU of which only the generation is known, as far as memory is concerned.
    pub fn assumed(architecture: Architecture) -> Self {
        Self {
            name: architecture.to_string(),
            architecture,
            multiprocessors: 132,
            memory: Bytes::ZERO,
            shared_per_block: architecture.shared_per_block(),
            l2: Bytes::ZERO,
        }
    }
}

/// Memory of a GPU beside the tensors on it, over all that the process has open there: several ranks on
/// one GPU share it and see the same. What is taken of the GPU is the sum of these and of the tensors'
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overhead {
    /// Taken by opening the GPU, before anything was allocated: the CUDA context and what the driver
    /// reserves for it.
    pub context: Bytes,
    /// What libraries were given to work in.
    pub workspaces: Bytes,
    /// Taken since by other means: code of kernels and what they spill, memory that libraries allocate
    /// themselves, what allocations are rounded up by, and whatever other processes took.
    pub other: Bytes,
    /// Taken already when the GPU was opened, by other processes and the driver, and so in none of the
    /// above. The driver tells memory only to who has a context, so that is what NVML says was taken more
    /// after the GPU was opened than before. Absent where there is no NVML: `context` has it then.
    pub others: Option<Bytes>,
}

/// A loaded program, known by the number its platform gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module(pub usize);

/// A kernel to run. Arguments are the kernel's parameters in order.
pub struct Launch<'a> {
    /// The program that has it.
    pub module: Module,
    /// Its name.
    pub entry: &'static str,
    /// How many threads run it.
    pub grid: Grid,
    /// Its arguments.
    pub args: &'a [Arg],
}

/// A matrix of a dense product: row-major, `row_stride` elements from row to row.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// Its first element.
    pub address: Address,
    /// Of its elements.
    pub dtype: Dtype,
    /// Elements from row to row.
    pub row_stride: usize,
    /// Whether the product reads its transpose.
    pub transposed: bool,
}

/// `C[m,n] = op(A)[m,k] op(B)[k,n] + bias[n] + beta C`, accumulated in f32.
#[derive(Debug, Clone, Copy)]
pub struct Dense {
    /// Whose product it is.
    pub op: &'static str,
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// What is summed over.
    pub k: usize,
    /// A, stored as `[m,k]`, or as `[k,m]` where it is transposed.
    pub a: Matrix,
    /// B, stored as `[k,n]`, or as `[n,k]` where it is transposed.
    pub b: Matrix,
    /// C.
    pub c: Matrix,
    /// Of C's dtype.
    pub bias: Option<Address>,
    /// What C's own values count.
    pub beta: f32,
}

/// `C_g = op(A_g) op(B_g) + beta C_g` for every group, accumulated in f32: matrices whose addresses and
/// sizes lie on the device.
#[derive(Debug, Clone, Copy)]
pub struct Grouped {
    /// Whose product it is.
    pub op: &'static str,
    /// How many groups there are.
    pub groups: usize,
    /// An array of `groups` 64-bit numbers for each [`Field`], one behind the other.
    pub tables: Address,
    /// m, n and k of a group on average, about.
    pub average: [usize; 3],
    /// Of A and of B.
    pub transposed: [bool; 2],
    /// Of A and B.
    pub input: Dtype,
    /// Of C.
    pub output: Dtype,
    /// What C's own values count.
    pub beta: f32,
}

impl Grouped {
    /// Where the array of a field starts.
    pub fn array(&self, field: Field) -> Address {
        self.tables
            .offset((field as usize * self.groups * 8) as u64)
    }
}

/// What is known of a group on the device: addresses of its matrices, sizes, and elements from row to
/// row, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// Address of A.
    A,
    /// Address of B.
    B,
    /// Address of C.
    C,
    /// Rows of C.
    M,
    /// Columns of C.
    N,
    /// What is summed over.
    K,
    /// Elements from row to row of A.
    PitchA,
    /// Elements from row to row of B.
    PitchB,
    /// Elements from row to row of C.
    PitchC,
}

impl Field {
    /// How many there are.
    pub const COUNT: usize = 9;
}

/// Which way bytes go between a device and its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
}

/// A stream of a device. Work of one is done in order, works of several beside each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stream {
    /// What ops run on.
    Compute,
    /// Collectives, and messages that are received.
    Communication,
    /// Copies to and from the host.
    Copies,
    /// Messages that are sent: one that waits for its receiver holds up no collective.
    Sends,
    /// Collectives over ranks that hold the same weights: they hold up no others.
    Replicas,
    /// Tokens on their way to experts and back: those of one microbatch hold up no other collectives of another.
    Tokens,
}

impl Stream {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Compute,
        Self::Communication,
        Self::Copies,
        Self::Sends,
        Self::Replicas,
        Self::Tokens,
    ];

    /// A bit of its own, in sets of them.
    pub(crate) fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Memory of one rank that others on the same device may read: what they need to know of it besides
/// its address. Only machines of the kind that lent it know what that is.
#[derive(Clone)]
pub struct Lent(Arc<dyn Any + Send + Sync>);

impl Lent {
    /// What a machine has others of its kind know.
    pub fn new(known: impl Any + Send + Sync) -> Self {
        Self(Arc::new(known))
    }

    /// The same, where a machine of the kind that knows `T` lent it.
    pub fn known<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

/// The machine below the ops.
pub trait Platform {
    /// What the device is.
    fn properties(&self) -> &Properties;

    /// Whether several tensors may lie in one piece of its memory, side by side. A machine that watches
    /// the bounds of every tensor wants each in a piece of its own.
    fn divides(&self) -> bool {
        false
    }

    /// Whether kernels run. Those of a machine where they do not are neither loaded nor launched.
    fn runs(&self) -> bool {
        true
    }

    /// Memory aligned to 256 bytes, its contents undefined.
    fn allocate(&self, bytes: u64) -> Result<Address, DeviceError>;

    /// Takes back what [`Platform::allocate`] gave. Work already asked for may still use it.
    fn free(&self, address: Address, bytes: u64);

    /// Memory of the host that streams copy to and from beside the host's own work (pinned), its contents
    /// undefined. A machine whose memory is the host's has no other.
    fn allocate_host(&self, bytes: u64) -> Result<Address, DeviceError> {
        self.allocate(bytes)
    }

    /// Takes back what [`Platform::allocate_host`] gave. Work already asked for may still use it.
    fn free_host(&self, address: Address, bytes: u64) {
        self.free(address, bytes);
    }

    /// Copies bytes between the device and memory of [`Platform::allocate_host`], in the current stream; the
    /// host does not wait.
    fn transfer(
        &self,
        src: Address,
        dst: Address,
        bytes: u64,
        _direction: Direction,
    ) -> Result<(), DeviceError> {
        self.copy(src, dst, bytes)
    }

    /// Copies host bytes to the device; `bytes` may be reused on return.
    fn upload(&self, dst: Address, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies device bytes to the host and waits for them.
    fn download(&self, src: Address, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies device bytes to the device. The ranges do not overlap.
    fn copy(&self, src: Address, dst: Address, bytes: u64) -> Result<(), DeviceError>;

    /// Sets every byte.
    fn fill(&self, dst: Address, byte: u8, bytes: u64) -> Result<(), DeviceError>;

    /// Says that the contents of a range mean nothing any more: recycled memory given out again. A
    /// machine that can tell a read of it from others reports one.
    fn forget(&self, dst: Address, bytes: u64);

    /// Says that a range is given back, and may be part of another tensor of any size from here on. A
    /// machine that knows which streams still use it reports that.
    fn give(&self, _address: Address, _bytes: u64) {}

    /// Compiles and loads a program for this device.
    fn load(&self, program: &Program) -> Result<Module, DeviceError>;

    /// Runs a kernel.
    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// The tensor map as this device's kernels read it.
    fn encode(&self, map: &TensorMap) -> Result<EncodedMap, DeviceError>;

    /// Runs a dense product by the vendor's library; false where there is none, or none that does
    /// this one.
    fn dense(&self, product: &Dense) -> Result<bool, DeviceError>;

    /// Whether the vendor's library does products of groups that only the device knows.
    fn has_grouped(&self) -> bool {
        false
    }

    /// Runs them by the vendor's library; false where it has none, or none that does these.
    fn grouped(&self, _product: &Grouped) -> Result<bool, DeviceError> {
        Ok(false)
    }

    /// Sends what is asked from now on to `stream`; the stream before. A machine that does everything
    /// at once has one stream.
    fn switch(&self, _queue: Stream) -> Stream {
        Stream::Compute
    }

    /// Lets what is asked from now on wait for what `stream` was asked so far.
    fn after(&self, _queue: Stream) -> Result<(), DeviceError> {
        Ok(())
    }

    /// How far the current stream's work has come.
    fn record_event(&self) -> Result<Event, DeviceError> {
        Ok(Event::host())
    }

    /// Lets what the current stream is asked from now on wait for an event, which may be another
    /// platform's on the same device. The host does not wait.
    fn wait_for(&self, _moment: &Event) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Free bytes of device memory and all of them; none where there is no telling.
    fn memory_info(&self) -> Result<Option<(Bytes, Bytes)>, DeviceError> {
        Ok(None)
    }

    /// What is taken beside tensors; none where there is no telling.
    fn overhead(&self) -> Result<Option<Overhead>, DeviceError> {
        Ok(None)
    }

    /// Lets other ranks on this device read a range of its memory.
    fn lend(&self, address: Address, bytes: u64) -> Result<Lent, DeviceError>;

    /// Makes what another rank lent readable, until [`Platform::disown`].
    fn adopt(&self, lent: &Lent) -> Result<(), DeviceError>;

    /// Lets go of a range adopted, by an address in it.
    fn disown(&self, address: Address);

    /// Waits for all work of all streams.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Whether all work of all streams is done; does not wait.
    fn is_idle(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }

    /// The stream that work goes to now as the vendor's other libraries know it (`CUstream`), ready to
    /// be used on this thread; null on a machine that does everything at once.
    fn raw_stream(&self) -> Result<*mut c_void, DeviceError> {
        Ok(ptr::null_mut())
    }

    /// Says that another library was asked to read a range, in the current stream.
    fn read(&self, _src: Address, _bytes: u64) {}

    /// Says that another library was asked to write a range. A machine that can tell reads of what
    /// nobody wrote counts it as written.
    fn wrote(&self, _dst: Address, _bytes: u64) {}

    /// Seconds that `work` took the device, by the clock of the device where it has one.
    fn timed(&self, work: &mut dyn FnMut()) -> Result<f64, DeviceError> {
        self.synchronize()?;
        let start = Instant::now();
        work();
        self.synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    }
}
