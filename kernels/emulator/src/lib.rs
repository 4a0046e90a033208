//! [`Emulator`]: a platform that runs the kernels of CUDA on the CPU, to test them where no GPU is. For
//! tests alone: no build of the program has it.
//!
//! The same `.cu` that NVRTC compiles for a GPU is compiled by the C++ compiler into a shared library
//! (`compile`). There `prelude/host.cuh` takes the place of `prelude/gpu.cuh`: every instruction of the
//! hardware is a call (`abi`) into a model of it in Rust. The model is `machine` with its parts `access`,
//! `sync`, `copies`, `mbarrier` and `tensor_core`; pure tables are in `matrix` and `tensor_map`. A thread
//! of a block is a fiber (`launch`). Which one runs next, when a bulk copy happens, in which order blocks come and
//! how often an event is not reached yet is thrown from a seed: what no instruction orders is met in
//! many orders.
//!
//! Every load and store is seen, because kernels are compiled with the hooks of the compiler's thread
//! sanitizer, which this crate provides itself. So it reports, by kernel, block, thread and line:
//!
//! - reads of uninitialized shared or global memory, accesses out of bounds, misaligned ones;
//! - data races inside a block and between blocks (by happens-before, so mostly whatever the order of this
//!   run);
//! - plain writes that a bulk copy or wgmma reads without `fence_async` (in device memory, touches without
//!   `fence_async_global`);
//! - registers and shared memory touched while an operation on them is in flight;
//! - misused barriers, divergent collectives and deadlocks.
//!
//! The memory model is the documented one, not what hardware happens to do: shuffles order nothing, atomics
//! order only with fences.
//!
//! Work is done when it is asked for, and yet streams are held to waiting for each other. Every launch,
//! copy, fill, recycled tensor and the like is an event of its stream, with what that stream knows to be
//! over (`streams`). Every block of memory remembers who used which bytes last, over all ranks that know it
//! (`history`). Two uses race where one of them writes and neither stream waits for the other. A race is
//! reported with both pieces of work, both streams and ranks, and the bytes, whatever the order in which
//! they were done here. Memory given back counts as written, for the next tensor may be anywhere in it.
//! ([`LostWait`] leaves out one wait of a device, to see that it is missed.)
//!
//! # What it cannot show
//!
//! It knows the hardware from its manual (`model.cu` has what a GPU must confirm: swizzles, fragments,
//! descriptors). It computes `ex2.approx` exactly, sums tensor-core products in f32 one after another and
//! contracts no `a * b + c`. It takes no notice of `setmaxnreg`, clusters, L1 and L2, register
//! pressure and time. Blocks run one at a time, so one that waits for another deadlocks here even
//! where a GPU holds both. Of the readers of a place since its last write it remembers two. A race
//! through local memory is not looked for. Between kernels only their streams are: what hosts tell each
//! other orders nothing, so who relied on that would be reported. Work is done when it is asked for,
//! so what goes wrong where a wait is missing is reported and not seen. A wait for what never comes is no
//! deadlock. A rank that unwinds or ends is not held to waiting for what it lets go of. What a library other
//! than ours reads and writes is what its caller says. Accumulators of a wgmma are watched; A operands in
//! registers are taken when it is issued, for the compiler of a GPU gives each its own.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::io::Write as _;
use std::rc::Rc;
use std::sync::{Once, PoisonError, RwLockReadGuard, RwLockWriteGuard};
use std::thread;

use moefold_kernels::cuda::error::DeviceError;
use moefold_kernels::cuda::platform::{
    Address, Dense, Launch, Lent, Module, Platform, Properties, Stream,
};
use moefold_kernels::cuda::program::{Architecture, Arg, EncodedMap, Program, TensorMap};
use moefold_kernels::programs::expect_listed;
use moefold_kernels::{Device, Dtype, Event};
use moefold_profiles::units::Bytes;

use crate::compile::Library;
use crate::fault::Fault;
use crate::machine::{Machine, Setup};
use crate::memory::Memory;
use crate::random::Random;
use crate::streams::{Mark, Streams};

mod abi;
mod access;
mod clock;
mod compile;
mod copies;
mod fault;
mod history;
mod launch;
mod machine;
mod matrix;
mod mbarrier;
mod memory;
mod random;
mod report;
mod shadow;
mod shared;
mod streams;
mod sync;
mod tensor_core;
mod tensor_map;
#[cfg(test)]
mod tests;

