//! [`Comm`]: one rank's end of a group of GPUs.
#![expect(
    unsafe_code,
    reason = "calls into NCCL; see the documentation of `nccl`"
)]

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicPtr, Ordering};

use moefold_profiles::Dtype;

use super::{Code, Config, IN_PROGRESS, Nccl, Progress, Raw, RawStream, Reduce, UniqueId};
use crate::cuda::error::DeviceError;
use crate::cuda::{Cuda, Stream};
use crate::device::{Backend, Device};
use crate::sizes;
use crate::tensor::Tensor;

/// `NCCL_SPLIT_NOCOLOR`: takes part in a split and is in no group of it.
const NO_COLOUR: c_int = -1;

/// One rank's end of a group. The members make the same calls in the same order; their ranks in the
/// group are numbers from 0. Dropped without having been finalized, it is aborted.
pub struct Comm {
    nccl: Nccl,
    raw: Raw,
    state: Cell<State>,
    rank: usize,
    size: usize,
    device: Device,
    /// Where its work goes.
    stream: Stream,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Alive,
    Finalized,
    Gone,
}

impl Comm {
    /// Joins the communicator of `id` as number `rank` of `size`, with a GPU of its own. `pause` is
    /// called while the others are waited for; its error ends the waiting.
    pub fn join<E: From<DeviceError>>(
        nccl: Nccl,
        device: &Device,
        id: UniqueId,
        rank: usize,
        size: usize,
        pause: &mut impl FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        assert!(rank < size, "rank {rank} of {size}");
        enter(device)?;
        let mut config = Config::non_blocking();
        let place = place();
        let (ranks, number) = (size as c_int, rank as c_int);
        // SAFETY: a place to write to for good, and one to read from during the call.
        let code = unsafe {
            (nccl.functions.ncclCommInitRankConfig)(
                place.as_ptr(),
                ranks,
                id,
                number,
                &raw mut config,
            )
        };
        let doing = || format!("joining as rank {rank} of {size}");
        let begun = nccl.check("ncclCommInitRankConfig", code, doing);
        // What there is of it by now is ended where this fails.
        let comm = || Self::of(nccl, place.load(Ordering::Acquire), rank, size, device);
        if let Err(error) = begun {
            drop(comm());
            return Err(error.into());
        }
        while place.load(Ordering::Acquire).is_null() {
            pause()?;
        }
        let comm = comm();
        comm.settle(pause)?;
        Ok(comm)
    }

    fn of(nccl: Nccl, raw: Raw, rank: usize, size: usize, device: &Device) -> Self {
        Self {
            nccl,
            raw,
            state: Cell::new(if raw.is_null() {
                State::Gone
            } else {
                State::Alive
            }),
            rank,
            size,
            device: device.clone(),
            stream: Stream::Communication,
        }
    }

    /// The same, whose work goes to another stream than [`Stream::Communication`].
    #[must_use]
    pub fn on(mut self, stream: Stream) -> Self {
        self.stream = stream;
        self
    }

    /// The stream that its work goes to.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// Divides the members into groups by colour, ordered by key. Every member calls it; one without
    /// a colour gets nothing. `size` is that of the caller's group, `rank` its place there and key. A group
    /// whose work goes to another stream than this communicator's shares no buffers with it: what shares them is
    /// done one after the other.
    pub fn split<E: From<DeviceError>>(
        &self,
        colour: Option<u32>,
        rank: usize,
        size: usize,
        stream: Stream,
        pause: &mut impl FnMut() -> Result<(), E>,
    ) -> Result<Option<Self>, E> {
        self.alive("ncclCommSplit")?;
        enter(&self.device)?;
        let place = place();
        let key = rank as c_int;
        let number = colour.map_or(NO_COLOUR, u32::cast_signed);
        let mut apart = Config::non_blocking().apart();
        let config = if stream == self.stream {
            ptr::null_mut()
        } else {
            &raw mut apart
        };
        // SAFETY: this communicator is alive, the place is for good; a configuration to read from during the
        // call, or none, and the group has the parent's.
        let code = unsafe {
            let split = self.nccl.functions.ncclCommSplit;
            split(self.raw, number, key, place.as_ptr(), config)
        };
        let doing = || format!("a group of {size} out of {}", self.size);
        let begun = self.nccl.check("ncclCommSplit", code, doing);
        let split = begun.map_err(E::from).and_then(|_| self.settle(pause));
        let raw = place.load(Ordering::Acquire);
        if let Err(error) = split {
            // What there is of it by now is ended.
            drop(Self::of(self.nccl, raw, rank, size, &self.device));
            return Err(error);
        }
        if colour.is_none() {
            return Ok(None);
        }
        if raw.is_null() {
            let why = format!("{}, and NCCL gave no communicator", doing());
            return Err(DeviceError::new("ncclCommSplit", why).into());
        }
        let group = Self::of(self.nccl, raw, rank, size, &self.device).on(stream);
        group.settle(pause)?;
        Ok(Some(group))
    }

