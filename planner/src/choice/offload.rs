//! [`Offload`]: whose saved tensors rest on the host between the passes.

use std::fmt;
use std::str::FromStr;

use moefold_profiles::nearest::instead;
use serde::{Deserialize, Serialize};

use super::recompute::{Module, Recompute};
use crate::model::{Ffn, Layer, Mixer, Model};

moefold_profiles::named! {
    /// Modules whose saved tensors can leave the device, in Megatron-Core's words (`--offload-modules`).
    pub enum OffloadModule {
        /// The norm before the mixer: its input, the residual stream.
        AttnNorm = "attn_norm",
        /// The projections into the mixer: their inputs.
        QkvLinear = "qkv_linear",
        /// The core of attention: queries, keys and values.
        CoreAttn = "core_attn",
        /// The output projection of the mixer: its input.
        AttnProj = "attn_proj",
        /// The norm before the feed-forward block: its input, the residual stream.
        MlpNorm = "mlp_norm",
        /// The first product of the experts: the rows that came to them.
        ExpertFc1 = "expert_fc1",
        /// The activation of the experts: its input, gate and up.
        MoeAct = "moe_act",
    }
}

impl OffloadModule {
    /// Whether a layer that computes `again` keeps what the module would move; recomputation wins where both
    /// cover a tensor.
    pub fn is_kept(self, layer: &Layer, again: &Recompute) -> bool {
        let (gqa, latent) = match &layer.mixer {
            Some(Mixer::Gqa(_)) => (true, false),
            Some(Mixer::Mla(_)) => (false, true),
            _ => (false, false),
        };
        let routed = matches!(layer.ffn, Some(Ffn::Moe(_)));
        let of = |module| !again.covers(module);
        match self {
            _ if *again == Recompute::Full => false,
            Self::AttnNorm => gqa || latent,
            // Of latent attention also the inputs of the up-projections, which stay.
            Self::QkvLinear => gqa && of(Module::Layernorm) || latent,
            Self::CoreAttn => gqa || latent && of(Module::MlaUpProj),
            Self::AttnProj => (gqa || latent) && of(Module::CoreAttn),
            Self::MlpNorm => layer.ffn.is_some(),
            Self::ExpertFc1 | Self::MoeAct => routed && of(Module::Moe),
        }
    }
}

/// Modules whose saved tensors rest on the host. In JSON and words: `"none"`, or a list of modules.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "Record", into = "Record")]
pub struct Offload {
    /// A bit each.
    modules: u8,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum Record {
    Word(String),
    Modules(Vec<OffloadModule>),
}

impl Offload {
    /// Nothing leaves the device.
    pub const NONE: Self = Self { modules: 0 };

    /// Some modules.
    pub fn of(modules: impl IntoIterator<Item = OffloadModule>) -> Self {
        let bits = modules.into_iter().map(|module| 1 << module as u8);
        Self {
            modules: bits.fold(0, |all, bit: u8| all | bit),
        }
    }

    /// All of a model.
    pub fn all(model: &Model) -> Self {
        Self::of(OffloadModule::ALL).kept(model, &|_| &Recompute::None)
    }

    /// Whether nothing leaves the device.
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }

    /// Whether a module's tensors do.
    pub fn covers(self, module: OffloadModule) -> bool {
        self.modules >> module as u8 & 1 == 1
    }

    /// The modules, in order.
    pub fn modules(self) -> impl Iterator<Item = OffloadModule> {
        OffloadModule::ALL
            .into_iter()
            .filter(move |&module| self.covers(module))
    }

    /// Those of its modules that some layer of a model keeps, where each layer computes `again`.
    #[must_use]
    pub fn kept<'a>(self, model: &Model, again: &dyn Fn(u32) -> &'a Recompute) -> Self {
        let layers = || (0..).zip(&model.layers);
        Self::of(
            self.modules().filter(|module| {
                layers().any(|(index, layer)| module.is_kept(layer, again(index)))
            }),
        )
    }

    /// As numbers that are told apart: of caches.
    pub fn bits(self) -> u8 {
        self.modules
    }
}

impl TryFrom<Record> for Offload {
    type Error = String;

    fn try_from(record: Record) -> Result<Self, String> {
        match record {
            Record::Modules(modules) => Ok(Self::of(modules)),
            Record::Word(word) if word == "none" => Ok(Self::NONE),
            Record::Word(word) => Err(expected(&word)),
        }
    }
}

impl From<Offload> for Record {
    fn from(offload: Offload) -> Self {
        if offload.is_none() {
            Self::Word("none".to_owned())
        } else {
            Self::Modules(offload.modules().collect())
        }
    }
}

fn expected(word: &str) -> String {
    let names = OffloadModule::ALL.map(OffloadModule::name);
    let instead = instead(word, names.into_iter().chain(["none"]));
    format!("none, or some of {}; {instead}", names.join(", "))
}

impl FromStr for Offload {
    type Err = String;

    /// Reads `none`, or modules with commas or pluses; the error is what was expected.
    fn from_str(words: &str) -> Result<Self, String> {
        if words == "none" {
            return Ok(Self::NONE);
        }
        let module = |word: &str| {
            let named = |module: &OffloadModule| module.name() == word.trim();
            let found = OffloadModule::ALL.into_iter().find(named);
            found.ok_or_else(|| expected(word.trim()))
        };
        let modules: Result<Vec<_>, _> = words.split([',', '+']).map(module).collect();
        Ok(Self::of(modules?))
    }
}

impl fmt::Display for Offload {
    /// As [`Offload::from_str`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("none");
        }
        let names: Vec<&str> = self.modules().map(OffloadModule::name).collect();
        f.write_str(&names.join("+"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_words_and_json_round_trip_and_old_files_are_read() {
        for words in ["none", "attn_norm", "core_attn+expert_fc1+moe_act"] {
            let offload: Offload = words.parse().expect(words);
            assert_eq!(offload.to_string(), words);
            let json = serde_json::to_string(&offload).expect("serializes");
            assert_eq!(
                serde_json::from_str::<Offload>(&json).expect(&json),
                offload
            );
        }
        assert_eq!(
            serde_json::from_str::<Offload>("\"none\"").ok(),
            Some(Offload::NONE)
        );
        let text = serde_json::to_string(&Offload::NONE).expect("serializes");
        assert_eq!(text, "\"none\"");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let error = "moe_act,fc3".parse::<Offload>().expect_err("no module");
        assert!(
            error.contains("`fc3`") && error.contains("expert_fc1"),
            "{error}"
        );
        assert!(serde_json::from_str::<Offload>("\"all\"").is_err());
    }

    #[test]
    fn recomputation_wins_where_both_cover_a_tensor() {
        let model = crate::model::presets::load("mixtral-8x7b").expect("a preset");
        let all = Offload::all(&model);
        assert_eq!(all, Offload::of(OffloadModule::ALL));
        for (set, left) in [
            (
                "layernorm",
                "attn_norm+core_attn+attn_proj+mlp_norm+expert_fc1+moe_act",
            ),
            (
                "core_attn",
                "attn_norm+qkv_linear+core_attn+mlp_norm+expert_fc1+moe_act",
            ),
            ("moe", "attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm"),
            ("full", "none"),
        ] {
            let set: Recompute = set.parse().expect(set);
            assert_eq!(all.kept(&model, &|_| &set).to_string(), left, "{set}");
        }
        let dense = crate::model::presets::load("llama-3.1-8b").expect("a preset");
        assert!(!Offload::all(&dense).covers(OffloadModule::ExpertFc1));
    }
}
