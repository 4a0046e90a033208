//! Models known by name: small configurations embedded in the program.
//!
//! The files under `planner/models/` are written for this project in the shape of a Hugging Face
//! `config.json`, with the keys that matter here only; [`Preset::source`] says where each one's values
//! come from. They go through the same reader as anyone's file. What they count to is tested
//! against parameter sums of real module trees in [`super::count`].

use super::resolve::{Found, look_up};
use super::{Model, ModelError, hf};

/// A model known by name.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Its name, after the repository on the Hugging Face hub.
    pub name: &'static str,
    /// Where its values come from.
    pub source: &'static str,
    /// Made for this program: small, for runs on a CPU.
    pub ours: bool,
    json: &'static str,
}

macro_rules! preset {
    ($name:literal, $source:expr) => {
        preset!($name, $source, false)
    };
    ($name:literal, $source:expr, $ours:literal) => {
        Preset {
            name: $name,
            source: $source,
            ours: $ours,
            json: include_str!(concat!("../../models/", $name, ".json")),
        }
    };
}

/// Collections of configurations, at the commits that were read.
mod from {
    /// NVIDIA's copies of hub files, and MaxText's table of them, agreeing.
    pub(super) const A_M: &str = "the model's config.json on the Hugging Face hub, as kept in \
        github.com/ai-dynamo/aiconfigurator@095f58a and, agreeing, in \
        github.com/AI-Hypercomputer/maxtext@e591f30";
    /// NVIDIA's copies of hub files.
    pub(super) const A: &str = "the model's config.json on the Hugging Face hub, as kept in \
        github.com/ai-dynamo/aiconfigurator@095f58a";
    /// Megatron-Bridge and the Megatron MoE model zoo, agreeing.
    pub(super) const B_Z: &str = "the model's config.json on the Hugging Face hub, as kept in \
        github.com/NVIDIA-NeMo/Megatron-Bridge@067f987 tests and, agreeing, in \
        github.com/yanring/Megatron-MoE-ModelZoo@e865051";
    /// Megatron-Bridge.
    pub(super) const B: &str = "the model's config.json on the Hugging Face hub, as kept in \
        github.com/NVIDIA-NeMo/Megatron-Bridge@067f987 tests";
    /// Small ones of our own.
    pub(super) const OURS: &str = "made for this program";
}

const PRESETS: &[Preset] = &[
    preset!("DeepSeek-V2", from::B_Z),
    preset!(
        "DeepSeek-V2-Lite",
        "the model's config.json on the Hugging Face hub, as kept in \
         github.com/AI-Hypercomputer/maxtext@e591f30"
    ),
    preset!("DeepSeek-V3", from::A_M),
    preset!("DeepSeek-V3.2", from::A_M),
    preset!("DeepSeek-V4-Flash", from::A_M),
    preset!("DeepSeek-V4-Pro", from::A),
    preset!("GLM-4.5", from::B),
    preset!("GLM-4.5-Air", from::B),
    preset!("GLM-5", from::A),
    preset!("Kimi-K2-Instruct", from::A),
    preset!(
        "Ling-1T",
        "keys from the Ling-V2 exporter of github.com/NVIDIA-NeMo/Megatron-Bridge@067f987, sizes \
         from github.com/MooreThreads/SimuMax@4dcaae5; n_group and topk_group not verified"
    ),
    preset!("Ling-mini-2.0", from::B),
    preset!("Llama-3.1-405B", from::A_M),
    preset!("Llama-3.1-70B", from::A_M),
    preset!("Llama-3.1-8B", from::A_M),
    preset!("Llama-4-Maverick-17B-128E", from::A),
    preset!("Llama-4-Scout-17B-16E", from::A),
    preset!("Meta-Llama-3-70B", from::A_M),
    preset!("Meta-Llama-3-8B", from::A_M),
    preset!("MiniMax-M2", from::A),
    preset!(
        "MiniMax-Text-01",
        "the config.json of MiniMax-M1 (the same network) on the Hugging Face hub, and the module \
         listing of MiniMax-Text-01"
    ),
    preset!("Mixtral-8x22B-v0.1", from::A_M),
    preset!("Mixtral-8x7B-v0.1", from::A_M),
    preset!("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", from::A),
    preset!("OLMoE-1B-7B-0924", from::B),
    preset!(
        "Phi-3.5-MoE-instruct",
        "the defaults of transformers 5.23's phimoe, which are this model; long-context rotary \
         factors left out"
    ),
    preset!(
        "Qwen1.5-MoE-A2.7B",
        "the defaults of transformers 5.23's qwen2_moe and public copies of the hub's config.json"
    ),
    preset!(
        "Qwen2-57B-A14B",
        "a public copy of the hub's config.json, and, agreeing, \
         github.com/yanring/Megatron-MoE-ModelZoo@e865051"
    ),
    preset!("Qwen3-235B-A22B", from::A_M),
    preset!("Qwen3-30B-A3B", from::A_M),
    preset!("Qwen3-32B", from::A_M),
    preset!("Qwen3-8B", from::A_M),
    preset!("Qwen3-Coder-480B-A35B-Instruct", from::A_M),
    preset!("Qwen3-Next-80B-A3B-Instruct", from::B_Z),
    preset!(
        "dbrx-base",
        "a public copy of dbrx-instruct's config.json (the same network)"
    ),
    preset!("gpt-oss-120b", from::A_M),
    preset!("gpt-oss-20b", from::A_M),
    preset!(
        "granite-3.1-1b-a400m-instruct",
        "public copies of the hub's config.json"
    ),
    preset!(
        "granite-3.1-3b-a800m-instruct",
        "a public copy of the hub's config.json; multipliers as the 1b model has them"
    ),
    preset!("bench-deepseek-v3", from::OURS, true),
    preset!("bench-mixtral", from::OURS, true),
    preset!("bench-qwen3-moe", from::OURS, true),
    preset!("quickstart", from::OURS, true),
    preset!("tiny-mixtral", from::OURS, true),
];

