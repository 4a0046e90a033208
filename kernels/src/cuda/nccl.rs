//! Collectives between GPUs by NCCL: [`Nccl`] is the library, [`Comm`] one rank's end of a group.
//!
//! Communicators are non-blocking: a call that NCCL finishes in the background leaves its communicator
//! busy ([`Progress::Busy`]), and [`Comm::settle`] asks it until it is done, fails, or the caller has
//! waited enough. Nothing here knows a clock or other ranks; who loses patience aborts. Collectives go
//! to the communication stream of the device, after what was asked of its compute stream so far. Who uses
//! their results, writes what they read or lets go of either waits first for an event of that stream after
//! them ([`crate::Device::wait_for`]) or joins it ([`crate::Device::join`]).
//!
//! The functions stand in a table of our own. `cudarc` has bindings, and its own loader would look for
//! NCCL under names that pip's wheels do not use, panic where a symbol is missing, and drop the code of
//! an error; its safe layer has no split, no asynchronous errors and no configuration.
//!
//! # Why this is sound
//!
//! Functions are resolved with the signatures of `nccl.h` from a library that stays open. A
//! communicator's handle is owned by one [`Comm`], which ends it once, by destroying it after it was
//! finalized or else by aborting it, and then never passes it on again. Tensors are of the
//! communicator's device and as long as the counts say. They live until the wait above, which is
//! [`crate::Device::beside_since`]'s contract: memory that is let go of before is not held back, and a
//! collective would read or write another tensor's numbers in it. That is wrong and not unsound: device memory
//! is no memory of Rust's, and goes back to the driver only when all streams are done.
#![expect(unsafe_code, reason = "calls into NCCL; see the module documentation")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;

use crate::cuda::error::DeviceError;
use crate::cuda::libraries::{Version, gate};
use crate::cuda::table::table;

mod comm;
#[cfg(any(test, feature = "mocks"))]
pub mod mock;
#[cfg(test)]
mod tests;

pub use comm::{Comm, Group};

/// Results are numbers: see [`crate::cuda::table`]. The values are those of `ncclResult_t`.
type Code = c_uint;

const SUCCESS: Code = 0;
const IN_PROGRESS: Code = 7;

/// `ncclComm_t`.
type Raw = *mut c_void;

/// `cudaStream_t`, which is a `CUstream`.
type RawStream = *mut c_void;

table! {
    /// What is called of NCCL.
    Functions {
        ncclGetErrorString: fn(Code) -> *const c_char;
        ncclGetUniqueId: fn(*mut UniqueId) -> Code;
        ncclCommInitRankConfig: fn(*mut Raw, c_int, UniqueId, c_int, *mut Config) -> Code;
        ncclCommSplit: fn(Raw, c_int, c_int, *mut Raw, *mut Config) -> Code;
        ncclCommGetAsyncError: fn(Raw, *mut Code) -> Code;
        ncclCommFinalize: fn(Raw) -> Code;
        ncclCommDestroy: fn(Raw) -> Code;
        ncclCommAbort: fn(Raw) -> Code;
        ncclGroupStart: fn() -> Code;
        ncclGroupEnd: fn() -> Code;
        ncclAllReduce: fn(
            *const c_void, *mut c_void, usize, c_uint, c_uint, Raw, RawStream,
        ) -> Code;
        ncclReduceScatter: fn(
            *const c_void, *mut c_void, usize, c_uint, c_uint, Raw, RawStream,
        ) -> Code;
        ncclAllGather: fn(*const c_void, *mut c_void, usize, c_uint, Raw, RawStream) -> Code;
        ncclBroadcast: fn(*const c_void, *mut c_void, usize, c_uint, c_int, Raw, RawStream) -> Code;
        ncclSend: fn(*const c_void, usize, c_uint, c_int, Raw, RawStream) -> Code;
        ncclRecv: fn(*mut c_void, usize, c_uint, c_int, Raw, RawStream) -> Code;
    }
    optional {
        ncclGetLastError: fn(Raw) -> *const c_char;
        ncclAlltoAll: fn(*const c_void, *mut c_void, usize, c_uint, Raw, RawStream) -> Code;
    }
}

/// How elements of several ranks become one: the values of `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum, in an order of NCCL's choice: the same for the same group and size.
    Sum = 0,
    /// Their maximum.
    Max = 2,
}

/// How far NCCL is with what it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a busy communicator takes no other call"]
pub enum Progress {
    /// Done, as far as the host is concerned: work for the device is on its stream.
    Done,
    /// Going on in the background; [`Comm::settle`] comes before any other call.
    Busy,
}

