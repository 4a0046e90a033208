//! The emulator below the crate under test.
//!
//! Unit tests are built apart from the library that the emulator knows, so to the compiler each has
//! types of its own, alike but for that. What crosses is translated here: the tests of what is private to
//! the crate need it; those in `tests/ops` do not.

use std::any::Any;
use std::rc::Rc;

use moefold_emulator::kernels as theirs;
use moefold_emulator::{Emulator, at_hand};
use moefold_profiles::Dtype;
use theirs::cuda::platform::Platform as _;
use theirs::cuda::program as their_program;

use crate::Device;
use crate::cuda::error::{DeviceError, catch};
use crate::cuda::platform::{Address, Dense, Launch, Lent, Module, Platform, Properties, Stream};
use crate::cuda::program::{Architecture, Arg, EncodedMap, Program, Swizzle, TensorMap, Value};
use crate::event::{Event, Mark};

/// The emulator as a platform of the crate under test.
pub(crate) struct Emulated {
    emulator: Emulator,
    properties: Properties,
}

impl Emulated {
    /// One of an architecture, where kernels can be compiled.
    pub(crate) fn new(architecture: Architecture, seed: u64) -> Option<Self> {
        let Architecture { major, minor } = architecture;
        let emulator = at_hand(Emulator::new(
            their_program::Architecture { major, minor },
            seed,
        ))?;
        let theirs = emulator.properties();
        let properties = Properties {
            name: theirs.name.clone(),
            architecture,
            multiprocessors: theirs.multiprocessors,
            memory: theirs.memory,
            shared_per_block: theirs.shared_per_block,
            l2: theirs.l2,
        };
        Some(Self {
            emulator,
            properties,
        })
    }
}

/// The emulated devices of a test, with poisoned outputs; none where there is no emulator.
pub(crate) fn emulated(seed: u64) -> Vec<Device> {
    let kinds = [
        (Architecture::SM80, Dtype::F32),
        (Architecture::SM80, Dtype::Bf16),
        (Architecture::SM90, Dtype::Bf16),
    ];
    let platforms = kinds.map(|(architecture, dtype)| (Emulated::new(architecture, seed), dtype));
    let made = platforms.into_iter().filter_map(|(platform, dtype)| {
        let device = Device::on_platform(Rc::new(platform?), dtype);
        device.poison(true);
        Some(device)
    });
    made.collect()
}

/// Runs a test on a CPU of one thread and on every emulated device.
pub(crate) fn on_every_device(seed: u64, test: impl Fn(&Device)) {
    for device in [vec![Device::cpu(1)], emulated(seed)].concat() {
        catch(|| test(&device)).unwrap_or_else(|error| panic!("on {device:?}: {error}"));
    }
}

struct TheirLent(theirs::cuda::platform::Lent);

struct TheirEvent(theirs::Event);

impl Mark for TheirEvent {
    fn machine(&self) -> &'static str {
        "an emulator"
    }

    fn is_reached(&self) -> Result<bool, DeviceError> {
        Ok(self.0.is_reached())
    }

    fn seconds_since(&self, earlier: &dyn Mark) -> Option<Result<f64, DeviceError>> {
        let earlier = (earlier as &dyn Any).downcast_ref::<Self>()?;
        Some(Ok(self.0.seconds_since(&earlier.0)))
    }
}

fn ours<T>(result: Result<T, theirs::DeviceError>) -> Result<T, DeviceError> {
    result.map_err(|error| DeviceError {
        call: error.call,
        code: error.code,
        op: error.op,
        detail: error.detail,
    })
}

fn address(address: Address) -> theirs::cuda::platform::Address {
    theirs::cuda::platform::Address(address.0)
}

fn stream(stream: Stream) -> theirs::cuda::Stream {
    theirs::cuda::Stream::ALL[stream as usize]
}

fn program(program: &Program) -> their_program::Program {
    let defines = program.defines.iter().map(|define| their_program::Define {
        name: define.name,
        value: match define.value {
            Value::Int(value) => their_program::Value::Int(value),
            Value::Name(value) => their_program::Value::Name(value),
        },
    });
    their_program::Program {
        source: their_program::Source {
            stem: program.source.stem,
            text: program.source.text,
        },
        defines: defines.collect(),
    }
}

