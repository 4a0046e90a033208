//! Which recompute sets are worth trying for a model.
//!
//! A module that a model lacks changes nothing, and the core of flash attention keeps next to nothing
//! (Megatron-Bridge's Moonlight study: -0.004 GB for +3.9 % time), so it is left to the user. The
//! whole MoE layer is tried with the savers of attention; everything at once is `full`.

use crate::model::{Ffn, Mixer, Model};
use crate::options::PlanError;
use crate::plan::{Module, Recompute};

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

/// Refuses modules that no layer of the model has.
pub(crate) fn check(set: &Recompute, model: &Model) -> Result<(), PlanError> {
    let Recompute::Modules(wanted) = set else {
        return Ok(());
    };
    let known = modules(model);
    let names = |modules: &mut dyn Iterator<Item = &Module>| {
        let names: Vec<&str> = modules.map(|module| module.name()).collect();
        names.join(", ")
    };
    let absent = names(&mut wanted.iter().filter(|module| !known.contains(module)));
    if absent.is_empty() {
        return Ok(());
    }
    let expected = format!(
        "modules that {} has: {}",
        model.name,
        names(&mut known.iter())
    );
    Err(PlanError::value("--recompute", &absent, &expected))
}

/// The modules that some layer of a model has, MTP depths included.
fn modules(model: &Model) -> Vec<Module> {
    let mut found = Vec::new();
    for layer in model.layers.iter().chain(&model.mtp) {
        match &layer.mixer {
            Some(Mixer::Mla(_) | Mixer::SharedKv(_)) => {
                found.extend([Module::CoreAttn, Module::MlaUpProj]);
            }
            Some(Mixer::Gqa(_) | Mixer::Linear(_)) => found.push(Module::CoreAttn),
            None => {}
        }
        match &layer.ffn {
            Some(Ffn::Dense(_)) => found.push(Module::Mlp),
            Some(Ffn::Moe(moe)) => {
                found.extend([Module::MoeAct, Module::Moe]);
                found.extend(moe.shared.as_ref().map(|_| Module::SharedExperts));
            }
            None => {}
        }
        found.push(Module::Layernorm);
    }
    found.sort_unstable();
    found.dedup();
    found
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    #[test]
    fn modules_that_no_layer_has_are_refused_with_those_there_are() {
        let mixtral = presets::load("mixtral-8x7b").expect("a preset");
        let wanted = Recompute::of(vec![
            Module::MlaUpProj,
            Module::SharedExperts,
            Module::MoeAct,
        ]);
        let message = check(&wanted, &mixtral).expect_err("absent").to_string();
        for expected in [
            "--recompute: found `mla_up_proj, shared_experts`",
            "core_attn, layernorm, moe_act, moe",
        ] {
            assert!(message.contains(expected), "{message}");
        }
        let deepseek = presets::load("deepseek-v3").expect("a preset");
        assert!(check(&wanted, &deepseek).is_ok());
        for name in presets::names() {
            let model = presets::load(name).expect("a preset");
            for set in sets(&model) {
                assert!(check(&set, &model).is_ok(), "{name}: {set:?}");
            }
        }
    }
}
