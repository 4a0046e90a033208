//! Traces of PyTorch's profiler (Kineto): Chrome JSON of `torch.profiler`, of CPU or GPU, any vendor's.
//!
//! Kernels are given to the op of the host that launched them (`External id`, else the runtime call with
//! the same `correlation`), and an op with its shapes to a key (`ops`); where the trace has no kernels,
//! an op takes the time the host spent in it. A collective names itself (`messages`), of NCCL and of Gloo. What has no key is
//! left out by the name of its op, or of its kernel where no op launched it. Copies between host and
//! device are keys of their own. Times are as the profiler saw them: ops of a CPU with its own overhead,
//! collectives with what ranks waited for each other.

mod messages;
mod ops;
mod text;
mod tree;

use std::collections::HashMap;

use messages::Message;
use ops::Shapes;
use text::{Args, Event, Trace};
use tree::Tree;

use super::gathered::{DeviceTime, Imported, Leftovers, Timings};
use super::source::{File, Format, ImportError};
use crate::directory::{Key, Taken};
use crate::host::{Direction, HostCost};
use crate::presets;
use crate::units::Bytes;

/// Microseconds, the unit of the format.
const US: f64 = 1e-6;

/// What an event is, by its category: of newer traces, and of PyTorch before 1.12.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// An op on the host.
    Op,
    /// A call of the runtime or driver.
    Call,
    /// A kernel or a setting of memory.
    Kernel,
    /// A copy.
    Copy,
    /// Nothing that takes a device's time.
    Other,
}

fn kind(event: &Event<'_>) -> Kind {
    if event.phase != "X" {
        return Kind::Other;
    }
    match &*event.category {
        "cpu_op" | "Operator" => Kind::Op,
        "cuda_runtime" | "cuda_driver" | "hip_runtime" | "Runtime" => Kind::Call,
        "kernel" | "Kernel" | "gpu_memset" | "Memset" => Kind::Kernel,
        "gpu_memcpy" | "Memcpy" => Kind::Copy,
        _ => Kind::Other,
    }
}

pub(super) fn read(file: &File<'_>) -> Result<Imported, ImportError> {
    let expected = "a trace of torch.profiler: an object with `traceEvents`, or a list of events";
    let trace = Trace::parse(file.text).map_err(|error| file.no_json(&error, expected))?;
    let events = &trace.events;
    let of_device = |kind: Kind| matches!(kind, Kind::Kernel | Kind::Copy);
    let gpu = events.iter().any(|event| of_device(kind(event)));
    let vendor = trace.devices.first().map(|device| device.name.as_str());
    let stated = match (vendor, gpu) {
        (Some(name), true) if !name.is_empty() => Some(presets::gpu_name(name)),
        (_, true) => None,
        (_, false) => Some(super::source::CPU.to_owned()),
    };
    let device = file.device(stated.as_deref())?;
    let hosts = Hosts {
        device: &device,
        // Ranks of a CPU are taken to share it.
        ranks: if gpu {
            trace.devices.len().max(1) as u32
        } else {
            u32::MAX
        },
    };
    let mut read = Read {
        hosts,
        tree: Tree::of(events, |event| kind(event) == Kind::Op),
        events,
        timings: Timings::default(),
        leftovers: Leftovers::default(),
        total: 0.0,
        assumed_causal: false,
    };
    let device_time = if gpu {
        read.kernels();
        read.device_time()
    } else {
        read.calls();
        read.gloo(&trace.groups);
        read.host_time()
    };
    if read.timings.is_empty() {
        let ops = read.tree.nodes().count();
        let why = match (
            ops,
            read.tree.nodes().any(|node| has_shapes(events, node.event)),
        ) {
            (0, _) => "it has no ops: the profiler's schedule may have ended before its last step",
            (_, false) => "no op has its shapes: record with `record_shapes=True`",
            _ => "no op has a key among those that prices are asked for",
        };
        return Err(file.nothing(Format::Kineto, why));
    }
    let notes = read.notes(gpu);
    let mut profile = file.profile(&device, read.timings.into_samples(Taken::Training));
    profile.device_name = vendor.filter(|_| gpu).map(str::to_owned);
    if let Some(world) = trace.world {
        profile.concurrent_ranks = world.max(1);
    }
    profile.versions = trace.versions;
    Ok(Imported {
        format: Format::Kineto,
        profile,
        left_out: read.leftovers.into_list(Some(read.total)),
        device_time,
        notes,
    })
}

fn has_shapes(events: &[Event<'_>], event: usize) -> bool {
    let dims = &events[event].args.dims;
    dims.as_ref().is_some_and(|dims| !dims.is_empty())
}

/// How ranks sit on hosts, as far as a trace says.
struct Hosts<'a> {
    device: &'a str,
    /// The most ranks of a host: one for each GPU of that which was traced.
    ranks: u32,
}

