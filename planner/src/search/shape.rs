//! [`Shape`]: everything about a layer that does not depend on the pipeline, worked out once for all
//! layouts that agree on the other degrees.
//!
//! A model of a hundred layers has two or three kinds of them; kinds are priced, layers are counted.

use moefold_profiles::Cluster;
use moefold_profiles::pricing::Costs;
use moefold_profiles::units::Bytes;

use crate::kept::{self, Local};
use crate::layout::Layout;
use crate::lower::{self, LayerGroups, Lowered, Setting};
use crate::memory::StageMemory;
use crate::model::{Layer, Model};
use crate::options::SearchOptions;
use crate::plan::{Dispatcher, Recompute};
use crate::price::LayerBill;
use crate::shard;
use crate::stack::Stack;

/// The inputs of a search that stay the same throughout.
pub(crate) struct Question<'a> {
    pub(crate) model: &'a Model,
    pub(crate) cluster: &'a Cluster,
    pub(crate) options: &'a SearchOptions,
    pub(crate) costs: &'a Costs,
    pub(crate) stack: Stack,
    /// Recompute sets tried.
    pub(crate) sets: Vec<Recompute>,
    /// Dispatchers tried.
    pub(crate) dispatchers: Vec<Dispatcher>,
    /// Kind of each decoder layer, an index into `distinct`.
    pub(crate) kind_of: Vec<usize>,
    /// The distinct decoder layers.
    pub(crate) distinct: Vec<&'a Layer>,
}

/// Time and memory of one kind of layer, or of an end of the model.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    pub(crate) lowered: Lowered,
    pub(crate) bill: LayerBill,
    /// Forward seconds, the host's excess included.
    pub(crate) forward_s: f64,
    /// Backward seconds by recompute set.
    pub(crate) backward_s: Vec<f64>,
    /// Memory by recompute set.
    pub(crate) memory: Vec<StageMemory>,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) dispatcher: Dispatcher,
    pub(crate) local: Local,
    pub(crate) kinds: Vec<Kind>,
    pub(crate) embedding: Kind,
    /// Norm, head, loss and all multi-token-prediction depths.
    pub(crate) head: Kind,
}

impl Shape {
    /// Works out the shape of a layout under a dispatcher.
    pub(crate) fn new(question: &Question<'_>, layout: &Layout, dispatcher: Dispatcher) -> Self {
        let options = question.options;
        let local = Local::new(layout, question.model, &options.batch, options.load);
        let groups = LayerGroups::new(layout, question.cluster);
        let setting = Setting {
            model: question.model,
            local: &local,
            groups: &groups,
            precision: options.precision,
            dispatcher,
        };
        let kinds = question
            .distinct
            .iter()
            .map(|layer| {
                let memory = layer_memory(question, &local, layer);
                question.kind(lower::layer(&setting, layer), memory)
            })
            .collect();
        Self {
            dispatcher,
            local,
            kinds,
            embedding: embedding(question, &setting),
            head: head(question, &setting),
        }
    }
}

impl Question<'_> {
    fn kind(&self, lowered: Lowered, memory: Vec<StageMemory>) -> Kind {
        let bill = LayerBill::new(&lowered, self.costs, &self.stack);
        let seconds = |bill: &crate::price::Bill| bill.device() + bill.host_excess(&self.stack);
        Kind {
            forward_s: seconds(&bill.forward),
            backward_s: self
                .sets
                .iter()
                .map(|set| seconds(&bill.backward_with(set)))
                .collect(),
            lowered,
            bill,
            memory,
        }
    }
}

/// Memory of one decoder layer under every recompute set.
fn layer_memory(question: &Question<'_>, local: &Local, layer: &Layer) -> Vec<StageMemory> {
    let (model, precision) = (question.model, question.options.precision);
    let shard = shard::layer(model, layer, local);
    question
        .sets
        .iter()
        .map(|set| {
            let (forward, backward) = question
                .stack
                .transient(model, layer, local, precision, set);
            StageMemory {
                shard,
                kept: kept::bytes(question.stack.name, model, layer, local, precision, set),
                forward,
                backward,
                logits: Bytes::ZERO,
            }
        })
        .collect()
}

fn embedding(question: &Question<'_>, setting: &Setting<'_>) -> Kind {
    let memory = StageMemory {
        shard: shard::embedding(question.model, setting.local),
        ..StageMemory::default()
    };
    question.kind(
        lower::ends::embedding(setting),
        vec![memory; question.sets.len()],
    )
}

/// The head with the multi-token-prediction depths, which sit on the same stage.
fn head(question: &Question<'_>, setting: &Setting<'_>) -> Kind {
    let (model, local) = (question.model, setting.local);
    let wide = setting.precision.activation();
    let vocab = shard::vocab(model, local);
    let width = local.tokens_local * model.hidden;
    let mut lowered = lower::ends::head(setting);
    // A tied head on one rank with the embedding is the same matrix; the caller takes it off.
    let end = StageMemory {
        shard: shard::head(model, local),
        // Input and output of the final norm.
        kept: wide.bytes(2 * width),
        logits: question.stack.logits(local.tokens, vocab),
        ..StageMemory::default()
    };
    let mut memory = vec![end; question.sets.len()];
    for (layer, shard) in model.mtp.iter().zip(shard::mtp(model, local)) {
        let depth = lower::ends::mtp(setting, layer);
        lowered.forward.extend(depth.forward);
        lowered.backward.extend(depth.backward);
        let inner = layer_memory(question, local, layer);
        for (end, inner) in memory.iter_mut().zip(&inner) {
            let inner = StageMemory { shard, ..*inner };
            end.add_layer(&inner);
            // Two norms' inputs, the projection's input of twice the width, the final norm's two;
            // the depth's logits wait, as the main head's, for the backward pass.
            end.kept += wide.bytes(6 * width);
            end.logits += question.stack.logits(local.tokens, vocab);
        }
    }
    question.kind(lowered, memory)
}
