//! [`StageMemory`]: what a layer, an end of the model or a run of them takes of a rank.

use moefold_profiles::TensorClass;
use moefold_profiles::units::Bytes;

use super::level::{Height as _, Level};
use super::passes::{Passes, Running};
use crate::shard::Shard;

/// Working sets on top of all that a stage keeps, for stacks that say no order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkingSets {
    /// Of a forward pass.
    pub forward: Bytes,
    /// Of a backward pass.
    pub backward: Bytes,
    /// Logits and loss buffers, between the head's forward and its backward.
    pub logits: Bytes,
    /// Of the head's backward, beside the logits.
    pub head: Bytes,
    /// Of the embedding's backward, which comes last, when nothing is left of what the layers behind it had saved.
    pub embedding: Bytes,
}

impl WorkingSets {
    /// Those of layers that are alike besides: logits add up, of the others the largest counts.
    fn merge(&mut self, layer: &Self, count: u32) {
        self.forward = self.forward.max(layer.forward);
        self.backward = self.backward.max(layer.backward);
        self.logits += layer.logits * u64::from(count);
        self.head = self.head.max(layer.head);
        self.embedding = self.embedding.max(layer.embedding);
    }

    /// Working set and logits of the worst instant of a pass. The head's backward comes first and
    /// frees the logits before the layers run theirs.
    fn running(&self, backward: bool) -> Level {
        let layers = if backward {
            self.backward
        } else {
            self.forward
        };
        let head = if backward { self.head } else { Bytes::ZERO };
        let transient = |bytes| Level::of(TensorClass::Transient, bytes);
        if self.logits + head > layers {
            transient(head) + Level::of(TensorClass::Logits, self.logits)
        } else {
            transient(layers)
        }
    }
}

/// What one stage (chunk) of a rank takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageMemory {
    /// Parameters.
    pub shard: Shard,
    /// Elements between them where buffers rest, by the same division.
    pub padding: Shard,
    /// What stands beside parameters, their gradients and the optimizer's state: buffers of modules.
    pub beside: Level,
    /// What one microbatch keeps and, in stacks that say in what order, works in.
    pub passes: Passes,
    /// What it works in besides.
    pub sets: WorkingSets,
    /// The most that completing its gradients has alive, beside what the rank holds.
    pub update: Level,
}

impl StageMemory {
    /// Adds layers that are alike and come after those that are there.
    pub fn add_layers(&mut self, layer: &Self, count: u32) {
        let times = u64::from(count);
        self.shard += layer.shard * times;
        self.padding += layer.padding * times;
        self.beside = self.beside + layer.beside * i64::from(count);
        self.passes = self.passes.then(layer.passes.repeated(count));
        self.sets.merge(&layer.sets, count);
        self.update = self.update.higher(layer.update);
    }

    /// The same of a whole stage, which may begin with a message, end with one, or both.
    pub(crate) fn between(mut self, message: Level, received: bool, sent: bool) -> Self {
        let [received, sent] = [received, sent].map(|is_there| message * i64::from(is_there));
        self.passes = self.passes.staying().between(received, sent);
        self
    }

    /// Bytes alive in the worst instant of a pass, the microbatch's own kept tensors not counted.
    pub(crate) fn running(&self, pass: Running) -> Level {
        let layers = self.working(pass);
        if pass == Running::Forward {
            return layers;
        }
        layers.higher(self.last() - self.passes.saved)
    }

    /// The same of its layers and the head.
    pub(crate) fn working(&self, pass: Running) -> Level {
        self.passes.running(pass) + self.sets.running(pass != Running::Forward)
    }

    /// What it works in when all of its layers have run backward.
    pub(crate) fn last(&self) -> Level {
        Level::of(TensorClass::Transient, self.sets.embedding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers that save 10 each and work in 7, behind an embedding whose gradient takes so much: the peak of one
    /// microbatch alone, played.
    #[test]
    fn golden_the_gradient_of_the_embedding_comes_when_layers_are_through() {
        for (layers, gradient, expected) in [(3, 20, 37), (3, 36, 37), (3, 38, 38), (1, 20, 20)] {
            let mut stage = StageMemory {
                sets: WorkingSets {
                    embedding: Bytes(gradient),
                    ..WorkingSets::default()
                },
                ..StageMemory::default()
            };
            let layer = StageMemory {
                passes: Passes::keeping(Bytes(10)),
                sets: WorkingSets {
                    backward: Bytes(7),
                    ..WorkingSets::default()
                },
                ..StageMemory::default()
            };
            stage.add_layers(&layer, layers);
            let above = stage.running(Running::Backward);
            let peak = (stage.passes.saved + above).total();
            assert_eq!(peak, expected, "{layers} {gradient}");
            let forward = stage.passes.saved + stage.running(Running::Forward);
            assert_eq!(forward.total(), 10 * i64::from(layers));
        }
    }
}