    /// The caller's number in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Members.
    pub fn size(&self) -> usize {
        self.size
    }

    /// How far NCCL is; the error is that of the communicator, from whatever went wrong with it since.
    pub fn progress(&self) -> Result<Progress, DeviceError> {
        const CALL: &str = "ncclCommGetAsyncError";
        self.alive(CALL)?;
        let mut state = IN_PROGRESS;
        // SAFETY: this communicator is alive; a place to write to.
        let code = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(self.raw, &raw mut state) };
        let doing = || format!("a communicator of {} ranks", self.size);
        let _ = self.nccl.check(CALL, code, doing)?;
        self.nccl.check(CALL, state, doing)
    }

    /// Asks until NCCL is no longer busy, with `pause` in between.
    pub fn settle<E: From<DeviceError>>(
        &self,
        pause: &mut impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        while self.progress()? == Progress::Busy {
            pause()?;
        }
        Ok(())
    }

    /// `tensor` becomes its reduction over the members.
    pub fn all_reduce(&self, tensor: &Tensor, reduce: Reduce) -> Result<Progress, DeviceError> {
        self.run("ncclAllReduce", tensor, tensor, |functions, stream| {
            let (src, dst) = (src_of(tensor), dst_of(tensor));
            let (count, dtype) = (tensor.len(), code_of(tensor));
            // SAFETY: see the documentation of `nccl`.
            unsafe {
                (functions.ncclAllReduce)(
                    src,
                    dst,
                    count,
                    dtype,
                    reduce as c_uint,
                    self.raw,
                    stream,
                )
            }
        })
    }

    /// `dst` becomes this member's shard of the sum of all `src`, which are `size` times as long.
    pub fn reduce_scatter(&self, src: &Tensor, dst: &Tensor) -> Result<Progress, DeviceError> {
        let all = sizes::elements("reduce_scatter", &[dst.len(), self.size]);
        assert_eq!(src.len(), all, "reduce_scatter: lengths");
        self.run("ncclReduceScatter", src, dst, |functions, stream| {
            let (from, to) = (src_of(src), dst_of(dst));
            let sum = Reduce::Sum as c_uint;
            // SAFETY: as above.
            unsafe {
                (functions.ncclReduceScatter)(
                    from,
                    to,
                    dst.len(),
                    code_of(dst),
                    sum,
                    self.raw,
                    stream,
                )
            }
        })
    }

    /// `dst` becomes all members' `src`, in their order.
    pub fn all_gather(&self, src: &Tensor, dst: &Tensor) -> Result<Progress, DeviceError> {
        let all = sizes::elements("all_gather", &[src.len(), self.size]);
        assert_eq!(all, dst.len(), "all_gather: lengths");
        self.run("ncclAllGather", src, dst, |functions, stream| {
            let (from, to) = (src_of(src), dst_of(dst));
            // SAFETY: as above.
            unsafe {
                (functions.ncclAllGather)(from, to, src.len(), code_of(src), self.raw, stream)
            }
        })
    }

    /// `tensor` becomes that of member `root`.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Progress, DeviceError> {
        assert!(root < self.size, "broadcast from {root} of {}", self.size);
        self.run("ncclBroadcast", tensor, tensor, |functions, stream| {
            let (src, dst) = (src_of(tensor), dst_of(tensor));
            let (count, dtype) = (tensor.len(), code_of(tensor));
            // SAFETY: as above.
            unsafe {
                (functions.ncclBroadcast)(src, dst, count, dtype, root as c_int, self.raw, stream)
            }
        })
    }

    /// Sends all of `tensor` to a member, which receives as much.
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<Progress, DeviceError> {
        self.grouped(|group| group.send(tensor, to))
    }

    /// Receives all of `tensor` from a member, which sends as much.
    pub fn receive(&self, tensor: &Tensor, from: usize) -> Result<Progress, DeviceError> {
        self.grouped(|group| group.receive(tensor, from))
    }

    /// Rows of `src`, ordered by receiver, become rows of `dst`, ordered by sender: grouped sends and
    /// receives. What one member sends another is what that one receives from it.
    pub fn all_to_all(
        &self,
        src: &Tensor,
        send_rows: &[usize],
        dst: &Tensor,
        recv_rows: &[usize],
    ) -> Result<Progress, DeviceError> {
        assert_eq!(send_rows.len(), self.size, "all_to_all: rows sent");
        assert_eq!(recv_rows.len(), self.size, "all_to_all: rows received");
        self.grouped(|group| {
            let (mut sent, mut received) = (0, 0);
            for (member, (&send, &receive)) in send_rows.iter().zip(recv_rows).enumerate() {
                group.send(&src.rows(sent..sent + send), member)?;
                group.receive(&dst.rows(received..received + receive), member)?;
                (sent, received) = (sent + send, received + receive);
            }
            Ok(())
        })
    }

    /// All-to-all where every member sends every other as much: by NCCL's own where it has one, else
    /// grouped. Whether the parts are equal has to be known to all members, since the two do not meet;
    /// one's own counts do not tell.
    pub fn all_to_all_even(&self, src: &Tensor, dst: &Tensor) -> Result<Progress, DeviceError> {
        assert_eq!(src.len(), dst.len(), "all_to_all: lengths");
        assert_eq!(src.len() % self.size, 0, "all_to_all: equal parts");
        let part = src.len() / self.size;
        if part == 0 {
            return Ok(Progress::Done);
        }
        let Some(all_to_all) = self.nccl.functions.ncclAlltoAll else {
            let rows = vec![part; self.size];
            let (src, dst) = (src.reshape(&[src.len()]), dst.reshape(&[dst.len()]));
            return self.all_to_all(&src, &rows, &dst, &rows);
        };
        self.run("ncclAlltoAll", src, dst, |_, stream| {
            let (from, to) = (src_of(src), dst_of(dst));
            // SAFETY: as above.
            unsafe { all_to_all(from, to, part, code_of(src), self.raw, stream) }
        })
    }

    /// Sends `src` to the next member of a ring of all, and receives `dst` from the one before.
    pub fn shift(&self, src: &Tensor, dst: &Tensor) -> Result<Progress, DeviceError> {
        self.grouped(|group| {
            group.send(src, (self.rank + 1) % self.size)?;
            group.receive(dst, (self.rank + self.size - 1) % self.size)
        })
    }

    /// Sends and receives that go together: none of them waits for another.
    pub fn grouped(
        &self,
        body: impl FnOnce(&Group<'_>) -> Result<(), DeviceError>,
    ) -> Result<Progress, DeviceError> {
        self.alive("ncclGroupStart")?;
        self.on_stream(|stream| {
            let functions = &self.nccl.functions;
            let doing = || format!("sends and receives among {} ranks", self.size);
            // SAFETY: takes nothing.
            let code = unsafe { (functions.ncclGroupStart)() };
            let _ = self.nccl.check("ncclGroupStart", code, doing)?;
            let asked = body(&Group { comm: self, stream });
            // Ended whatever came of it: the library counts.
            // SAFETY: takes nothing.
            let code = unsafe { (functions.ncclGroupEnd)() };
            let ended = self.nccl.check("ncclGroupEnd", code, doing);
            asked.and(ended)
        })
    }

    /// Begins the orderly end: what is queued is finished first. The communicator takes no other call
    /// once this has settled, and is destroyed when it drops.
    pub fn finalize<E: From<DeviceError>>(
        &self,
        pause: &mut impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        const CALL: &str = "ncclCommFinalize";
        self.alive(CALL)?;
        enter(&self.device)?;
        // SAFETY: this communicator is alive.
        let code = unsafe { (self.nccl.functions.ncclCommFinalize)(self.raw) };
        let doing = || format!("ending a communicator of {} ranks", self.size);
        let _ = self.nccl.check(CALL, code, doing)?;
        self.settle(pause)?;
        self.state.set(State::Finalized);
        Ok(())
    }

    /// Ends the communicator at once and with it the kernels that wait for other ranks; later calls
    /// are errors. Nothing can be done about a failure of it.
    pub fn abort(&self) {
        if self.state.replace(State::Gone) == State::Gone {
            return;
        }
        let _ = enter(&self.device);
        // SAFETY: ended once, here or on drop.
        unsafe { (self.nccl.functions.ncclCommAbort)(self.raw) };
    }

    /// Whether [`Comm::abort`] was called.
    pub fn is_aborted(&self) -> bool {
        self.state.get() == State::Gone
    }

    fn alive(&self, call: &'static str) -> Result<(), DeviceError> {
        match self.state.get() {
            State::Alive => Ok(()),
            State::Finalized => Err(DeviceError::new(call, "the communicator was finalized")),
            State::Gone => Err(DeviceError::new(call, "the communicator was aborted")),
        }
    }

    /// Queues one collective that reads `src` and writes `dst`.
    fn run(
        &self,
        call: &'static str,
        src: &Tensor,
        dst: &Tensor,
        work: impl FnOnce(&super::Functions, RawStream) -> Code,
    ) -> Result<Progress, DeviceError> {
        self.alive(call)?;
        self.expect_own(src);
        self.expect_own(dst);
        assert_eq!(src.dtype(), dst.dtype(), "{call}: types differ");
        self.on_stream(|stream| {
            let code = work(&self.nccl.functions, stream);
            let doing = || format!("{src:?} among {} ranks", self.size);
            let progress = self.nccl.check(call, code, doing)?;
            gpu(&self.device).read(src);
            gpu(&self.device).wrote(dst);
            Ok(progress)
        })
    }

    /// Runs `body` with the communicator's stream, which waits for the compute stream so far. The caller keeps
    /// the tensors until the compute stream has waited in turn.
    fn on_stream<R>(
        &self,
        body: impl FnOnce(RawStream) -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let device = &self.device;
        device.beside_since(self.stream, &device.record_event(), || {
            let stream = gpu(device).raw_stream()?;
            body(stream)
        })
    }

    #[track_caller]
    fn expect_own(&self, tensor: &Tensor) {
        assert!(
            Rc::ptr_eq(&tensor.device().0, &self.device.0),
            "a collective of {:?} on {tensor:?} of another device",
            self.device
        );
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        match self.state.get() {
            State::Gone => {}
            State::Alive => self.abort(),
            State::Finalized => {
                let _ = enter(&self.device);
                // SAFETY: ended once, here; finalized before.
                unsafe { (self.nccl.functions.ncclCommDestroy)(self.raw) };
            }
        }
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm({} of {})", self.rank, self.size)
    }
}

