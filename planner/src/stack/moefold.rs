//! What this project's executor allocates, byte for byte and in order; nothing is recomputed. Activations
//! are of the precision's dtype, statistics of rows, scores and probabilities f32.
//!
//! Each block's passes are written as the executor runs them ([`Site`] plays them on a
//! [`crate::memory::tape::Tape`]): what its modules hold between forward and backward is what a forward
//! pass leaves, and the peak of a step is that of the tapes, one layer after the other. Tests of the
//! executor compare the tensors it keeps with the list, and the peak of its arena with the sum, for
//! equality. Sequence parallelism keeps the local slice of a block's input and gathers it again in the
//! backward pass.
//!
//! Where routing decides, the declaration is for the rows that [`Local`] says. What only a run knows is
//! not in a plan: a load-balancing loss (`Site::balanced`: four bytes an expert and layer saved, and the
//! router's sums while it runs), and reductions of more than eight parts on one GPU, of rank threads or
//! of expert tensor parallelism, which take eight bytes for each part beyond. Of models that the executor refuses, what it does not run is
//! declared by its norms alone.

mod attention;
mod ends;
mod feed_forward;
mod moe;
mod ops;
mod resting;
#[cfg(test)]
mod tests;
mod workspaces;

use moefold_profiles::{Dtype, Precision, TensorClass as Class};

use self::attention::AttentionSaved;
use self::feed_forward::FeedForwardSaved;
use self::ops::Pass;
pub use self::resting::{GRAIN, embedding_padding, head_padding, layer_padding};
pub use self::workspaces::{AttentionWork, Device};
use crate::local::Local;
use crate::memory::passes::Passes;
use crate::memory::tape::{Held, Level};
use crate::model::{Gqa, Layer, Mixer, Model};
use crate::saved::SavedTensor;
use crate::shard;

/// Where passes run: one rank, with what one microbatch is to it.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// The model.
    pub model: &'a Model,
    /// The microbatch on this rank.
    pub local: &'a Local,
    /// Vocabulary entries of this rank: the last of TP ranks may have fewer than the others.
    pub vocab: u64,
    /// Type of activations.
    pub dtype: Dtype,
    /// What runs the ops.
    pub device: Device,
    /// Whether routers have a load-balancing loss.
    pub balanced: bool,
}

impl<'a> Site<'a> {
    /// A rank that trains in `precision`, without a load-balancing loss; the fullest of its group.
    pub fn new(model: &'a Model, local: &'a Local, precision: Precision, device: Device) -> Self {
        Self {
            model,
            local,
            vocab: shard::vocab(model, local),
            dtype: precision.activation(),
            device,
            balanced: false,
        }
    }

    /// A tensor that was there before.
    fn stream(&self) -> Held {
        let elements = self.local.tokens_local * self.model.hidden;
        Held::given(Class::Activations, self.dtype, elements)
    }

    fn pass(&self) -> Pass<'_> {
        Pass::new(self)
    }

    /// What a layer keeps between its passes.
    pub fn saved(&self, layer: &Layer) -> Vec<SavedTensor> {
        let (_, saved) = LayerSaved::forward(&mut self.pass(), layer, self.stream());
        saved.list()
    }

    /// Both passes of a layer.
    pub fn layer(&self, layer: &Layer) -> Passes {
        let (mut forward, mut backward) = (self.pass(), self.pass());
        // Output and gradient are the next block's.
        let (_, saved) = LayerSaved::forward(&mut forward, layer, self.stream());
        let _ = saved.backward(&mut backward, layer, self.stream());
        Passes::of(&forward.tape, &backward.tape)
    }

    /// What a rank holds throughout a step beside its state: rotations, the step's sums, and ids and
    /// targets of all its microbatches.
    pub fn standing(&self, microbatches: u64) -> Level {
        let mut pass = self.pass();
        let rotated = self
            .model
            .layers
            .iter()
            .find_map(|layer| match &layer.mixer {
                Some(Mixer::Gqa(gqa)) if gqa.rotary_dim > 0 => Some(gqa.rotary_dim),
                _ => None,
            });
        let angles = self.local.tokens * (rotated.unwrap_or(2) / 2);
        let _cosines = pass.take(Class::Transient, Dtype::F32, angles);
        let _sines = pass.take(Class::Transient, Dtype::F32, angles);
        // Losses, and the squares of the gradients; numbers of the host on the CPU.
        if self.device != Device::Cpu {
            let _sums = pass.take(Class::Transient, Dtype::F32, 3);
        }
        let _ids = pass.integers(microbatches * self.local.tokens);
        let _targets = pass.integers(microbatches * self.local.tokens);
        pass.tape.live()
    }

    /// The highest of what follows the last backward pass, above what stands: key and value gradients of
    /// TP ranks that share heads, side by side. Sums over gradients take less than any pass does.
    pub fn update(&self) -> Level {
        let mut pass = self.pass();
        for layer in &self.model.layers {
            if let Some(Mixer::Gqa(gqa)) = &layer.mixer
                && self.local.tp > gqa.kv_heads
            {
                let all = gqa.kv_heads * gqa.head_dim * self.model.hidden;
                pass.tape.work_in(Dtype::F32, all);
            }
        }
        pass.tape.peak()
    }
}

/// What a layer keeps for backward.
struct LayerSaved {
    attention: Option<AttentionSaved>,
    feed_forward: Option<FeedForwardSaved>,
}

impl LayerSaved {
    fn forward(pass: &mut Pass<'_>, layer: &Layer, x: Held) -> (Held, Self) {
        let (x, attention) = match &layer.mixer {
            Some(mixer) => {
                let (y, saved) = AttentionSaved::forward(pass, gqa(mixer), x);
                (y, Some(saved))
            }
            None => (x, None),
        };
        let (x, feed_forward) = match &layer.ffn {
            Some(ffn) => {
                let (y, saved) = FeedForwardSaved::forward(pass, ffn, x);
                (y, Some(saved))
            }
            None => (x, None),
        };
        let saved = Self {
            attention,
            feed_forward,
        };
        (x, saved)
    }

    fn backward(self, pass: &mut Pass<'_>, layer: &Layer, dy: Held) -> Held {
        let mut dx = dy;
        if let (Some(ffn), Some(saved)) = (&layer.ffn, self.feed_forward) {
            let gradient = saved.backward(pass, ffn);
            pass.give(std::mem::replace(&mut dx, gradient));
        }
        if let (Some(mixer), Some(saved)) = (&layer.mixer, self.attention) {
            let gradient = saved.backward(pass, gqa(mixer));
            pass.give(std::mem::replace(&mut dx, gradient));
        }
        dx
    }

    fn list(&self) -> Vec<SavedTensor> {
        let attention = self.attention.iter().flat_map(AttentionSaved::list);
        let feed_forward = self.feed_forward.iter().flat_map(FeedForwardSaved::list);
        attention.chain(feed_forward).collect()
    }
}

/// The only mixer that the executor runs.
fn gqa(mixer: &Mixer) -> Option<&Gqa> {
    match mixer {
        Mixer::Gqa(gqa) => Some(gqa),
        _ => None,
    }
}

/// Entries of a declaration, those without elements left out.
fn list<'h>(
    module: &'static str,
    tensors: impl IntoIterator<Item = (&'static str, &'h Held)>,
) -> Vec<SavedTensor> {
    let saved = |(name, held): (&'static str, &Held)| SavedTensor {
        module,
        name,
        elements: held.elements(),
        dtype: held.dtype(),
    };
    let all = tensors.into_iter().map(saved);
    all.filter(|saved| saved.elements > 0).collect()
}
