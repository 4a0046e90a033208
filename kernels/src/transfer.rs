//! Transfers: a tensor's contents to memory of the host and back, beside what the device computes.
//!
//! A [`Parcel`] is what rests on the host; [`Leaving`] and [`Coming`] are on their way. Bytes go as they are, so
//! that what comes back has the same bits. On a GPU transfers are in the stream of copies, one after the other,
//! and the host waits for none of them: the compute stream does, where [`Leaving::settle`] and
//! [`Coming::settle`] are called. So memory of the device is free again at that place in the order in which
//! work is asked for, whenever the copy ends. On the CPU the memory of the host is the device's own kind, and a
//! transfer is an [`elementwise::copy`].

use moefold_profiles::Dtype;

use crate::cuda::Stream;
use crate::cuda::platform::Direction;
use crate::device::{Backend, Device, Side, TensorClass};
use crate::elementwise;
use crate::event::Event;
use crate::tensor::Tensor;

/// A tensor's contents in memory of the host.
#[derive(Debug)]
pub struct Parcel(Tensor);

/// Tensors on their way to the host: their memory stays until [`Leaving::settle`].
#[derive(Debug)]
#[must_use = "memory of the device is kept until it is settled"]
pub struct Leaving {
    tensors: Vec<Tensor>,
    done: Option<Event>,
}

/// Tensors on their way back: not to be read before [`Coming::settle`].
#[derive(Debug)]
#[must_use = "tensors that are on their way are asked for by settling"]
pub struct Coming {
    tensors: Vec<Tensor>,
    parcels: Vec<Parcel>,
    done: Option<Event>,
}

/// Starts to copy tensors of a device to its host, after all that it was asked for so far. Until they are
/// settled nobody writes them.
pub fn start_to_host(device: &Device, tensors: Vec<Tensor>) -> (Vec<Parcel>, Leaving) {
    let beside =
        |tensor: &Tensor| device.empty_on_host(tensor.class(), tensor.dtype(), tensor.dims());
    let parcels: Vec<Parcel> = tensors.iter().map(beside).map(Parcel).collect();
    let pairs = tensors.iter().zip(&parcels);
    let pairs = pairs.map(|(tensor, parcel)| (tensor, &parcel.0));
    let done = start(device, pairs, Direction::ToHost);
    (parcels, Leaving { tensors, done })
}

/// Starts to copy parcels back to the device, into memory that is taken now.
pub fn start_to_device(device: &Device, parcels: Vec<Parcel>) -> Coming {
    let tensors: Vec<Tensor> = parcels
        .iter()
        .map(|Parcel(host)| device.empty(host.class(), host.dtype(), host.dims()))
        .collect();
    let pairs = parcels.iter().map(|parcel| &parcel.0).zip(&tensors);
    let done = start(device, pairs, Direction::ToDevice);
    Coming {
        tensors,
        parcels,
        done,
    }
}

/// Asks for copies, in order; gives where the stream of copies has done them, if there is one.
fn start<'a>(
    device: &Device,
    pairs: impl Iterator<Item = (&'a Tensor, &'a Tensor)>,
    direction: Direction,
) -> Option<Event> {
    match &device.0.backend {
        Backend::Cpu(_) => {
            pairs.for_each(|(src, dst)| elementwise::copy(src, dst));
            None
        }
        Backend::Cuda(gpu) => {
            let now = device.record_event();
            Some(device.beside_since(Stream::Copies, &now, || {
                pairs.for_each(|(src, dst)| gpu.transfer(src, dst, direction));
                device.record_event()
            }))
        }
    }
}

/// Lets the device wait for copies, if it does not do them at once.
fn wait_for(device: &Device, done: Option<&Event>) {
    if let Some(done) = done {
        device.wait_for(done);
    }
}

impl Parcel {
    /// What it is a copy of: class and type of its elements.
    pub fn kind(&self) -> (TensorClass, Dtype) {
        (self.0.class(), self.0.dtype())
    }