/// Bytes of a [`UniqueId`]: `NCCL_UNIQUE_ID_BYTES`.
pub const UNIQUE_ID_BYTES: usize = 128;

/// What the ranks of a new communicator find each other by: made by one, handed to all.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId([u8; UNIQUE_ID_BYTES]);

impl UniqueId {
    /// To be carried to the other ranks.
    pub fn to_bytes(self) -> [u8; UNIQUE_ID_BYTES] {
        self.0
    }

    /// As it was carried.
    pub fn from_bytes(bytes: [u8; UNIQUE_ID_BYTES]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId")
    }
}

/// `ncclConfig_t` as NCCL 2.18 declares it (`ncclConfig_v21700` of its `nccl.h`, with `splitShare`).
///
/// A configuration says how long it is and for which version it was written, and every later NCCL
/// takes the fields it has and gives the rest their defaults (`parseCommConfig` in NCCL's `init.cc`).
/// So one layout serves all versions that are accepted. Where 2.18 has padding at the end, 2.25 and
/// later have `trafficClass`: it is a field here, and undefined.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

const _: () = assert!(
    size_of::<Config>() == 48,
    "the layout of NCCL 2.18 on 64 bits"
);

impl Config {
    /// Calls return before they are done, and groups that are split off share the parent's buffers.
    fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: 1,
            traffic_class: UNDEFINED,
        }
    }

    /// The same of a group that shares no buffers with the communicator that it is split off.
    fn apart(self) -> Self {
        Self {
            split_share: 0,
            ..self
        }
    }
}

/// The library, found and complete.
#[derive(Clone, Copy)]
pub struct Nccl {
    functions: Functions,
    version: Version,
}

impl Nccl {
    /// That of this machine; the error says what is missing and how to get it.
    pub fn open() -> Result<Self, DeviceError> {
        let token = gate::Nccl::get().map_err(|unusable| {
            let call = "ncclGetVersion";
            DeviceError::new(call, format!("{unusable}; {}", unusable.remedy))
        })?;
        let found = token.library();
        // SAFETY: the library is NCCL and stays open.
        unsafe { Self::new(|symbol| found.symbol(symbol), token.version()) }
    }

    /// The library in which `find` looks functions up.
    ///
    /// # Safety
    /// The library is NCCL and stays open.
    unsafe fn new(
        find: impl Fn(&str) -> Option<*const c_void>,
        version: Version,
    ) -> Result<Self, DeviceError> {
        // SAFETY: the signatures are those of `nccl.h`, the rest is the caller's.
        let functions = unsafe { Functions::resolve(find) }.map_err(|symbol| {
            DeviceError::new("dlsym", format!("the NCCL {version} found has no {symbol}"))
        })?;
        Ok(Self { functions, version })
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Whether it has an all-to-all of its own, see [`Comm::all_to_all_even`].
    pub fn has_all_to_all(&self) -> bool {
        self.functions.ncclAlltoAll.is_some()
    }

    /// A new id. Whoever makes it listens for the other ranks, so it is made by rank 0.
    pub fn unique_id(&self) -> Result<UniqueId, DeviceError> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: a place of that size to write to.
        let code = unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) };
        let _ = self.check("ncclGetUniqueId", code, || "a new communicator".to_owned())?;
        Ok(id)
    }

    /// What a result means. `doing` says what was being done.
    fn check(
        &self,
        call: &'static str,
        code: Code,
        doing: impl FnOnce() -> String,
    ) -> Result<Progress, DeviceError> {
        match code {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::Busy),
            code => {
                let mut error = DeviceError::new(call, doing());
                // SAFETY: takes a number; gives a constant of the library.
                let name = text(unsafe { (self.functions.ncclGetErrorString)(code) });
                error.code = Some((i64::from(code), name));
                if let Some(said) = self.last_error() {
                    error.detail = format!("{}; NCCL says: {said}", error.detail);
                }
                Err(error)
            }
        }
    }

    /// What NCCL last wrote down about a failure of this process.
    fn last_error(&self) -> Option<String> {
        let last = self.functions.ncclGetLastError?;
        // SAFETY: the argument is unused and may be null, by the documentation; the text is copied
        // at once.
        let said = text(unsafe { last(ptr::null_mut()) });
        let said = said.trim();
        (!said.is_empty()).then(|| said.to_owned())
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {}", self.version)
    }
}

/// A text of the library's, ended by a zero; empty where there is none.
fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null; NCCL's texts are constants or buffers that end with a zero.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}