/// The kernels, as this crate knows them: unit tests of theirs are built apart from that.
pub use moefold_kernels as kernels;
pub use streams::LostWait;

/// Shared memory that a block may ask for, by generation (CUDA programming guide, "Technical
/// Specifications per Compute Capability").
const SHARED_SM80: u64 = 163 << 10;
const SHARED_SM90: u64 = 227 << 10;

/// Counts above this start again with the next launch.
const COUNT_MAX: u32 = 1 << 31;

/// A CUDA device made of software: runs the kernels on the CPU, slowly, and reports their races, stray
/// accesses and deadlocks as failures. Schedules are thrown from `seed`. Needs a C++ compiler.
pub fn device(architecture: Architecture, dtype: Dtype, seed: u64) -> Result<Device, DeviceError> {
    let emulator = Emulator::new(architecture, seed)?;
    Ok(Device::on_platform(Rc::new(emulator), dtype))
}

/// The same with an error planted: one of its streams does not wait for another when it should.
pub fn losing(
    architecture: Architecture,
    dtype: Dtype,
    seed: u64,
    lost: &LostWait,
) -> Result<Device, DeviceError> {
    let emulator = Emulator::losing(architecture, seed, Some(lost.clone()))?;
    Ok(Device::on_platform(Rc::new(emulator), dtype))
}

/// The same, but of all kernels it runs only those by which data decides what a rank asks for next: the
/// choice of experts and the maps of rows. What the others would write are numbers thrown from `seed`, the
/// same in every tensor: a router chooses at random, and again as it chose. Hundreds of times as fast, for
/// tests of what hosts ask of their devices.
pub fn routing_alone(
    architecture: Architecture,
    dtype: Dtype,
    seed: u64,
) -> Result<Device, DeviceError> {
    let mut emulator = Emulator::new(architecture, seed)?;
    emulator.routing_alone = true;
    Ok(Device::on_platform(Rc::new(emulator), dtype))
}

/// The sources of kernels that decide, by stem.
const ROUTING: [&str; 2] = ["router", "permute_map"];

/// What was made of the emulator; nothing where kernels cannot be compiled, which is said once.
///
/// # Panics
/// Where kernels cannot be compiled and `MOEFOLD_REQUIRE` names the emulator.
pub fn at_hand<T>(made: Result<T, DeviceError>) -> Option<T> {
    static SAID: Once = Once::new();
    made.map_err(|missing| {
        let required = std::env::var("MOEFOLD_REQUIRE").unwrap_or_default();
        assert!(!required.contains("emulator"), "{missing}");
        SAID.call_once(|| {
            let _ = writeln!(std::io::stderr(), "CUDA kernels are not tested: {missing}");
        });
    })
    .ok()
}

/// A machine made of software. It runs the sources it is given, which are those of kernels and of tests.
pub struct Emulator {
    properties: Properties,
    seed: u64,
    memory: RefCell<Memory>,
    streams: RefCell<Streams>,
    /// What was found where no call can say so.
    late: RefCell<Option<Fault>>,
    /// The same of memory given back: an error once there is a next tensor, which may lie there.
    given: RefCell<Option<Fault>>,
    /// Whether a fault was told: what is found after it may follow from it.
    told: Cell<bool>,
    /// A library with what its program is called; none of a program that is not run.
    modules: RefCell<Vec<Option<(&'static Library, String)>>>,
    /// See [`routing_alone`].
    routing_alone: bool,
    launches: Cell<u64>,
    /// The first count of the next launch.
    count: Cell<u32>,
}

impl Emulator {
    /// A machine of an architecture whose schedules are thrown from `seed`.
    pub fn new(architecture: Architecture, seed: u64) -> Result<Self, DeviceError> {
        Self::losing(architecture, seed, None)
    }

    /// The same, with an error planted: a wait that is left out.
    pub fn losing(
        architecture: Architecture,
        seed: u64,
        lost: Option<LostWait>,
    ) -> Result<Self, DeviceError> {
        if compile::compiler().is_none() {
            return Err(failed(
                "there is no C++ compiler: install g++, or name one by CXX",
            ));
        }
        let shared = if architecture >= Architecture::SM90 {
            SHARED_SM90
        } else {
            SHARED_SM80
        };
        Ok(Self {
            properties: Properties {
                name: "emulator".to_owned(),
                architecture,
                // Few, so that persistent kernels go round more than once.
                multiprocessors: 3,
                memory: Bytes(1 << 32),
                shared_per_block: Bytes(shared),
                l2: Bytes(32 << 20),
            },
            seed,
            memory: RefCell::default(),
            streams: RefCell::new(Streams::new(seed, lost)),
            late: RefCell::default(),
            given: RefCell::default(),
            told: Cell::new(false),
            modules: RefCell::default(),
            routing_alone: false,
            launches: Cell::new(0),
            count: Cell::new(1),
        })
    }

