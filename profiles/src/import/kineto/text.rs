//! The JSON of a trace, as far as it is read.
//!
//! A trace may have millions of events with dozens of arguments: those that are read are picked while
//! parsing, and the rest is skipped. An argument that is there twice has its last value.

use std::borrow::Cow;
use std::fmt;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// A trace.
#[derive(Debug)]
pub(super) struct Trace<'a> {
    pub(super) events: Vec<Event<'a>>,
    /// GPUs of the host.
    pub(super) devices: Vec<Device>,
    /// Ranks of the job, where it was distributed.
    pub(super) world: Option<u32>,
    /// Sizes of its process groups.
    pub(super) groups: Vec<u64>,
    /// Versions of runtime and driver.
    pub(super) versions: Vec<String>,
}

/// What the trace says of a GPU.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Device {
    #[serde(default)]
    pub(super) name: String,
}

#[derive(Deserialize)]
struct Object<'a> {
    #[serde(borrow, rename = "traceEvents")]
    events: Vec<Event<'a>>,
    #[serde(default, rename = "deviceProperties")]
    devices: Vec<Device>,
    #[serde(default, rename = "distributedInfo")]
    distributed: Option<Distributed>,
    #[serde(default)]
    cuda_runtime_version: Option<u64>,
    #[serde(default)]
    cuda_driver_version: Option<u64>,
}

#[derive(Deserialize)]
struct Distributed {
    #[serde(default)]
    world_size: Option<u32>,
    #[serde(default)]
    pg_config: Value,
}

impl Distributed {
    fn groups(&self) -> Vec<u64> {
        let all = self.pg_config.as_array().into_iter().flatten();
        all.filter_map(|group| group.get("pg_size")?.as_u64())
            .collect()
    }
}

impl<'a> Trace<'a> {
    /// Reads an object with `traceEvents`, or a bare list of events.
    pub(super) fn parse(text: &'a str) -> Result<Self, serde_json::Error> {
        if text.trim_start().starts_with('[') {
            return Ok(Self {
                events: serde_json::from_str(text)?,
                devices: Vec::new(),
                world: None,
                groups: Vec::new(),
                versions: Vec::new(),
            });
        }
        let object: Object<'a> = serde_json::from_str(text)?;
        // CUDA writes 12040 for 12.4.
        let version = |(name, number): (&str, Option<u64>)| {
            let number = number?;
            let (major, minor) = (number / 1000, number % 1000 / 10);
            Some(format!("{name} {major}.{minor}"))
        };
        let versions = [
            ("CUDA runtime", object.cuda_runtime_version),
            ("CUDA driver", object.cuda_driver_version),
        ];
        let distributed = object.distributed;
        Ok(Self {
            events: object.events,
            devices: object.devices,
            world: distributed.as_ref().and_then(|info| info.world_size),
            groups: distributed.map_or(Vec::new(), |info| info.groups()),
            versions: versions.into_iter().filter_map(version).collect(),
        })
    }
}

/// One event.
#[derive(Debug, Deserialize)]
pub(super) struct Event<'a> {
    #[serde(borrow, default, rename = "ph")]
    pub(super) phase: Cow<'a, str>,
    #[serde(borrow, default, rename = "cat")]
    pub(super) category: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) name: Cow<'a, str>,
    /// Microseconds, as the next.
    #[serde(default, rename = "ts")]
    pub(super) start: f64,
    #[serde(default, rename = "dur")]
    pub(super) duration: f64,
    #[serde(default, rename = "pid")]
    process: Id,
    #[serde(default, rename = "tid")]
    thread: Id,
    #[serde(default)]
    pub(super) args: Args,
}

/// A process or thread: a number, or a name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
struct Id(String);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Value::deserialize(deserializer)? {
            Value::String(name) => Self(name),
            other => Self(other.to_string()),
        })
    }
}

/// A thread of a process.
pub(super) type Thread = [String; 2];

impl Event<'_> {
    /// Where it ran.
    pub(super) fn thread(&self) -> Thread {
        [self.process.0.clone(), self.thread.0.clone()]
    }
}

/// Arguments of an event.
#[derive(Debug, Default)]
pub(super) struct Args {
    /// Of an op its number; of a kernel that of the op that launched it.
    pub(super) external_id: Option<u64>,
    /// Of a call of the runtime and of what it launched.
    pub(super) correlation: Option<u64>,
    /// Of an op that made a node for the backward pass, and of that node.
    pub(super) sequence: Option<u64>,
    /// Sizes of the operands of an op.
    pub(super) dims: Option<Vec<Value>>,
    /// Types of them.
    pub(super) types: Option<Vec<Value>>,
    /// Operands that are no tensors.
    pub(super) concrete: Option<Vec<Value>>,
    /// Of a copy.
    pub(super) bytes: Option<u64>,
    /// Of a collective.
    pub(super) collective: Option<String>,
    pub(super) elements_in: Option<u64>,
    pub(super) elements_out: Option<u64>,
    pub(super) dtype: Option<String>,
    pub(super) group_size: Option<u64>,
    pub(super) group_ranks: Option<String>,
}

impl<'de> Deserialize<'de> for Args {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ArgsVisitor)
    }
}

struct ArgsVisitor;

impl<'de> Visitor<'de> for ArgsVisitor {
    type Value = Args;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("arguments of an event")
    }

    fn visit_unit<E>(self) -> Result<Args, E> {
        Ok(Args::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Args, A::Error> {
        let mut args = Args::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match &*key {
                "External id" | "external id" => args.external_id = number(map.next_value()?),
                "correlation" => args.correlation = number(map.next_value()?),
                "Sequence number" => args.sequence = number(map.next_value()?),
                "Input Dims" | "Input dims" => args.dims = list(map.next_value()?),
                "Input type" => args.types = list(map.next_value()?),
                "Concrete Inputs" => args.concrete = list(map.next_value()?),
                "bytes" => args.bytes = number(map.next_value()?),
                "Collective name" => args.collective = words(map.next_value()?),
                "In msg nelems" => args.elements_in = number(map.next_value()?),
                "Out msg nelems" => args.elements_out = number(map.next_value()?),
                "dtype" => args.dtype = words(map.next_value()?),
                "Group size" => args.group_size = number(map.next_value()?),
                "Process Group Ranks" => args.group_ranks = words(map.next_value()?),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(args)
    }
}

/// A whole number, which some versions write as text.
fn number(value: Value) -> Option<u64> {
    match value {
        Value::String(text) => text.trim().parse().ok(),
        other => other.as_u64(),
    }
}

fn list(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(list) => Some(list),
        _ => None,
    }
}

/// Text; of a list its JSON, which is how others write it.
fn words(value: Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text),
        other => Some(other.to_string()),
    }
}
