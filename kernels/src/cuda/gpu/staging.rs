//! [`Staging`]: uploads that do not wait, from bytes that may be gone when they are done.
//!
//! Bytes are copied to pinned memory first, a ring of segments. A segment is written again only when
//! the event recorded after its last copy has been reached; so uploads are as asynchronous as the
//! ring is long, and large ones copy the next segment while the engine sends this one.
#![expect(
    unsafe_code,
    reason = "calls into the driver; see the documentation of `gpu`"
)]

use std::sync::Arc;

use super::context::{Context, CudaEvent, CudaStream, Pinned, call};
use crate::cuda::error::DeviceError;
use crate::cuda::platform::Address;

const SEGMENTS: usize = 4;

/// The ring, on first use.
pub(super) struct Staging {
    context: Arc<Context>,
    segment_bytes: usize,
    ring: Option<Ring>,
}

struct Ring {
    pinned: Pinned,
    /// Reached when the segment of that number is free again.
    events: [CudaEvent; SEGMENTS],
    segment: usize,
    used: usize,
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>, segment_bytes: usize) -> Self {
        Self {
            context: Arc::clone(context),
            segment_bytes,
            ring: None,
        }
    }

    /// Streams a copy of `bytes` to `dst`; they may be reused on return.
    pub(super) fn upload(
        &mut self,
        stream: &CudaStream,
        dst: Address,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let ring = match &mut self.ring {
            Some(ring) => ring,
            none => none.insert(Ring::new(&self.context, self.segment_bytes)?),
        };
        let (mut dst, mut rest) = (dst, bytes);
        while !rest.is_empty() {
            if ring.used == self.segment_bytes {
                ring.advance(stream)?;
            }
            let (now, later) = rest.split_at(rest.len().min(self.segment_bytes - ring.used));
            let place = ring
                .pinned
                .write(ring.segment * self.segment_bytes + ring.used, now);
            // SAFETY: the segment is not written again before the copy is done.
            unsafe {
                call!(
                    &self.context.driver,
                    cuMemcpyHtoDAsync_v2(dst.0, place, now.len(), stream.raw),
                    "copying {} bytes to the GPU",
                    now.len()
                )?;
            }
            ring.used += now.len();
            dst = dst.offset(now.len() as u64);
            rest = later;
        }
        Ok(())
    }
}

impl Ring {
    fn new(context: &Arc<Context>, segment_bytes: usize) -> Result<Self, DeviceError> {
        let event = || CudaEvent::new(context);
        Ok(Self {
            pinned: Pinned::new(context, SEGMENTS * segment_bytes)?,
            events: [event()?, event()?, event()?, event()?],
            segment: 0,
            used: 0,
        })
    }

    /// Goes on to the next segment once it is free.
    fn advance(&mut self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.events[self.segment].record(stream)?;
        self.segment = (self.segment + 1) % SEGMENTS;
        self.used = 0;
        self.events[self.segment].synchronize()
    }
}
