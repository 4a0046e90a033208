//! Which recompute sets are worth trying for a model, and [`Sets`]: which of them each layer takes.
//!
//! A module that a model lacks changes nothing, and the core of flash attention keeps next to nothing
//! (Megatron-Bridge's Moonlight study: -0.004 GB for +3.9 % time), so it is left to the user. The
//! whole MoE layer is tried with the savers of attention; everything at once is `full`.

use crate::choice::{Module, Recompute, RecomputePlan};
use crate::model::{Ffn, Mixer, Model};

/// The sets in a fixed order, `none` first and `full` last.
pub(crate) fn sets(model: &Model) -> Vec<Recompute> {
    let latent = model
        .layers
        .iter()
        .any(|layer| matches!(layer.mixer, Some(Mixer::Mla(_) | Mixer::SharedKv(_))));
    let dense = model
        .layers
        .iter()
        .any(|layer| matches!(layer.ffn, Some(Ffn::Dense(_))));
    let moe = model.num_moe_layers() > 0;
    let shared = model.moe().is_some_and(|moe| moe.shared.is_some());
    let mut attention = vec![Module::Layernorm];
    attention.extend(latent.then_some(Module::MlaUpProj));
    attention.extend(dense.then_some(Module::Mlp));
    let mut experts = Vec::new();
    experts.extend(moe.then_some(Module::MoeAct));
    experts.extend(shared.then_some(Module::SharedExperts));

    let mut modules = attention.clone();
    modules.extend(experts);
    let mut sets: Vec<Recompute> = subsets(&modules);
    if moe {
        for mut set in modules_of(&attention) {
            set.push(Module::Moe);
            sets.push(Recompute::of(set));
        }
    }
    sets.push(Recompute::Full);
    sets
}

fn subsets(modules: &[Module]) -> Vec<Recompute> {
    modules_of(modules).into_iter().map(Recompute::of).collect()
}

fn modules_of(modules: &[Module]) -> Vec<Vec<Module>> {
    (0..1_u32 << modules.len())
        .map(|bits| {
            modules
                .iter()
                .enumerate()
                .filter(|(index, _)| bits >> index & 1 == 1)
                .map(|(_, &module)| module)
                .collect()
        })
        .collect()
}

/// The recompute set of each layer, by its index among those of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Sets {
    /// All layers take this one.
    Every(usize),
    /// Each decoder layer takes one of its own; the first of all computes nothing again.
    Each(Vec<usize>),
    /// So many layers at the beginning of each stage take this one, all others the first of all, which computes
    /// nothing again.
    First {
        /// Layers of a stage; of one that has no more, all.
        layers: u32,
        /// Theirs.
        set: usize,
    },
}

impl Sets {
    /// What layers chose one by one, which may be alike.
    pub(crate) fn each(sets: Vec<usize>) -> Self {
        match sets.split_first() {
            Some((first, others)) if others.iter().all(|set| set == first) => Self::Every(*first),
            _ => Self::Each(sets),
        }
    }

    /// That of a decoder layer that has some number of layers before it in its stage.
    pub(crate) fn of(&self, layer: u32, before: u32) -> usize {
        match self {
            Self::Every(set) => *set,
            Self::Each(sets) => sets[layer as usize],
            Self::First { layers, set } if before < *layers => *set,
            Self::First { .. } => 0,
        }
    }

    /// That of a decoder layer in a stage where it takes the least time: behind all that may take another set.
    pub(crate) fn least(&self, layer: u32) -> usize {
        self.of(layer, u32::MAX)
    }

    /// That of the ends of the model. Where layers differ, the ends are of a stack that runs nothing of
    /// them again, or computes again at the beginning of stages alone (Megatron-Core's `recompute_method` block leaves depths
    /// of multi-token prediction out: `megatron/core/transformer/multi_token_prediction.py`).
    pub(crate) fn of_ends(&self) -> usize {
        match self {
            Self::Every(set) => *set,
            Self::Each(_) | Self::First { .. } => 0,
        }
    }
}

/// The sets of a plan, and the one choice of them that it is.
pub(crate) fn of_plan(plan: &RecomputePlan, model: &Model) -> (Vec<Recompute>, Vec<Sets>) {
    if let Some(set) = plan.alike() {
        return (vec![set.clone()], vec![Sets::Every(0)]);
    }
    if let Some(layers) = plan.block() {
        let first = Sets::First {
            layers: layers.get(),
            set: 1,
        };
        return (vec![Recompute::None, Recompute::Full], vec![first]);
    }
    let mut sets = vec![Recompute::None];
    let place = |layer| {
        let set = plan.of_layer(layer);
        sets.iter()
            .position(|known| known == set)
            .unwrap_or_else(|| {
                sets.push(set.clone());
                sets.len() - 1
            })
    };
    let each = (0..model.layers.len() as u32).map(place).collect();
    (sets, vec![Sets::Each(each)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    #[test]
    fn law_only_modules_that_a_model_has_are_tried() {
        for name in presets::names() {
            let model = presets::load(name).expect("a preset");
            let present = Module::of(&model);
            for set in sets(&model) {
                if let Recompute::Modules(modules) = set {
                    assert!(modules.iter().all(|m| present.contains(m)), "{name}");
                }
            }
        }
    }
}
