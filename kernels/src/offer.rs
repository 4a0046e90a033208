//! [`Offer`]: one rank's tensor, for the other ranks on the same GPU to read.
//!
//! Ranks are threads of one process and have the GPU's one context in common, so an address means the
//! same to all of them. A tensor itself stays on its rank's thread; what travels is an offer of it,
//! with the event from which it may be read ([`Tensor::offer`]). Another rank accepts it as a tensor
//! that ops may read and not write ([`Device::accept`]), on a stream that waits for that event.
//!
//! The memory stays its owner's, who keeps the tensor and its contents until every reader is done: a
//! reader says when by a [`Event`] after its last read, and the owner's stream waits for it. Keeping to
//! that is the transport's business, not checked here but by the emulator, which reports a wait that is
//! missing. Without it numbers are wrong; the host is never in danger, as a GPU's memory is not its own and
//! the emulator holds what was offered.

use std::fmt;
use std::rc::Rc;

use moefold_profiles::Dtype;

use crate::buffer::{Buffer, Storage};
use crate::cuda::platform::{Address, Lent};
use crate::device::{Backend, Device, Side, TensorClass};
use crate::event::Event;
use crate::tensor::Tensor;

/// A tensor that other ranks may read. Sent to their threads.
#[derive(Clone)]
pub struct Offer {
    address: Address,
    dims: Vec<usize>,
    dtype: Dtype,
    ready: Event,
    lent: Lent,
}

impl Offer {
    /// The event from which the contents are there.
    pub fn ready(&self) -> &Event {
        &self.ready
    }

    /// The sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offer of {}{:?}", self.dtype, self.dims)
    }
}

impl Tensor {
    /// An offer of what the tensor will hold when the current stream has done what it was asked for.
    ///
    /// # Panics
    /// When the tensor is the host's memory.
    pub fn offer(&self) -> Offer {
        let Backend::Cuda(gpu) = &self.device().0.backend else {
            panic!("offer: {self:?} is the host's memory, expected a GPU's");
        };
        Offer {
            address: self.address(),
            dims: self.dims().to_vec(),
            dtype: self.dtype(),
            ready: gpu.record_event(),
            lent: gpu.lend(self),
        }
    }
}

impl Device {
    /// Another rank's tensor, to be read: the current stream waits until it is ready. It is in no
    /// account of this device.
    ///
    /// # Panics
    /// On a device of the host's.
    pub fn accept(&self, offer: &Offer) -> Tensor {
        let Backend::Cuda(gpu) = &self.0.backend else {
            panic!("accept: {offer:?} of a GPU's memory on {self:?}");
        };
        gpu.wait_for(&offer.ready);
        let adopted = Storage::Adopted(gpu.adopt(offer.address, &offer.lent));
        let bytes = offer
            .dtype
            .bytes(offer.dims.iter().product::<usize>() as u64);
        let buffer = Buffer::new(
            self.clone(),
            (TensorClass::Transient, Side::Device),
            bytes.0 as usize,
            0,
            adopted,
        );
        Tensor::whole(Rc::new(buffer), offer.dtype, &offer.dims)
    }
}

#[cfg(test)]
mod tests;