/// A trace being read.
struct Read<'a, 'e> {
    hosts: Hosts<'a>,
    events: &'a [Event<'e>],
    tree: Tree,
    timings: Timings,
    leftovers: Leftovers,
    /// Seconds of all ops, copies and collectives.
    total: f64,
    /// Whether a mask was not recorded.
    assumed_causal: bool,
}

impl Read<'_, '_> {
    /// Reads the work of a device.
    fn kernels(&mut self) {
        let events = self.events;
        let launched = Launches::of(events, &self.tree);
        // Device seconds of each op, itself and what it called.
        let mut seconds: HashMap<usize, f64> = HashMap::new();
        let mut alone: Vec<(usize, f64)> = Vec::new();
        for (index, event) in events.iter().enumerate() {
            let time = event.duration * US;
            match kind(event) {
                Kind::Kernel if time > 0.0 => {
                    self.total += time;
                    let op = launched.by(event);
                    if is_collective(event) {
                        self.collective(index, op, time);
                    } else if let Some(op) = op {
                        *seconds.entry(op).or_default() += time;
                    } else {
                        alone.push((index, time));
                    }
                }
                Kind::Copy if time > 0.0 => {
                    self.total += time;
                    match between_host(event) {
                        Some(copy) => self.timings.add(Key::Host(copy), time),
                        None => match launched.by(event) {
                            Some(op) => *seconds.entry(op).or_default() += time,
                            None => alone.push((index, time)),
                        },
                    }
                }
                _ => {}
            }
        }
        for (index, time) in alone {
            let name = kernel_name(&events[index].name);
            self.leftovers
                .add(&name, "a kernel that no op launched", Some(time));
        }
        let shapes = Shapes::of(events, &self.tree);
        for root in self.tree.roots() {
            self.walk(root, &shapes, &|node, tree| {
                let all = tree.below(node);
                all.filter_map(|node| seconds.get(&node)).sum()
            });
        }
    }

    /// Reads the work of a host: each op takes the time from its call to its return.
    fn calls(&mut self) {
        let events = self.events;
        let shapes = Shapes::of(events, &self.tree);
        let roots: Vec<usize> = self.tree.roots().collect();
        let time = |node: usize, tree: &Tree| events[tree.node(node).event].duration * US;
        self.total = roots.iter().map(|&root| time(root, &self.tree)).sum();
        for root in roots {
            self.walk(root, &shapes, &time);
        }
    }

    /// Takes the time of an op where it has a key, else goes on to what it called; `seconds` are those
    /// of an op with all that it called.
    fn walk(&mut self, node: usize, shapes: &Shapes, seconds: &dyn Fn(usize, &Tree) -> f64) {
        let time = seconds(node, &self.tree);
        if time <= 0.0 {
            return;
        }
        let event = self.tree.node(node).event;
        let found = shapes.key(self.events, &self.tree, node);
        if let Ok(Some(named)) = found {
            self.assumed_causal |= named.assumed_causal;
            self.timings.add(Key::Op(named.op), time);
            return;
        }
        let called: Vec<usize> = self.tree.children(node).collect();
        let below: f64 = called.iter().map(|&node| seconds(node, &self.tree)).sum();
        for node in called {
            self.walk(node, shapes, seconds);
        }
        // A nanosecond is the least that the profiler tells apart.
        if time - below > 1e-9 {
            let name = &self.events[event].name;
            let why = if name.starts_with("c10d::") {
                "the host's part of a collective"
            } else {
                found.err().unwrap_or("prices know no such op")
            };
            self.leftovers.add(name, why, Some(time - below));
        }
    }

    /// Reads the collectives that threads of the host did.
    fn gloo(&mut self, groups: &[u64]) {
        for event in self.events.iter().filter(|event| is_gloo(event)) {
            let time = event.duration * US;
            let message = Message::of_gloo(event, groups);
            self.total += time;
            match message.expect("named so").key(&self.hosts) {
                Ok(key) => self.timings.add(Key::Collective(key), time),
                Err(why) => self.leftovers.add(&event.name, why, Some(time)),
            }
        }
    }

    fn collective(&mut self, event: usize, op: Option<usize>, seconds: f64) {
        let own = Message::of(&self.events[event].args);
        let of_op = || {
            let ops = self.tree.upwards(op?);
            let mut args = ops.map(|node| &self.events[self.tree.node(node).event].args);
            args.find_map(Message::of)
        };
        let name = kernel_name(&self.events[event].name);
        let found = match own.or_else(of_op) {
            Some(message) => message.key(&self.hosts),
            None => Err("a collective without its arguments"),
        };
        match found {
            Ok(key) => self.timings.add(Key::Collective(key), seconds),
            Err(why) => self.leftovers.add(&name, why, Some(seconds)),
        }
    }

