//! [`Store`]: the flat buffers that a rank's weights and gradients rest in.
//!
//! One buffer of weights, in the device's dtype, and one of f32 gradients for each [`Family`]; layers
//! hold views into them ([`Weight`]), the optimizer and the data-parallel collectives use them whole.
//! Where a family rests divided over its replicas ([`Divided`]), these buffers have the rank's parts, and layers hold
//! views into others, in which units are whole in turn.
//! Optimizer states, f32 masters of narrower weights among them, are in [`crate::optimizer`].

use moefold_kernels::{Device, Dtype, Tensor, TensorClass};

use crate::model::{Bucket, Divided, Family, Parameter, Part, Shard, Slice};

/// A parameter in place: its weight and where its gradient is summed.
#[derive(Debug, Clone)]
pub struct Weight {
    /// The weight.
    pub value: Tensor,
    /// Its gradient, to be added to; f32 whatever the weight is.
    pub grad: Tensor,
}

/// Weights and gradients of one family: all, or where it rests divided the rank's part of each bucket, one after the
/// other.
#[derive(Debug, Clone)]
pub struct Flat {
    /// All weights, one dimension.
    pub weights: Tensor,
    /// All gradients, in the same places, f32.
    pub grads: Tensor,
}

/// All weights and gradients of the rank.
#[derive(Debug)]
pub struct Store {
    /// What is where.
    pub shard: Shard,
    dense: Flat,
    expert: Flat,
    /// Without gradients.
    balance: Flat,
    /// Of dense parameters and of experts, buffers in which units are whole: see [`Divided`].
    whole: [Buffers; 2],
}

/// Buffers of weights, and of gradients.
#[derive(Debug, Default)]
struct Buffers([Vec<Tensor>; 2]);

impl Buffers {
    fn new(device: &Device, divided: &Divided) -> Self {
        let [weights, grads] = &divided.buffers;
        let of = |dtype| {
            move |len: &usize| {
                device.zeros(TensorClass::Transient, dtype, std::slice::from_ref(len))
            }
        };
        Self([
            weights.iter().map(of(device.dtype())).collect(),
            grads.iter().map(of(Dtype::F32)).collect(),
        ])
    }
}

impl Store {
    /// Buffers for a shard, zero everywhere.
    pub fn new(device: &Device, shard: Shard) -> Self {
        let flat = |family| {
            let ranks = shard.divided(family).map_or(1, |divided| divided.ranks);
            let len = [shard.buffer_len(family) / ranks];
            Flat {
                weights: device.zeros(TensorClass::Weights, device.dtype(), &len),
                grads: device.zeros(TensorClass::Gradients, Dtype::F32, &len),
            }
        };
        let (dense, expert) = (flat(Family::Dense), flat(Family::Expert));
        let zeros = |class, len| device.zeros(class, Dtype::F32, &[len]);
        let balance = Flat {
            weights: zeros(TensorClass::Weights, shard.buffer_len(Family::Balance)),
            grads: zeros(TensorClass::Gradients, 0),
        };
        let whole = [Family::Dense, Family::Expert].map(|family| {
            let divided = shard.divided(family);
            divided.map_or_else(Buffers::default, |divided| Buffers::new(device, divided))
        });
        Self {
            shard,
            dense,
            expert,
            balance,
            whole,
        }
    }

    /// The buffers of a family.
    pub fn flat(&self, family: Family) -> &Flat {
        match family {
            Family::Dense => &self.dense,
            Family::Expert => &self.expert,
            Family::Balance => &self.balance,
        }
    }

    /// The correction bias of a layer's router, in place; none where it has none.
    pub fn correction_bias(&self, layer: u32) -> Option<Tensor> {
        let mut all = self.shard.family(Family::Balance);
        let bias = all.find(|parameter| parameter.layer == Some(layer))?;
        let all = &self.balance.weights;
        Some(all.view(bias.offset, &bias.dims))
    }

    /// All weights and gradients of a bucket, where they are whole.
    pub fn bucket(&self, bucket: &Bucket) -> Flat {
        let view = |tensor: &Tensor, at: usize| tensor.view(at, &[bucket.range.len()]);
        let Some(divided) = self.shard.divided(bucket.family) else {
            let flat = self.flat(bucket.family);
            return Flat {
                weights: view(&flat.weights, bucket.range.start),
                grads: view(&flat.grads, bucket.range.start),
            };
        };
        let Buffers(buffers) = &self.whole[bucket.family as usize];
        let [weights, grads] = [0, 1].map(|kind| {
            let own = divided.of_units[kind][bucket.units.start];
            view(&buffers[kind][own], 0)
        });
        Flat { weights, grads }
    }

    /// The parameter for a purpose, in place.
    pub fn weight(&self, layer: Option<u32>, part: Part) -> Weight {
        let parameter = self.shard.find(layer, part);
        // Rows of a vocabulary that is too small for all ranks may be none.
        let (Flat { weights, grads }, at) = match self.shard.bucket_of(parameter) {
            Some(bucket) => (self.bucket(bucket), parameter.offset - bucket.range.start),
            None => (self.flat(parameter.family).clone(), 0),
        };
        Weight {
            value: weights.view(at, &parameter.dims),
            grad: grads.view(at, &parameter.dims),
        }
    }

    /// The weights that hold one slice of a parameter, `[rows, cols]`; none of those that rest divided.
    pub fn slice(&self, parameter: &Parameter, slice: &Slice) -> Option<Tensor> {
        if self.shard.divided(parameter.family).is_some() {
            return None;
        }
        let dims = [slice.rows.len(), slice.cols.len()];
        let flat = self.flat(parameter.family);
        Some(flat.weights.view(parameter.offset + slice.at, &dims))
    }
}