    fn run(&self, launch: &Launch<'_>) -> Result<Result<(), Fault>, String> {
        let Some((library, program)) = self.modules.borrow()[launch.module.0].clone() else {
            return Ok(Ok(()));
        };
        let kernel = library.kernel(launch.entry)?;
        let values: Vec<Value> = launch.args.iter().map(Value::of).collect();
        let sizes: Vec<u32> = values.iter().map(Value::bytes).collect();
        if sizes != kernel.sizes {
            return Err(format!(
                "{} of {program} has parameters of {:?} bytes, the launch gives {sizes:?}",
                launch.entry, kernel.sizes
            ));
        }
        let grid = launch.grid;
        let shared = u64::from(grid.shared);
        if grid.threads == 0 || grid.threads > 1024 || !grid.threads.is_multiple_of(32) {
            return Err(format!(
                "a block has 32, 64, .. 1024 threads, got {}",
                grid.threads
            ));
        }
        if shared > self.properties.shared_per_block.0 {
            return Err(format!(
                "a block may have {}, the launch asks for {shared} bytes",
                self.properties.shared_per_block
            ));
        }
        if grid.blocks[1] > 65_535 || grid.blocks[2] > 65_535 {
            return Err(format!(
                "a grid has at most 65535 blocks in y and z, got {:?}",
                grid.blocks
            ));
        }
        let addresses = launch
            .args
            .iter()
            .enumerate()
            .filter_map(|(i, arg)| match arg {
                Arg::Address(address) => Some((i, address.0)),
                Arg::Map(map) => Some((i, map.0[0])),
                _ => None,
            });
        let setup = Setup {
            entry: launch.entry,
            library,
            blocks: grid.blocks,
            threads: grid.threads,
            shared: shared as usize,
            addresses: addresses.collect(),
            seed: self.seed,
        };
        let number = self.launches.replace(self.launches.get() + 1);
        let dice = launch::dice(self.seed, number);
        let pointers: Vec<*mut c_void> = values.iter().map(Value::pointer).collect();
        self.touching(|memory| {
            if self.count.get() > COUNT_MAX {
                memory.forget_accesses();
                self.count.set(1);
            }
            let mut machine = Machine::new(&setup, memory, dice, self.count.get());
            let outcome = launch::run(&mut machine, &kernel, &pointers);
            self.count.set(machine.next_count());
            let mut streams = self.streams.borrow_mut();
            let (event, over) = streams.begin(launch.entry);
            let in_order = memory.note_launch(event, over);
            Ok(outcome.and(in_order))
        })
    }

    /// Notes a piece of work that uses ranges, each written or only read.
    fn note(
        &self,
        memory: &mut Memory,
        what: &'static str,
        uses: &[(Address, usize, bool)],
    ) -> Result<(), Fault> {
        let mut streams = self.streams.borrow_mut();
        let (event, over) = streams.begin(what);
        uses.iter().try_for_each(|&(address, bytes, writes)| {
            memory.note(event, over, (address.0, bytes), writes)
        })
    }

    /// The same where there is nobody to tell: the next call does, or else the end of the device. A rank
    /// that unwinds waits for nothing, and that is not held against it.
    fn note_late(&self, outcome: Result<(), Fault>) {
        if let Err(fault) = outcome
            && !thread::panicking()
        {
            self.late.borrow_mut().get_or_insert(fault);
        }
    }

    /// The same of memory given back: only the next call tells.
    fn note_given(&self, outcome: Result<(), Fault>) {
        if let Err(fault) = outcome
            && !thread::panicking()
        {
            self.given.borrow_mut().get_or_insert(fault);
        }
    }

    fn tell(&self, fault: &Fault) -> DeviceError {
        self.told.set(true);
        failed(fault.to_string())
    }

    /// What was found where no call could say so.
    fn on_time(&self) -> Result<(), DeviceError> {
        let late = self.given.take().or_else(|| self.late.take());
        late.map_or(Ok(()), |fault| Err(self.tell(&fault)))
    }