    /// Some of its elements on the device, in order: a copy, for which the device waits.
    pub fn part(&self, elements: std::ops::Range<usize>) -> Tensor {
        let (host, device) = (&self.0, self.0.device());
        let tensor = device.empty(host.class(), host.dtype(), &[elements.len()]);
        let own = host.view(elements.start, tensor.dims());
        let done = start(device, [(&own, &tensor)].into_iter(), Direction::ToDevice);
        wait_for(device, done.as_ref());
        tensor
    }

    /// Overwrites elements from `at` on with those of a tensor of the device, which waits for it.
    pub fn put_part(&self, at: usize, tensor: &Tensor) {
        let device = self.0.device();
        let own = self.0.view(at, tensor.dims());
        let done = start(device, [(tensor, &own)].into_iter(), Direction::ToHost);
        wait_for(device, done.as_ref());
    }

    /// Its size.
    pub fn bytes(&self) -> moefold_profiles::units::Bytes {
        self.0.bytes()
    }
}

impl Leaving {
    /// Lets what is asked for from now on have the memory: after the copies, for which the host does not wait.
    pub fn settle(self, device: &Device) {
        wait_for(device, self.done.as_ref());
        drop(self.tensors);
    }
}

impl Coming {
    /// The tensors, for what is asked for from now on: after the copies. The host's memory is free again.
    pub fn settle(self, device: &Device) -> Vec<Tensor> {
        wait_for(device, self.done.as_ref());
        drop(self.parcels);
        self.tensors
    }
}

impl Tensor {
    /// Whether other handles look at the same buffer: letting go of this one frees no memory.
    pub fn is_shared(&self) -> bool {
        self.handles() > 1
    }

    /// Whose memory it is in.
    pub fn side(&self) -> Side {
        self.buffer().side()
    }
}

#[cfg(test)]
mod tests {
    use moefold_profiles::units::Bytes;

    use super::*;
    use crate::emulated::emulated;

    #[test]
    fn law_what_comes_back_is_what_left_and_the_account_says_where_it_is() {
        for device in &[vec![Device::cpu(1)], emulated(3)].concat() {
            device.reset_peak();
            let before = device.memory();
            let values = [1.5, -0.0, f32::MIN_POSITIVE, 3.25, 7.0];
            let class = TensorClass::Activations;
            let tensor = device.from_f32(class, &values, &[5, 1]);
            let index = device.from_i32(class, &[3, 1, 2], &[3]);
            let bytes = tensor.bytes() + index.bytes();
            assert!(!tensor.is_shared());
            let (parcels, leaving) = start_to_host(device, vec![tensor, index]);
            let both = device.memory();
            assert_eq!(both.live_total(), before.live_total() + bytes);
            assert_eq!(both.on_host(), bytes);
            leaving.settle(device);
            let away = device.memory();
            assert_eq!(away.live_total(), before.live_total());
            assert_eq!(away.peak_total(), before.live_total() + bytes);
            let part = parcels[0].part(1..4);
            assert_eq!(part.to_f32(), values[1..4]);
            parcels[0].put_part(3, &device.from_f32(class, &values[3..], &[2]));
            drop(part);
            // What takes the memory next may be written before the copy is done elsewhere, not here.
            let other = device.from_f32(class, &[9.0; 5], &[5]);
            let coming = start_to_device(device, parcels);
            let back = coming.settle(device);
            assert_eq!(device.memory().on_host(), Bytes::ZERO);
            assert_eq!(device.memory().peak_on_host(), bytes);
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&back[0].to_f32()), bits(&values));
            assert_eq!(back[0].dims(), [5, 1]);
            assert_eq!(back[1].to_i32(), [3, 1, 2]);
            drop((back, other));
            assert_eq!(device.memory().live_total(), before.live_total());
        }
    }
}
