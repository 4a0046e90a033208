//! [`Event`]: how far the work of a device's stream had come when it was asked for.
//!
//! Where a device has streams, an event is an event in one: another stream's work can wait for it
//! ([`Device::wait_for`]) without the host waiting, and it notes the device's time. Elsewhere work is
//! done when it was asked for, so an event is the host's time and waiting for it is nothing.
//!
//! Events go to other threads: that is how ranks of one GPU tell each other how far they are. What
//! they hold of the GPU (an event and a hold on the context) may be used from any thread; see
//! [`crate::cuda::gpu`].
//!
//! [`Device::wait_for`]: crate::Device::wait_for

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

#[cfg(any(test, feature = "emulator"))]
use crate::cuda::emulator::streams;
use crate::cuda::error::DeviceError;
use crate::cuda::gpu::Mark;

/// A place in the work of a stream. Clones are the same place.
#[derive(Clone)]
pub struct Event(pub(crate) Kind);

#[derive(Clone)]
pub(crate) enum Kind {
    /// The host's clock: all that was asked for is done.
    Host(Instant),
    /// An event of a GPU.
    Gpu(Arc<Mark>),
    /// A place in a stream of the emulator.
    #[cfg(any(test, feature = "emulator"))]
    Emulator(Arc<streams::Mark>),
}

impl Event {
    /// Now, by the host's clock.
    pub(crate) fn host() -> Self {
        Self(Kind::Host(Instant::now()))
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
            Kind::Gpu(mark) => mark.is_reached(),
            #[cfg(any(test, feature = "emulator"))]
            Kind::Emulator(mark) => Ok(mark.is_reached()),
        }
    }

    /// Seconds from `earlier` to this event, by the clock of the device: to about half a
    /// microsecond, and to seven digits. Both have been reached: the device was synchronized since.
    /// Events of several ranks on one GPU share its clock.
    ///
    /// # Panics
    /// When one is of a GPU's clock and the other of the host's.
    pub fn seconds_since(&self, earlier: &Self) -> f64 {
        match (&self.0, &earlier.0) {
            (Kind::Host(end), Kind::Host(start)) => {
                end.saturating_duration_since(*start).as_secs_f64()
            }
            (Kind::Gpu(end), Kind::Gpu(start)) => end
                .seconds_since(start)
                .unwrap_or_else(|error| error.during("seconds_since").raise()),
            #[cfg(any(test, feature = "emulator"))]
            (Kind::Emulator(end), Kind::Emulator(start)) => end.seconds_since(start),
            _ => panic!("seconds_since: one event is of a GPU's clock and the other is not"),
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Kind::Host(_) => "Event of the host",
            Kind::Gpu(_) => "Event of a GPU",
            #[cfg(any(test, feature = "emulator"))]
            Kind::Emulator(_) => "Event of an emulator",
        })
    }
}