fn arg(arg: &Arg) -> their_program::Arg {
    match *arg {
        Arg::Address(at) => their_program::Arg::Address(address(at)),
        Arg::I32(value) => their_program::Arg::I32(value),
        Arg::U64(value) => their_program::Arg::U64(value),
        Arg::F32(value) => their_program::Arg::F32(value),
        Arg::Map(map) => their_program::Arg::Map(their_program::EncodedMap(map.0)),
    }
}

fn tensor_map(map: &TensorMap) -> their_program::TensorMap {
    their_program::TensorMap {
        address: address(map.address),
        dtype: map.dtype,
        dims: map.dims.clone(),
        strides: map.strides.clone(),
        tile: map.tile.clone(),
        swizzle: match map.swizzle {
            Swizzle::None => their_program::Swizzle::None,
            Swizzle::B32 => their_program::Swizzle::B32,
            Swizzle::B64 => their_program::Swizzle::B64,
            Swizzle::B128 => their_program::Swizzle::B128,
        },
    }
}

impl Platform for Emulated {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: u64) -> Result<Address, DeviceError> {
        Ok(Address(ours(self.emulator.allocate(bytes))?.0))
    }

    fn free(&self, at: Address, bytes: u64) {
        self.emulator.free(address(at), bytes);
    }

    fn upload(&self, dst: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        ours(self.emulator.upload(address(dst), bytes))
    }

    fn download(&self, src: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        ours(self.emulator.download(address(src), bytes))
    }

    fn copy(&self, src: Address, dst: Address, bytes: u64) -> Result<(), DeviceError> {
        ours(self.emulator.copy(address(src), address(dst), bytes))
    }

    fn fill(&self, dst: Address, byte: u8, bytes: u64) -> Result<(), DeviceError> {
        ours(self.emulator.fill(address(dst), byte, bytes))
    }

    fn forget(&self, dst: Address, bytes: u64) {
        self.emulator.forget(address(dst), bytes);
    }

    fn give(&self, at: Address, bytes: u64) {
        self.emulator.give(address(at), bytes);
    }

    fn load(&self, loaded: &Program) -> Result<Module, DeviceError> {
        Ok(Module(ours(self.emulator.load(&program(loaded)))?.0))
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let args: Vec<_> = launch.args.iter().map(arg).collect();
        ours(self.emulator.launch(&theirs::cuda::platform::Launch {
            module: theirs::cuda::platform::Module(launch.module.0),
            entry: launch.entry,
            grid: their_program::Grid {
                blocks: launch.grid.blocks,
                threads: launch.grid.threads,
                shared: launch.grid.shared,
            },
            args: &args,
        }))
    }

    fn encode(&self, map: &TensorMap) -> Result<EncodedMap, DeviceError> {
        Ok(EncodedMap(ours(self.emulator.encode(&tensor_map(map)))?.0))
    }

    fn dense(&self, _: &Dense) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn switch(&self, to: Stream) -> Stream {
        Stream::ALL[self.emulator.switch(stream(to)) as usize]
    }

    fn after(&self, before: Stream) -> Result<(), DeviceError> {
        ours(self.emulator.after(stream(before)))
    }

    fn record_event(&self) -> Result<Event, DeviceError> {
        Ok(Event::of_machine(TheirEvent(ours(
            self.emulator.record_event(),
        )?)))
    }

    fn wait_for(&self, event: &Event) -> Result<(), DeviceError> {
        let theirs = event.mark::<TheirEvent>();
        theirs.map_or(Ok(()), |event| ours(self.emulator.wait_for(&event.0)))
    }

    fn lend(&self, at: Address, bytes: u64) -> Result<Lent, DeviceError> {
        Ok(Lent::new(TheirLent(ours(
            self.emulator.lend(address(at), bytes),
        )?)))
    }

    fn adopt(&self, lent: &Lent) -> Result<(), DeviceError> {
        let lent = lent.known::<TheirLent>().expect("an emulator lent it");
        ours(self.emulator.adopt(&lent.0))
    }

    fn disown(&self, at: Address) {
        self.emulator.disown(address(at));
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        ours(self.emulator.synchronize())
    }

    fn is_idle(&self) -> Result<bool, DeviceError> {
        ours(self.emulator.is_idle())
    }

    fn read(&self, src: Address, bytes: u64) {
        self.emulator.read(address(src), bytes);
    }

    fn wrote(&self, dst: Address, bytes: u64) {
        self.emulator.wrote(address(dst), bytes);
    }
}
