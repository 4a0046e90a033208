//! [`Store`]: the flat buffers that a rank's weights and gradients rest in.
//!
//! One buffer of weights, in the device's dtype, and one of f32 gradients for each [`Family`]; layers
//! hold views into them ([`Weight`]), the optimizer and the data-parallel collectives use them whole.
//! Optimizer states, f32 masters of narrower weights among them, are in [`crate::optimizer`].

use moefold_kernels::{Device, Dtype, Tensor, TensorClass};

use crate::model::{Family, Parameter, Part, Shard, Slice};

/// A parameter in place: its weight and where its gradient is summed.
#[derive(Debug, Clone)]
pub struct Weight {
    /// The weight.
    pub value: Tensor,
    /// Its gradient, to be added to; f32 whatever the weight is.
    pub grad: Tensor,
}

/// Weights and gradients of one family.
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
}

impl Store {
    /// Buffers for a shard, zero everywhere.
    pub fn new(device: &Device, shard: Shard) -> Self {
        let flat = |family| {
            let len = [shard.buffer_len(family)];
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
        Self {
            shard,
            dense,
            expert,
            balance,
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

    /// The parameter for a purpose, in place.
    pub fn weight(&self, layer: Option<u32>, part: Part) -> Weight {
        let parameter = self.shard.find(layer, part);
        let flat = self.flat(parameter.family);
        Weight {
            value: flat.weights.view(parameter.offset, &parameter.dims),
            grad: flat.grads.view(parameter.offset, &parameter.dims),
        }
    }

    /// The weights that hold one slice of a parameter, `[rows, cols]`.
    pub fn slice(&self, parameter: &Parameter, slice: &Slice) -> Tensor {
        let dims = [slice.rows.len(), slice.cols.len()];
        let flat = self.flat(parameter.family);
        flat.weights.view(parameter.offset + slice.at, &dims)
    }
}
