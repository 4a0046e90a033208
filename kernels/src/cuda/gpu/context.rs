//! A device's context, and what lives in it: streams, events, pinned memory.
#![expect(
    unsafe_code,
    reason = "calls into the driver; see the documentation of `gpu`"
)]

use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUevent, CUevent_flags, CUstream, CUstream_flags,
};
use moefold_profiles::units::Bytes;

use super::driver::{Code, Driver, NOT_READY};
use crate::cuda::error::DeviceError;
use crate::cuda::platform::Properties;
use crate::cuda::program::Architecture;
use crate::event;

thread_local! {
    /// The context that this thread's calls go to.
    static CURRENT: Cell<CUcontext> = const { Cell::new(ptr::null_mut()) };
}

/// What the process has of one context's memory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usage {
    /// Bytes taken on the device when the context was there and nothing in it.
    pub(super) at_first: u64,
    /// Those of them that were taken before the context was there, where anybody says.
    pub(super) others: Option<u64>,
    /// Bytes allocated in it, workspaces among them.
    pub(super) allocated: u64,
    /// Bytes of workspaces.
    pub(super) workspaces: u64,
    /// Times that the context is retained.
    holders: usize,
    /// Whose it is.
    device: Option<Place>,
}

/// A device, by its number in the driver at an address.
type Place = (usize, CUdevice);

/// Memory in use of the device at a PCI address, by anyone, where there is telling without a context.
pub(super) type Used = fn(&str) -> Option<Bytes>;

/// By context: threads that open a GPU share its context.
static USAGE: Mutex<BTreeMap<usize, Usage>> = Mutex::new(BTreeMap::new());

/// A call into the driver, checked: `call!(driver, cuMemFree_v2(address), "what for")`.
macro_rules! call {
    ($driver:expr, $symbol:ident($($arg:expr),* $(,)?), $($doing:tt)+) => {{
        let driver: &$crate::cuda::gpu::driver::Driver = $driver;
        let code = (driver.$symbol)($($arg),*);
        driver.check(stringify!($symbol), code, || format!($($doing)+))
    }};
}
pub(super) use call;

/// The device's primary context, which all libraries of the process share, retained until drop.
pub(super) struct Context {
    pub(super) driver: Arc<Driver>,
    device: CUdevice,
    raw: CUcontext,
}