/// Every preset: the published models in alphabetical order, then our own.
pub fn all() -> &'static [Preset] {
    PRESETS
}

/// The names of all presets.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.name)
}

/// Loads the preset a name means. Case and punctuation do not matter, a unique beginning or part
/// is enough, and an owner before a slash is ignored.
pub fn load(name: &str) -> Result<Model, ModelError> {
    find(name)?.load()
}

/// The preset a name means.
pub fn find(name: &str) -> Result<&'static Preset, ModelError> {
    let all: Vec<&str> = names().collect();
    match look_up(name, &all) {
        Found::One(index) => Ok(&PRESETS[index]),
        Found::Many(indices) => Err(ModelError::AmbiguousName {
            name: name.to_owned(),
            candidates: indices
                .into_iter()
                .map(|index| all[index])
                .collect::<Vec<_>>()
                .join(", "),
        }),
        Found::None(nearest) => Err(ModelError::UnknownName {
            name: name.to_owned(),
            nearest: nearest.join(", "),
        }),
    }
}

impl Preset {
    /// Reads it.
    pub fn load(&self) -> Result<Model, ModelError> {
        hf::parse(self.name, self.json)
    }

    /// Its configuration, as a Hugging Face `config.json`.
    pub fn config(&self) -> &'static str {
        self.json
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_every_preset_loads_under_its_own_name() {
        for preset in all() {
            let model = load(preset.name).expect(preset.name);
            assert_eq!(model.name, preset.name);
        }
        assert_eq!(all().iter().filter(|preset| !preset.ours).count(), 39);
    }

    fn check(asked: &str, meant: &str) {
        assert_eq!(find(asked).expect(asked).name, meant);
    }

    #[test]
    fn names_are_found_by_case_beginning_and_part() {
        check("mixtral-8x22b", "Mixtral-8x22B-v0.1");
        check("mixtral-8x7b", "Mixtral-8x7B-v0.1");
        check("deepseek-v3", "DeepSeek-V3");
        check("deepseek-v3.2", "DeepSeek-V3.2");
        check("DeepSeek-V2-Lite", "DeepSeek-V2-Lite");
        check("qwen3-30b-a3b", "Qwen3-30B-A3B");
        check("qwen3-30b", "Qwen3-30B-A3B");
        check("Qwen/Qwen3-235B-A22B", "Qwen3-235B-A22B");
        check("kimi-k2", "Kimi-K2-Instruct");
        check("llama3-8b", "Meta-Llama-3-8B");
        check("llama3.1-405b", "Llama-3.1-405B");
        check("nemotron", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16");
        check("gpt_oss_120b", "gpt-oss-120b");
        check("quickstart", "quickstart");
    }

    #[test]
    fn an_ambiguous_or_unknown_name_lists_what_would_work() {
        let error = find("mixtral").expect_err("two models fit").to_string();
        assert!(error.contains("Mixtral-8x22B-v0.1"), "{error}");
        assert!(error.contains("Mixtral-8x7B-v0.1"), "{error}");
        let error = find("deepsek-v3").expect_err("misspelt").to_string();
        assert!(error.contains("nearest presets: DeepSeek-V3"), "{error}");
        assert!(find("").is_err());
    }
}