    fn device_time(&self) -> Option<DeviceTime> {
        let mut collectives = Vec::new();
        let mut others = Vec::new();
        for event in self.events {
            let span = [event.start, event.start + event.duration];
            match kind(event) {
                Kind::Kernel if is_collective(event) => collectives.push(span),
                Kind::Kernel | Kind::Copy => others.push(span),
                _ => {}
            }
        }
        device_time(collectives, others)
    }

    fn host_time(&self) -> Option<DeviceTime> {
        let roots = self.tree.roots();
        let spans = roots.map(|root| {
            let event = &self.events[self.tree.node(root).event];
            [event.start, event.start + event.duration]
        });
        let collectives = self.events.iter().filter(|event| is_gloo(event));
        let collectives = collectives.map(|event| [event.start, event.start + event.duration]);
        device_time(collectives.collect(), spans.collect())
    }

    fn notes(&self, gpu: bool) -> Vec<String> {
        let mut notes = Vec::new();
        let collective = |key: &Key| matches!(key, Key::Collective(_));
        if self.timings.0.keys().any(collective) {
            notes.push(
                "times of collectives have in them what ranks waited for each other: one rank's trace \
                 cannot tell it apart"
                    .to_owned(),
            );
        }
        if !gpu {
            notes.push("times of ops on a CPU have the profiler's own time in them".to_owned());
        }
        if self.assumed_causal {
            notes.push(
                "attention without a recorded mask is taken as causal where queries are as many as keys"
                    .to_owned(),
            );
        }
        notes
    }
}

/// How spans on a device, in microseconds, add up.
fn device_time(collectives: Vec<[f64; 2]>, others: Vec<[f64; 2]>) -> Option<DeviceTime> {
    let all: Vec<[f64; 2]> = collectives.iter().chain(&others).copied().collect();
    let first = all.iter().map(|span| span[0]).min_by(f64::total_cmp)?;
    let last = all.iter().map(|span| span[1]).max_by(f64::total_cmp)?;
    let (busy, computing) = (covered(all), covered(others));
    Some(DeviceTime {
        span_s: (last - first) * US,
        busy_s: busy * US,
        idle_s: (last - first - busy) * US,
        collective_s: covered(collectives) * US,
        exposed_collective_s: (busy - computing) * US,
    })
}

/// The length of a union of spans.
fn covered(mut spans: Vec<[f64; 2]>) -> f64 {
    spans.sort_by(|a, b| a[0].total_cmp(&b[0]));
    let (mut sum, mut end) = (0.0, f64::NEG_INFINITY);
    for [from, to] in spans {
        sum += (to - from.max(end)).max(0.0);
        end = end.max(to);
    }
    sum
}

/// Kernels of NCCL and of RCCL, which has its names.
fn is_collective(event: &Event<'_>) -> bool {
    event.name.starts_with("nccl")
}

/// Collectives of Gloo.
fn is_gloo(event: &Event<'_>) -> bool {
    event.phase == "X" && event.duration > 0.0 && event.name.starts_with("gloo:")
}

/// The name of a kernel without its parameters.
fn kernel_name(name: &str) -> String {
    let name = name.strip_prefix("void ").unwrap_or(name);
    let end = name.find(['<', '(']).filter(|&end| end > 0);
    name[..end.unwrap_or(name.len())].to_owned()
}

/// A copy between host and device, by its name: `Memcpy HtoD (Pinned -> Device)`.
fn between_host(event: &Event<'_>) -> Option<HostCost> {
    let direction = if event.name.contains("HtoD") || event.name.contains("HostToDevice") {
        Direction::ToDevice
    } else if event.name.contains("DtoH") || event.name.contains("DeviceToHost") {
        Direction::ToHost
    } else {
        return None;
    };
    let bytes = event.args.bytes.filter(|&bytes| bytes > 0)?;
    Some(HostCost::Copy {
        bytes: Bytes(bytes),
        direction,
    })
}

/// Which op launched what.
struct Launches {
    by_id: HashMap<u64, usize>,
    by_correlation: HashMap<u64, usize>,
}

impl Launches {
    fn of(events: &[Event<'_>], tree: &Tree) -> Self {
        let ids = tree.nodes().enumerate().filter_map(|(node, found)| {
            let Args { external_id, .. } = events[found.event].args;
            Some((external_id?, node))
        });
        let calls = events.iter().filter(|event| kind(event) == Kind::Call);
        let correlations = calls.filter_map(|event| {
            let node = tree.around(&event.thread(), event.start)?;
            Some((event.args.correlation?, node))
        });
        Self {
            by_id: ids.collect(),
            by_correlation: correlations.collect(),
        }
    }

    fn by(&self, event: &Event<'_>) -> Option<usize> {
        let by_id = event.args.external_id.and_then(|id| self.by_id.get(&id));
        let correlation = event.args.correlation;
        let by_call = || correlation.and_then(|id| self.by_correlation.get(&id));
        by_id.or_else(by_call).copied()
    }
}
