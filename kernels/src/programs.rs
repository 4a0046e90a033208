//! [`programs`]: every program that ops launch for the models there are presets of.
//!
//! What is compiled ahead into a pack and checked in tests: machine code exists for every
//! architecture a program is for, keeps to the declared limits, and shows the instructions it is
//! about. An op that can launch a specialization lists it here, or pays for its first launch.

use std::collections::{HashMap, HashSet};
use std::sync::OnceLock;

use crate::cuda::program::{Listed, Program};

/// The programs of all ops.
pub fn programs() -> Vec<Listed> {
    [
        crate::adamw::programs(),
        crate::attention::cuda::programs(),
        crate::cross_entropy::programs(),
        crate::cuda::model::programs(),
        crate::elementwise::programs(),
        crate::embedding::programs(),
        crate::expert_bias::programs(),
        crate::gate::programs(),
        crate::gemm::cuda::programs(),
        crate::latent_kv::cuda::programs(),
        crate::merge::programs(),
        crate::permute::cuda::programs(),
        crate::reduce::cuda::programs(),
        crate::rms_norm::programs(),
        crate::rope::programs(),
        crate::router::cuda::programs(),
        crate::rows::cuda::programs(),
        crate::scalars::programs(),
        crate::sinks::programs(),
        crate::swiglu::cuda::programs(),
        crate::total::programs(),
        crate::z_loss::programs(),
    ]
    .concat()
}

/// Fails where an op launches what it does not list, and a model might ask for it. A machine of tests asks it of every
/// program, so those that launch one nobody checks against its limits find it out.
///
/// # Panics
/// When the program should be listed and is not.
pub fn expect_listed(program: &Program) {
    static LISTED: OnceLock<HashMap<&'static str, HashSet<Program>>> = OnceLock::new();
    let listed = LISTED.get_or_init(|| {
        let mut listed: HashMap<_, HashSet<_>> = HashMap::new();
        for one in programs() {
            let stem = one.program.source.stem;
            listed.entry(stem).or_default().insert(one.program);
        }
        listed
    });
    let stem = program.source.stem;
    let unlike_models = match stem {
        "attention" | "attention_sm90" => crate::attention::cuda::is_unlike_models(program),
        "gemm" | "gemm_f32" | "grouped_gemm_sm90" => crate::gemm::cuda::is_unlike_models(program),
        // There is one for any number of experts.
        "router" => true,
        // Not an op's, where no op lists the source.
        _ => !listed.contains_key(stem),
    };
    assert!(
        unlike_models || listed[stem].contains(program),
        "{program} is launched and not in the list of its op (`programs`)"
    );
}

#[cfg(test)]
mod tests {
    use moefold_profiles::Dtype;

    use super::*;
    use crate::cuda::program::{Define, Source};

    #[test]
    fn every_program_is_listed_once() {
        let mut all: Vec<String> = programs()
            .iter()
            .map(|one| one.program.to_string())
            .collect();
        let len = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), len);
    }

    #[test]
    #[should_panic(
        expected = "rope.cu -DT=bf16 -DVEC=2 -DNEIGHBOURS=0 is launched and not in the list"
    )]
    fn a_program_that_is_not_listed_is_found() {
        let source = Source {
            stem: "rope",
            text: "",
        };
        let types = Define::dtype("T", Dtype::Bf16);
        let others = [Define::int("VEC", 2), Define::flag("NEIGHBOURS", false)];
        expect_listed(&source.with(&[types, others[0], others[1]]));
    }

    #[test]
    #[should_panic(expected = "is launched and not in the list")]
    fn a_model_s_heads_are_not_excused() {
        let listed = crate::attention::cuda::programs();
        let mut program = listed[0].program.clone();
        program.defines.push(Define::flag("NEW", true));
        expect_listed(&program);
    }
}