/// Sends and receives between [`Comm::grouped`]'s start and end.
pub struct Group<'a> {
    comm: &'a Comm,
    stream: RawStream,
}

impl Group<'_> {
    /// Sends all of `tensor` to a member.
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<(), DeviceError> {
        self.ask("ncclSend", tensor, to, |functions, raw| {
            let (src, count, dtype) = (src_of(tensor), tensor.len(), code_of(tensor));
            // SAFETY: see the documentation of `nccl`.
            unsafe { (functions.ncclSend)(src, count, dtype, to as c_int, raw, self.stream) }
        })?;
        gpu(&self.comm.device).read(tensor);
        Ok(())
    }

    /// Receives all of `tensor` from a member.
    pub fn receive(&self, tensor: &Tensor, from: usize) -> Result<(), DeviceError> {
        self.ask("ncclRecv", tensor, from, |functions, raw| {
            let (dst, count, dtype) = (dst_of(tensor), tensor.len(), code_of(tensor));
            // SAFETY: as above.
            unsafe { (functions.ncclRecv)(dst, count, dtype, from as c_int, raw, self.stream) }
        })?;
        gpu(&self.comm.device).wrote(tensor);
        Ok(())
    }

    /// Nothing is not sent; the receiver knows as well that there is nothing.
    fn ask(
        &self,
        call: &'static str,
        tensor: &Tensor,
        peer: usize,
        work: impl FnOnce(&super::Functions, Raw) -> Code,
    ) -> Result<(), DeviceError> {
        let comm = self.comm;
        comm.expect_own(tensor);
        assert!(peer < comm.size, "{call}: member {peer} of {}", comm.size);
        if tensor.is_empty() {
            return Ok(());
        }
        let code = work(&comm.nccl.functions, comm.raw);
        let doing = || format!("{tensor:?} between ranks {} and {peer}", comm.rank);
        // Begun and ended with the group.
        comm.nccl.check(call, code, doing).map(drop)
    }
}

/// Where NCCL writes a handle. It does so from a thread of its own, and even after the caller gave up, so
/// a place is never freed; there are as many as communicators.
fn place() -> &'static AtomicPtr<c_void> {
    Box::leak(Box::new(AtomicPtr::new(ptr::null_mut())))
}

/// The CUDA half of a communicator's device.
fn gpu(device: &Device) -> &Cuda {
    match &device.0.backend {
        Backend::Cuda(gpu) => gpu,
        Backend::Cpu(_) => panic!("NCCL moves memory of GPUs, not of {device:?}"),
    }
}

/// Makes the device's context current on this thread, as NCCL expects.
fn enter(device: &Device) -> Result<(), DeviceError> {
    gpu(device).raw_stream().map(drop)
}

fn src_of(tensor: &Tensor) -> *const c_void {
    tensor.address().0 as *const c_void
}

fn dst_of(tensor: &Tensor) -> *mut c_void {
    tensor.address().0 as *mut c_void
}

/// The values of `ncclDataType_t`.
fn code_of(tensor: &Tensor) -> c_uint {
    match tensor.dtype() {
        Dtype::I32 => 2,
        Dtype::F32 => 7,
        Dtype::Bf16 => 9,
        other => panic!("no tensor of {other} travels"),
    }
}