// SAFETY: a context may be used from every thread of the process, and the driver's functions from
// several at once (CUDA programming guide, "Driver API"); what is current is kept a thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The context of the device of this number, made current.
    pub(super) fn retain(
        driver: Arc<Driver>,
        used: Used,
        index: usize,
    ) -> Result<Arc<Self>, DeviceError> {
        let count = count(&driver)?;
        if index >= count {
            return Err(DeviceError::new(
                "cuDeviceGet",
                format!("there is no GPU {index}: {count} found, numbered from 0"),
            ));
        }
        let (mut device, mut raw) = (0, ptr::null_mut());
        // SAFETY: a place to write to.
        unsafe {
            call!(
                &driver,
                cuDeviceGet(&raw mut device, index as c_int),
                "GPU {index}"
            )?;
        }
        // Measured by who comes first, before and after, while nobody else can allocate.
        let mut all = lock(&USAGE);
        let place = (driver.cuDevicePrimaryCtxRetain as usize, device);
        let first = all.values().all(|usage| usage.device != Some(place));
        let pci = if first { pci(&driver, device) } else { None };
        let used = || pci.as_deref().and_then(used);
        let before = used();
        // SAFETY: a place to write to.
        unsafe {
            call!(
                &driver,
                cuDevicePrimaryCtxRetain(&raw mut raw, device),
                "GPU {index}: another process may hold it alone (compute mode), or its memory is full"
            )?;
        }
        let context = Arc::new(Self {
            driver,
            device,
            raw,
        });
        // What this thread had may have ended on another: the last hold is let go of anywhere.
        CURRENT.set(ptr::null_mut());
        let usage = all.entry(context.number()).or_default();
        usage.holders += 1;
        usage.device = Some(place);
        if let Err(error) = context.enter() {
            // A context that is let go of takes the lock itself.
            drop(all);
            return Err(error);
        }
        if first {
            let (free, total) = context.memory();
            let at_first = total.0 - free.0;
            // NVML counts what the driver does not, so its numbers are compared with each other alone.
            let own = before.zip(used());
            let own = own.map(|(before, after)| after.0.saturating_sub(before.0));
            let usage = all.entry(context.number()).or_default();
            usage.at_first = at_first;
            usage.others = own.map(|own| at_first.saturating_sub(own));
        }
        drop(all);
        Ok(context)
    }

    /// Its handle, as a number: the same in all threads that retain it, and no other GPU's.
    pub(super) fn number(&self) -> usize {
        self.raw as usize
    }

    /// Makes the context this thread's.
    pub(super) fn enter(&self) -> Result<(), DeviceError> {
        if CURRENT.get() == self.raw {
            return Ok(());
        }
        // SAFETY: the context is retained.
        unsafe {
            call!(&self.driver, cuCtxSetCurrent(self.raw), "switching GPUs")?;
        };
        CURRENT.set(self.raw);
        Ok(())
    }

    /// What the device is.
    pub(super) fn properties(&self) -> Result<Properties, DeviceError> {
        use CUdevice_attribute as Attribute;
        let mut name = [0_u8; 128];
        let mut memory = 0;
        // SAFETY: a buffer of the length said, and a place to write to.
        unsafe {
            call!(
                &self.driver,
                cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, self.device),
                "what the GPU is"
            )?;
            call!(
                &self.driver,
                cuDeviceTotalMem_v2(&raw mut memory, self.device),
                "what the GPU has"
            )?;
        }
        let length = name.iter().position(|&byte| byte == 0);
        let architecture = Architecture {
            major: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        };
        Ok(Properties {
            name: String::from_utf8_lossy(&name[..length.unwrap_or(name.len())]).into_owned(),
            architecture,
            multiprocessors: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory: Bytes(memory as u64),
            shared_per_block: Bytes(u64::from(
                self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            )),
            l2: Bytes(u64::from(
                self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            )),
        })
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> Result<u32, DeviceError> {
        let mut value = 0;
        // SAFETY: a place to write to.
        unsafe {
            call!(
                &self.driver,
                cuDeviceGetAttribute(&raw mut value, attribute as c_uint, self.device),
                "{attribute:?}"
            )?;
        }
        Ok(value.unsigned_abs())
    }

    /// Reads or changes what the process knows of the context's memory.
    pub(super) fn usage<R>(&self, with: impl FnOnce(&mut Usage) -> R) -> R {
        with(lock(&USAGE).entry(self.number()).or_default())
    }

    /// Free bytes of device memory, and all of them.
    pub(super) fn memory_info(&self) -> Result<(Bytes, Bytes), DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: places to write to.
        unsafe {
            call!(
                &self.driver,
                cuMemGetInfo_v2(&raw mut free, &raw mut total),
                "what memory is free"
            )?;
        }
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }

    /// Free bytes of device memory, and all of them; zeros where the driver does not say.
    pub(super) fn memory(&self) -> (Bytes, Bytes) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: places to write to.
        unsafe { (self.driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        (Bytes(free as u64), Bytes(total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if CURRENT.get() == self.raw {
            CURRENT.set(ptr::null_mut());
            // SAFETY: no context is a valid one to have.
            unsafe { (self.driver.cuCtxSetCurrent)(ptr::null_mut()) };
        }
        let mut all = lock(&USAGE);
        if let Some(usage) = all.get_mut(&self.number()) {
            usage.holders -= 1;
            if usage.holders == 0 {
                all.remove(&self.number());
            }
        }
        drop(all);
        // SAFETY: retained once, released here alone.
        unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// Where a device sits, which is how NVML knows it; none where the driver does not say.
fn pci(driver: &Driver, device: CUdevice) -> Option<String> {
    let (get, mut text) = (driver.cuDeviceGetPCIBusId?, [0_u8; 64]);
    // SAFETY: a buffer of the length said.
    let code = unsafe { get(text.as_mut_ptr().cast(), text.len() as c_int, device) };
    let text = CStr::from_bytes_until_nul(&text).ok()?;
    (code == 0).then(|| text.to_string_lossy().into_owned())
}

/// GPUs there are.
pub(super) fn count(driver: &Driver) -> Result<usize, DeviceError> {
    let mut count = 0;
    // SAFETY: a place to write to.
    unsafe { call!(driver, cuDeviceGetCount(&raw mut count), "counting GPUs")? };
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Work in order.
pub(super) struct CudaStream {
    context: Arc<Context>,
    pub(super) raw: CUstream,
}

impl CudaStream {
    /// A stream that does not wait for the default one.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let mut raw = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: a place to write to.
        unsafe {
            call!(
                &context.driver,
                cuStreamCreate(&raw mut raw, flags),
                "a stream"
            )?;
        };
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    /// Lets its later work wait for a point in another stream's, as last recorded.
    pub(super) fn wait(&self, event: &CudaEvent) -> Result<(), DeviceError> {
        // SAFETY: both are alive.
        unsafe {
            call!(
                &self.context.driver,
                cuStreamWaitEvent(self.raw, event.raw, 0),
                "ordering two streams"
            )
        }
    }

    /// Whether all of its work is done.
    pub(super) fn is_idle(&self) -> Result<bool, DeviceError> {
        let driver = &self.context.driver;
        // SAFETY: the stream is alive.
        let code = unsafe { (driver.cuStreamQuery)(self.raw) };
        reached(driver, "cuStreamQuery", code)
    }

    /// Waits until all of its work is done.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is alive.
        unsafe {
            call!(
                &self.context.driver,
                cuStreamSynchronize(self.raw),
                "waiting for the GPU"
            )
        }
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed here alone; the driver finishes what is queued.
        unsafe { (self.context.driver.cuStreamDestroy_v2)(self.raw) };
    }
}

/// What the driver answers to whether something is done.
fn reached(driver: &Driver, call: &'static str, code: Code) -> Result<bool, DeviceError> {
    if code == NOT_READY {
        return Ok(false);
    }
    driver.check(call, code, || "asking the GPU".to_owned())?;
    Ok(true)
}

/// A point in a stream's work.
pub(super) struct CudaEvent {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: an event is a handle that the driver takes from every thread of the process, its functions
// from several at once; it is destroyed when nobody else holds it.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// A point to wait for.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Self::of(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// A point whose time is noted.
    pub(super) fn timed(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Self::of(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn of(context: &Arc<Context>, flags: CUevent_flags) -> Result<Self, DeviceError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe {
            call!(
                &context.driver,
                cuEventCreate(&raw mut raw, flags as c_uint),
                "an event"
            )?;
        }
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    /// Seconds from `start` to this point. Both have been reached, and note their time.
    pub(super) fn seconds_since(&self, start: &Self) -> Result<f64, DeviceError> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive; a place to write to.
        unsafe {
            call!(
                &self.context.driver,
                cuEventElapsedTime(&raw mut milliseconds, start.raw, self.raw),
                "reading the GPU's clock"
            )?;
        }
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Puts the point after what is queued on `stream` now.
    pub(super) fn record(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        // SAFETY: both are alive.
        unsafe {
            call!(
                &self.context.driver,
                cuEventRecord(self.raw, stream.raw),
                "marking a place in the stream"
            )
        }
    }

    /// Waits until the point is reached; returns at once where it was never recorded.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the event is alive.
        unsafe {
            call!(
                &self.context.driver,
                cuEventSynchronize(self.raw),
                "waiting for a place in the stream"
            )
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // Perhaps on another thread than it was made on.
        let _ = self.context.enter();
        // SAFETY: made once, destroyed here alone.
        unsafe { (self.context.driver.cuEventDestroy_v2)(self.raw) };
    }
}

/// Events that note their time, kept for reuse: a step marks thousands of places.
pub(super) struct Marks {
    context: Arc<Context>,
    idle: Mutex<Vec<CudaEvent>>,
}

/// A point that was recorded once. Its event is used again when it is dropped, on any thread: what
/// was told to wait for it by then waits for the point, not for the event's next use.
pub(super) struct Mark {
    /// Leaves on drop alone.
    event: Option<CudaEvent>,
    home: Arc<Marks>,
}

impl Marks {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            idle: Mutex::default(),
        })
    }

    /// The point after what is queued on `stream` now.
    pub(super) fn record(self: &Arc<Self>, stream: &CudaStream) -> Result<Mark, DeviceError> {
        let idle = lock(&self.idle).pop();
        let event = match idle {
            Some(event) => event,
            None => CudaEvent::timed(&self.context)?,
        };
        event.record(stream)?;
        Ok(Mark {
            event: Some(event),
            home: Arc::clone(self),
        })
    }
}

impl Mark {
    pub(super) fn event(&self) -> &CudaEvent {
        self.event.as_ref().expect("the event leaves on drop alone")
    }
}

impl event::Mark for Mark {
    fn machine(&self) -> &'static str {
        "a GPU"
    }

    fn is_reached(&self) -> Result<bool, DeviceError> {
        let context = &self.home.context;
        context.enter()?;
        // SAFETY: the event is alive.
        let code = unsafe { (context.driver.cuEventQuery)(self.event().raw) };
        reached(&context.driver, "cuEventQuery", code)
    }

    fn seconds_since(&self, earlier: &dyn event::Mark) -> Option<Result<f64, DeviceError>> {
        let earlier = (earlier as &dyn Any).downcast_ref::<Self>()?;
        let entered = self.home.context.enter();
        Some(entered.and_then(|()| self.event().seconds_since(earlier.event())))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        lock(&self.home.idle).extend(self.event.take());
    }
}

/// Nothing panics while one is held.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Host memory that the copy engines read by themselves.
pub(super) struct Pinned {
    context: Arc<Context>,
    base: *mut c_void,
    bytes: usize,
}

impl Pinned {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, DeviceError> {
        let mut base = ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe {
            call!(
                &context.driver,
                cuMemHostAlloc(&raw mut base, bytes, 0),
                "{bytes} bytes of pinned host memory; `ulimit -l` may forbid them"
            )?;
        }
        Ok(Self {
            context: Arc::clone(context),
            base,
            bytes,
        })
    }

    /// Copies `bytes` in at `offset` and gives the address of the first.
    ///
    /// # Panics
    /// When they do not fit.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) -> *const c_void {
        assert!(
            offset + bytes.len() <= self.bytes,
            "writing past the end of pinned memory"
        );
        // SAFETY: inside the memory; the source is a live slice of other memory.
        unsafe {
            let place = self.base.cast::<u8>().add(offset);
            ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len());
            place.cast_const().cast()
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed here alone; `Gpu` waits for its stream before.
        unsafe { (self.context.driver.cuMemFreeHost)(self.base) };
    }
}
