//! [`HostCost`]: what a device and its host cost each other, as a key of a profile.
//!
//! Work between the ops: a kernel is launched by the host, a count is read back, a tensor is moved
//! out of the way. `profile` measures these on a GPU; on a CPU, where an op is a function call, there
//! are none. [`crate::Costs::host`] gives the planner launches and reads, [`crate::Costs::transfer`]
//! what copies take.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Seconds};

/// One thing that host and device do to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "cost", rename_all = "snake_case", deny_unknown_fields)]
pub enum HostCost {
    /// A copy over the link between the two; both ways at once, the slower of two copies.
    Copy {
        /// Bytes each way.
        bytes: Bytes,
        /// Which way.
        direction: Direction,
    },
    /// The host's time to ask for one short op, while the device keeps up.
    Launch,
    /// What a read of a few bytes by the host adds to a row of ops: the device idles until the host
    /// has seen them and asked for more.
    Read,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
    /// Both at once.
    Both,
}

impl HostCost {
    /// The name in tables.
    pub fn stem(&self) -> &'static str {
        match self {
            Self::Copy { .. } => "host_copy",
            Self::Launch => "launch",
            Self::Read => "host_read",
        }
    }

    /// Bytes that cross the link.
    pub fn bytes(&self) -> Bytes {
        match *self {
            Self::Copy { bytes, direction } => match direction {
                Direction::ToDevice | Direction::ToHost => bytes,
                Direction::Both => bytes * 2,
            },
            Self::Launch | Self::Read => Bytes::ZERO,
        }
    }
}

impl Direction {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::ToDevice => "to device",
            Self::ToHost => "to host",
            Self::Both => "both ways",
        }
    }
}

/// What profiles measured of a device's host; absent where none did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HostTimes {
    /// See [`HostCost::Launch`].
    pub launch: Option<Seconds>,
    /// See [`HostCost::Read`].
    pub read: Option<Seconds>,
    /// Device memory a rank takes beside its tensors: context, modules, library workspaces.
    pub overhead: Option<Bytes>,
    /// What steps of training say launches and reads take, over what is said of them otherwise.
    pub factor: Option<f64>,
}