    /// Runs what touches memory, while no other rank writes what is read or reads what is written.
    fn touching<R>(&self, work: impl FnOnce(&mut Memory) -> R) -> R {
        let mut memory = self.memory.borrow_mut();
        let gates = memory.gates();
        let _held: Vec<Held<'_>> = gates
            .iter()
            .map(|(gate, alone)| {
                // A rank that panicked has left no more than wrong numbers.
                if *alone {
                    Held::Alone(gate.write().unwrap_or_else(PoisonError::into_inner))
                } else {
                    Held::Together(gate.read().unwrap_or_else(PoisonError::into_inner))
                }
            })
            .collect();
        work(&mut memory)
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        if let Some(fault) = self.late.take()
            && !self.told.get()
            && !self.streams.get_mut().is_planted()
            && !thread::panicking()
        {
            panic!("found as the emulator was dropped: {fault}");
        }
    }
}

/// A gate that was entered.
#[expect(dead_code, reason = "held, and let go of on drop")]
enum Held<'a> {
    Alone(RwLockWriteGuard<'a, ()>),
    Together(RwLockReadGuard<'a, ()>),
}

/// An argument as the kernel reads it.
enum Value {
    Four(u32),
    Eight(u64),
    Map(EncodedMap),
}

impl Value {
    fn of(arg: &Arg) -> Self {
        match *arg {
            Arg::Address(address) => Self::Eight(address.0),
            Arg::I32(value) => Self::Four(value as u32),
            Arg::U64(value) => Self::Eight(value),
            Arg::F32(value) => Self::Four(value.to_bits()),
            Arg::Map(map) => Self::Map(map),
        }
    }

    fn bytes(&self) -> u32 {
        match self {
            Self::Four(_) => 4,
            Self::Eight(_) => 8,
            Self::Map(_) => 128,
        }
    }

    fn pointer(&self) -> *mut c_void {
        match self {
            Self::Four(value) => (&raw const *value).cast_mut().cast(),
            Self::Eight(value) => (&raw const *value).cast_mut().cast(),
            Self::Map(map) => (&raw const *map).cast_mut().cast(),
        }
    }
}

/// Fills memory with numbers from 1 to 2 and from -2 to -1, read as bf16 and as f32.
fn throw(values: &mut [u8], random: &mut Random) {
    for half in values.chunks_mut(2) {
        let bits = (random.next() >> 48) as u16;
        let value = 0x3f80 | bits & 0x807f;
        half.copy_from_slice(&value.to_le_bytes()[..half.len()]);
    }
}

fn failed(detail: impl Into<String>) -> DeviceError {
    DeviceError::new("emulator", detail)
}

impl Platform for Emulator {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: u64) -> Result<Address, DeviceError> {
        let address = self.memory.borrow_mut().allocate(bytes as usize);
        Ok(Address(address))
    }

    fn free(&self, address: Address, bytes: u64) {
        let mut memory = self.memory.borrow_mut();
        // As on a GPU, all streams of the rank are waited for.
        let (event, over) = self.streams.borrow_mut().begin_after_all("freeing");
        self.note_given(memory.note(event, &over, (address.0, bytes as usize), true));
        memory.free(address.0);
    }

    fn upload(&self, dst: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.on_time()?;
        self.touching(|memory| {
            let to = memory.host(dst.0, bytes.len());
            let out = || failed(format!("upload of {} bytes out of bounds", bytes.len()));
            to.ok_or_else(out)?.copy_from_slice(bytes);
            let noted = self.note(memory, "an upload", &[(dst, bytes.len(), true)]);
            noted.map_err(|fault| self.tell(&fault))
        })
    }

    fn read(&self, src: Address, bytes: u64) {
        let mut memory = self.memory.borrow_mut();
        let uses = [(src, bytes as usize, false)];
        self.note_late(self.note(&mut memory, "a library", &uses));
    }

    fn wrote(&self, dst: Address, bytes: u64) {
        let mut memory = self.memory.borrow_mut();
        // Borrowing a range for the host counts it as written.
        let _ = memory.host(dst.0, bytes as usize);
        let uses = [(dst, bytes as usize, true)];
        self.note_late(self.note(&mut memory, "a library", &uses));
    }

    fn download(&self, src: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.on_time()?;
        self.touching(|memory| {
            let from = memory.host_read(src.0, bytes.len());
            let out = || failed(format!("download of {} bytes out of bounds", bytes.len()));
            bytes.copy_from_slice(from.ok_or_else(out)?);
            let noted = self.note(memory, "a download", &[(src, bytes.len(), false)]);
            noted.map_err(|fault| self.tell(&fault))
        })?;
        self.streams.borrow_mut().drain();
        Ok(())
    }

    fn copy(&self, src: Address, dst: Address, bytes: u64) -> Result<(), DeviceError> {
        self.on_time()?;
        let count = bytes as usize;
        self.touching(|memory| {
            let out = || failed(format!("copy of {bytes} bytes out of bounds"));
            let from = memory.host_read(src.0, count).ok_or_else(out)?.to_vec();
            memory
                .host(dst.0, count)
                .ok_or_else(out)?
                .copy_from_slice(&from);
            let noted = self.note(memory, "a copy", &[(src, count, false), (dst, count, true)]);
            noted.map_err(|fault| self.tell(&fault))
        })
    }

    fn fill(&self, dst: Address, byte: u8, bytes: u64) -> Result<(), DeviceError> {
        self.on_time()?;
        self.touching(|memory| {
            let to = memory.host(dst.0, bytes as usize);
            to.ok_or_else(|| failed(format!("fill of {bytes} bytes out of bounds")))?
                .fill(byte);
            let noted = self.note(memory, "a fill", &[(dst, bytes as usize, true)]);
            noted.map_err(|fault| self.tell(&fault))
        })
    }

    fn forget(&self, dst: Address, bytes: u64) {
        let mut memory = self.memory.borrow_mut();
        memory.forget(dst.0, bytes as usize);
        if self.routing_alone
            && let Some(values) = memory.host(dst.0, bytes as usize)
        {
            throw(values, &mut Random::new(self.seed, 0));
        }
        let uses = [(dst, bytes as usize, true)];
        self.note_late(self.note(&mut memory, "a new tensor", &uses));
    }

    fn give(&self, address: Address, bytes: u64) {
        let mut memory = self.memory.borrow_mut();
        let uses = [(address, bytes as usize, true)];
        self.note_given(self.note(&mut memory, "memory given back", &uses));
    }

    fn load(&self, program: &Program) -> Result<Module, DeviceError> {
        expect_listed(program);
        let runs = !self.routing_alone || ROUTING.contains(&program.source.stem);
        let library = runs.then(|| compile::library(program, self.properties.architecture));
        let library = library.transpose().map_err(failed)?;
        let mut modules = self.modules.borrow_mut();
        modules.push(library.map(|library| (library, program.to_string())));
        Ok(Module(modules.len() - 1))
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.on_time()?;
        let outcome = self.run(launch).map_err(failed)?;
        outcome.map_err(|fault| self.tell(&fault))
    }

    fn encode(&self, map: &TensorMap) -> Result<EncodedMap, DeviceError> {
        tensor_map::encode(map).map_err(failed)
    }

    fn dense(&self, _: &Dense) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn lend(&self, address: Address, bytes: u64) -> Result<Lent, DeviceError> {
        let lent = self.memory.borrow_mut().lend(address.0, bytes as usize);
        let lent = lent.ok_or_else(|| failed(format!("{bytes} bytes lent out of bounds")))?;
        Ok(Lent::new(lent))
    }

    fn adopt(&self, lent: &Lent) -> Result<(), DeviceError> {
        let Some(lent) = lent.known() else {
            return Err(failed("the memory offered is a GPU's"));
        };
        if self.memory.borrow_mut().adopt(lent) {
            Ok(())
        } else {
            Err(failed("the memory offered is the rank's own"))
        }
    }

    fn disown(&self, address: Address) {
        self.memory.borrow_mut().disown(address.0);
    }

    fn switch(&self, stream: Stream) -> Stream {
        self.streams.borrow_mut().switch(stream)
    }

    fn after(&self, stream: Stream) -> Result<(), DeviceError> {
        self.streams.borrow_mut().after(stream);
        Ok(())
    }

    fn record_event(&self) -> Result<Event, DeviceError> {
        Ok(Event::of_machine(self.streams.borrow_mut().mark()))
    }

    fn wait_for(&self, event: &Event) -> Result<(), DeviceError> {
        if let Some(mark) = event.mark::<Mark>() {
            self.streams.borrow_mut().wait_for(mark);
        }
        Ok(())
    }

    fn is_idle(&self) -> Result<bool, DeviceError> {
        self.streams.borrow().drain_all();
        Ok(true)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.streams.borrow().drain_all();
        self.on_time()
    }
}
