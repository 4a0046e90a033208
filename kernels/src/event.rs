//! [`Event`]: how far the work of a device's stream had come when it was asked for.
//!
//! Where a device has streams, an event is an event in one: another stream's work can wait for it
//! ([`Device::wait_for`]) without the host waiting, and it notes the device's time. Elsewhere work is
//! done when it was asked for, so an event is the host's time and waiting for it is nothing.
//!
//! Events go to other threads: that is how ranks of one GPU tell each other how far they are. What
//! they hold of a machine ([`Mark`]) may be used from any thread.
//!
//! [`Device::wait_for`]: crate::Device::wait_for

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::cuda::error::DeviceError;

/// A place in the work of a stream. Clones are the same place.
#[derive(Clone)]
pub struct Event(Kind);

#[derive(Clone)]
enum Kind {
    /// The host's clock: all that was asked for is done.
    Host(Instant),
    /// A place in a stream of a machine.
    Machine(Arc<dyn Mark>),
}

/// A place in a stream, as the machine knows it that has the stream. For who makes such a machine
/// ([`crate::cuda::platform`]).
pub trait Mark: Any + Send + Sync {
    /// What the machine is, with its article: for messages.
    fn machine(&self) -> &'static str;

    /// Whether the stream has come so far; does not wait.
    fn is_reached(&self) -> Result<bool, DeviceError>;

    /// Seconds from `earlier` to this place, both of them reached; none where `earlier` is of another
    /// clock.
    fn seconds_since(&self, earlier: &dyn Mark) -> Option<Result<f64, DeviceError>>;
}

impl Event {
    /// Now, by the host's clock.
    pub fn host() -> Self {
        Self(Kind::Host(Instant::now()))
    }

    /// A place in a stream of a machine.
    pub fn of_machine(mark: impl Mark) -> Self {
        Self(Kind::Machine(Arc::new(mark)))
    }

    /// What the machine knows of it, where that is a machine whose places are `M`.
    pub fn mark<M: Mark>(&self) -> Option<&M> {
        match &self.0 {
            Kind::Host(_) => None,
            Kind::Machine(mark) => (&**mark as &dyn Any).downcast_ref(),
        }
    }

    /// Whether the device's work has come so far; does not wait.
    pub fn is_reached(&self) -> bool {
        let reached = self.reached();
        reached.unwrap_or_else(|error| error.during("is_reached").raise())
    }

    /// The same, for who has a failure of the device told otherwise.
    pub(crate) fn reached(&self) -> Result<bool, DeviceError> {
        match &self.0 {
            Kind::Host(_) => Ok(true),
            Kind::Machine(mark) => mark.is_reached(),
        }
    }

    /// Seconds from `earlier` to this event, by the clock of the device: to about half a
    /// microsecond, and to seven digits. Both have been reached: the device was synchronized since.
    /// Events of several ranks on one GPU share its clock.
    ///
    /// # Panics
    /// When one is of a GPU's clock and the other of the host's.
    pub fn seconds_since(&self, earlier: &Self) -> f64 {
        let seconds = match (&self.0, &earlier.0) {
            (Kind::Host(end), Kind::Host(start)) => {
                return end.saturating_duration_since(*start).as_secs_f64();
            }
            (Kind::Machine(end), Kind::Machine(start)) => end.seconds_since(&**start),
            _ => None,
        };
        let Some(seconds) = seconds else {
            panic!("seconds_since: one event is of a GPU's clock and the other is not");
        };
        seconds.unwrap_or_else(|error| error.during("seconds_since").raise())
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = match &self.0 {
            Kind::Host(_) => "the host",
            Kind::Machine(mark) => mark.machine(),
        };
        write!(f, "Event of {machine}")
    }
}
