//! [`Recompute`]: what a layer computes again in the backward pass, and [`RecomputePlan`]: what each does.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use moefold_profiles::nearest::instead;
use serde::{Deserialize, Serialize};

use crate::model::{Ffn, Mixer, Model};

moefold_profiles::named! {
    /// Modules whose outputs can be dropped and computed again.
    pub enum Module {
        /// The attention core.
        CoreAttn = "core_attn",
        /// Up-projections of latent attention.
        MlaUpProj = "mla_up_proj",
        /// The norms before blocks.
        Layernorm = "layernorm",
        /// The experts' activation.
        MoeAct = "moe_act",
        /// The whole MoE layer, dispatch included.
        Moe = "moe",
        /// The dense MLP.
        Mlp = "mlp",
        /// The shared expert.
        SharedExperts = "shared_experts",
    }
}

impl Module {
    /// The modules that some layer of a model has, MTP depths included; sorted.
    pub fn of(model: &Model) -> Vec<Self> {
        let mut found = Vec::new();
        for layer in model.layers.iter().chain(&model.mtp) {
            match &layer.mixer {
                Some(Mixer::Mla(_) | Mixer::SharedKv(_)) => {
                    found.extend([Self::CoreAttn, Self::MlaUpProj]);
                }
                Some(Mixer::Gqa(_) | Mixer::Linear(_)) => found.push(Self::CoreAttn),
                None => {}
            }
            match &layer.ffn {
                Some(Ffn::Dense(_)) => found.push(Self::Mlp),
                Some(Ffn::Moe(moe)) => {
                    found.extend([Self::MoeAct, Self::Moe]);
                    found.extend(moe.shared.as_ref().map(|_| Self::SharedExperts));
                }
                None => {}
            }
            found.push(Self::Layernorm);
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// What a layer computes again in the backward pass. In JSON: `"none"`, `"full"` or a list of modules.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "RecomputeRecord", into = "RecomputeRecord")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// All of it, from its input.
    Full,
    /// The listed modules, sorted.
    Modules(Vec<Module>),
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum RecomputeRecord {
    Word(RecomputeWord),
    Modules(Vec<Module>),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RecomputeWord {
    None,
    Full,
}

impl From<RecomputeRecord> for Recompute {
    fn from(record: RecomputeRecord) -> Self {
        match record {
            RecomputeRecord::Word(RecomputeWord::None) => Self::None,
            RecomputeRecord::Word(RecomputeWord::Full) => Self::Full,
            RecomputeRecord::Modules(modules) => Self::of(modules),
        }
    }
}

impl From<Recompute> for RecomputeRecord {
    fn from(recompute: Recompute) -> Self {
        match recompute {
            Recompute::None => Self::Word(RecomputeWord::None),
            Recompute::Full => Self::Word(RecomputeWord::Full),
            Recompute::Modules(modules) => Self::Modules(modules),
        }
    }
}

impl Recompute {
    /// The set of some modules; an empty set is [`Recompute::None`].
    pub fn of(mut modules: Vec<Module>) -> Self {
        modules.sort_unstable();
        modules.dedup();
        if modules.is_empty() {
            Self::None
        } else {
            Self::Modules(modules)
        }
    }

    /// Whether a module's output is computed again.
    pub fn covers(&self, module: Module) -> bool {
        match self {
            Self::None => false,
            Self::Full => true,
            Self::Modules(modules) => modules.contains(&module),
        }
    }
}

impl FromStr for Recompute {
    type Err = String;

    /// Reads `none`, `full` or modules with commas or pluses; the error is what was expected.
    fn from_str(words: &str) -> Result<Self, String> {
        let module = |word: &str| {
            let named = |module: &Module| module.name() == word.trim();
            Module::ALL.into_iter().find(named).ok_or_else(|| {
                let names = Module::ALL.map(Module::name);
                let instead = instead(word, names.into_iter().chain(["none", "full"]));
                format!("none, full, or some of {}; {instead}", names.join(", "))
            })
        };
        match words {
            "none" => Ok(Self::None),
            "full" => Ok(Self::Full),
            _ => Ok(Self::of(
                words
                    .split([',', '+'])
                    .map(module)
                    .collect::<Result<_, _>>()?,
            )),
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Full => f.write_str("full"),
            Self::Modules(modules) => {
                let names: Vec<&str> = modules.iter().map(|module| module.name()).collect();
                f.write_str(&names.join("+"))
            }
        }
    }
}

/// What each decoder layer computes again. In JSON: what all do, as [`Recompute`] has it; a list of
/// `{"layers": [0, 1], "recompute": "full"}`, where layers that are not named compute nothing again; or
/// `{"block": 2}`, where so many layers at the beginning of each stage compute all again, and the others nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "PlanRecord", into = "PlanRecord")]
pub struct RecomputePlan(Form);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    /// Sets by layer, the last that of all layers from there on. Never empty; where there are several, layers
    /// beyond them compute nothing again.
    Layers(Vec<Recompute>),
    /// The first layers of each stage compute all again (Megatron-Core's `recompute_method` block).
    Block(NonZeroU32),
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected `recompute` as \"none\", \"full\", a list of modules, a list of `layers` with their `recompute`, or {\"block\": N} with N from 1 on"
)]
enum PlanRecord {
    Alike(Recompute),
    Layers(Vec<LayersRecord>),
    Block(BlockRecord),
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BlockRecord {
    block: NonZeroU32,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayersRecord {
    layers: Vec<u32>,
    recompute: Recompute,
}

/// No model has as many.
const MOST_LAYERS: u32 = 100_000;

/// What stands before the number of layers that compute all again of each stage.
const BLOCK: &str = "block-";

impl Default for RecomputePlan {
    fn default() -> Self {
        Recompute::None.into()
    }
}

impl From<Recompute> for RecomputePlan {
    fn from(set: Recompute) -> Self {
        Self(Form::Layers(vec![set]))
    }
}

impl TryFrom<PlanRecord> for RecomputePlan {
    type Error = String;

    fn try_from(record: PlanRecord) -> Result<Self, String> {
        match record {
            PlanRecord::Alike(set) => Ok(set.into()),
            PlanRecord::Layers(records) => {
                let records = records.into_iter();
                Self::of_groups(records.map(|record| (record.layers, record.recompute)))
            }
            PlanRecord::Block(record) => Ok(Self::first_of_stages(record.block)),
        }
    }
}

impl From<RecomputePlan> for PlanRecord {
    fn from(plan: RecomputePlan) -> Self {
        if let Some(set) = plan.alike() {
            return Self::Alike(set.clone());
        }
        if let Some(block) = plan.block() {
            return Self::Block(BlockRecord { block });
        }
        let groups = plan.groups().into_iter();
        let record = |(recompute, layers): (&Recompute, _)| LayersRecord {
            layers,
            recompute: recompute.clone(),
        };
        Self::Layers(groups.map(record).collect())
    }
}

impl RecomputePlan {
    /// From the sets of all layers of a model.
    pub fn by_layer(mut sets: Vec<Recompute>) -> Self {
        let alike = sets.windows(2).all(|pair| pair[0] == pair[1]);
        if sets.is_empty() || !alike {
            sets.push(Recompute::None);
        }
        while let [.., before, last] = sets.as_slice()
            && before == last
        {
            sets.pop();
        }
        Self(Form::Layers(sets))
    }

    /// All of so many layers at the beginning of each stage, and nothing of the others.
    pub fn first_of_stages(layers: NonZeroU32) -> Self {
        Self(Form::Block(layers))
    }

    /// From sets with their layers; others compute nothing again. The error is what is wrong.
    fn of_groups(groups: impl Iterator<Item = (Vec<u32>, Recompute)>) -> Result<Self, String> {
        let mut sets: Vec<Option<Recompute>> = Vec::new();
        for (layers, set) in groups {
            for layer in layers {
                if layer >= MOST_LAYERS {
                    return Err(format!("layers below {MOST_LAYERS}; there is {layer}"));
                }
                let place = layer as usize;
                sets.resize(sets.len().max(place + 1), None);
                if sets[place].replace(set.clone()).is_some() {
                    return Err(format!("each layer once; {layer} is there twice"));
                }
            }
        }
        sets.push(None);
        let sets = sets.into_iter().map(Option::unwrap_or_default);
        Ok(Self::by_layer(sets.collect()))
    }

    /// What a decoder layer computes again; where that is a matter of its stage, what layers behind the first do.
    pub fn of_layer(&self, layer: u32) -> &Recompute {
        match &self.0 {
            Form::Layers(sets) => &sets[(sets.len() - 1).min(layer as usize)],
            Form::Block(_) => &Recompute::None,
        }
    }

    /// What all layers do, if that is the same.
    pub fn alike(&self) -> Option<&Recompute> {
        match &self.0 {
            Form::Layers(sets) if sets.len() == 1 => sets.first(),
            Form::Layers(_) | Form::Block(_) => None,
        }
    }

    /// How many layers at the beginning of each stage compute all again, where they alone do.
    pub fn block(&self) -> Option<NonZeroU32> {
        match self.0 {
            Form::Block(layers) => Some(layers),
            Form::Layers(_) => None,
        }
    }

    /// The different sets, in the order of the first layer that has each.
    pub fn sets(&self) -> Vec<&Recompute> {
        let Form::Layers(sets) = &self.0 else {
            return vec![&Recompute::Full, &Recompute::None];
        };
        let mut found: Vec<&Recompute> = Vec::new();
        for set in sets {
            if !found.contains(&set) {
                found.push(set);
            }
        }
        found
    }

    /// One past the last layer that is named apart from all others: a model has as many at least.
    pub fn named_layers(&self) -> u32 {
        match &self.0 {
            Form::Layers(sets) => sets.len() as u32 - 1,
            Form::Block(layers) => layers.get(),
        }
    }

    /// Whether nothing is computed again.
    pub fn is_none(&self) -> bool {
        self.alike() == Some(&Recompute::None)
    }

    /// The different sets with their layers, but for layers that compute nothing again; none where that is a matter of
    /// stages.
    pub fn groups(&self) -> Vec<(&Recompute, Vec<u32>)> {
        let Form::Layers(all) = &self.0 else {
            return Vec::new();
        };
        let sets = self
            .sets()
            .into_iter()
            .filter(|set| **set != Recompute::None);
        let layers = |set| {
            let each = (0..).zip(all);
            each.filter(move |(_, own)| *own == set)
                .map(|(layer, _)| layer)
        };
        sets.map(|set| (set, layers(set).collect())).collect()
    }
}

impl fmt::Display for RecomputePlan {
    /// As [`RecomputePlan::from_str`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(set) = self.alike() {
            return write!(f, "{set}");
        }
        if let Some(layers) = self.block() {
            return write!(f, "{BLOCK}{layers}");
        }
        let groups = self.groups().into_iter();
        let words = groups.map(|(set, layers)| format!("{}={set}", ranges(&layers)));
        f.write_str(&words.collect::<Vec<_>>().join("/"))
    }
}

/// Numbers in rising order as `0-3,7`.
fn ranges(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let words = runs.into_iter().map(|(first, last)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    });
    words.collect::<Vec<_>>().join(",")
}

/// Reads `0-3,7`; the error is what was expected.
fn numbers(words: &str) -> Result<Vec<u32>, String> {
    let mut all = Vec::new();
    for range in words.split(',').map(str::trim) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |word: &str| word.trim().parse::<u32>().ok();
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last && last < MOST_LAYERS => {
                all.extend(first..=last);
            }
            _ => {
                let limit = format!("below {MOST_LAYERS}");
                return Err(format!("layers such as 0-3,7, {limit}; there is `{range}`"));
            }
        }
    }
    Ok(all)
}

impl FromStr for RecomputePlan {
    type Err = String;

    /// Reads what all layers compute again, as [`Recompute`] does, `0-3=full/4,5=moe_act+layernorm` or `block-2`; the
    /// error is what was expected.
    fn from_str(words: &str) -> Result<Self, String> {
        if let Some(number) = words.strip_prefix(BLOCK) {
            let layers = number.parse::<NonZeroU32>().ok();
            let layers = layers.filter(|layers| layers.get() < MOST_LAYERS);
            let expected = format!("{BLOCK}1 to {BLOCK}{}", MOST_LAYERS - 1);
            return layers
                .map(Self::first_of_stages)
                .ok_or_else(|| format!("{expected}; there is `{words}`"));
        }
        if !words.contains('=') {
            let set = words.parse::<Recompute>();
            let by_layer = "the first layers of each stage such as block-2, sets by layer such as 0-3=full/4-7=moe_act";
            return set
                .map(Self::from)
                .map_err(|expected| format!("{by_layer}, {expected}"));
        }
        let mut groups = Vec::new();
        for group in words.split('/') {
            let Some((layers, set)) = group.split_once('=') else {
                return Err(format!("LAYERS=SET/LAYERS=SET; there is `{group}`"));
            };
            groups.push((numbers(layers)?, set.parse::<Recompute>()?));
        }
        Self::of_groups(groups.into_iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_layer(words: &str) -> RecomputePlan {
        words.parse().expect(words)
    }

    #[test]
    fn law_words_and_json_round_trip() {
        for words in [
            "none",
            "full",
            "layernorm+moe_act",
            "0-3=full/4,6-7=layernorm+moe_act",
            "2=moe",
            "block-3",
        ] {
            let plan = by_layer(words);
            assert_eq!(plan.to_string(), words);
            let json = serde_json::to_string(&plan).expect("serializes");
            let read: RecomputePlan = serde_json::from_str(&json).expect(&json);
            assert_eq!(read, plan, "{json}");
        }
    }

    #[test]
    fn layers_that_are_not_named_compute_nothing_again() {
        let plan = by_layer("1=full/3=moe_act");
        let of = |layer| plan.of_layer(layer).to_string();
        let all: Vec<String> = (0..6).map(of).collect();
        assert_eq!(all, ["none", "full", "none", "moe_act", "none", "none"]);
        assert_eq!(plan.named_layers(), 4);
        let json = serde_json::to_value(&plan).expect("serializes");
        let expected = serde_json::json!([
            {"layers": [1], "recompute": "full"}, {"layers": [3], "recompute": ["moe_act"]},
        ]);
        assert_eq!(json, expected);
    }

    #[test]
    fn layers_behind_a_block_compute_nothing_again() {
        let plan = by_layer("block-2");
        assert_eq!(plan.block().map(NonZeroU32::get), Some(2));
        assert_eq!((plan.alike(), plan.named_layers()), (None, 2));
        assert_eq!(plan.sets(), [&Recompute::Full, &Recompute::None]);
        assert!(!plan.is_none() && plan.groups().is_empty());
        let json = serde_json::to_value(&plan).expect("serializes");
        assert_eq!(json, serde_json::json!({"block": 2}));
    }

    #[test]
    fn sets_of_all_layers_are_one_plan_however_they_are_said() {
        let full = RecomputePlan::by_layer(vec![Recompute::Full; 4]);
        assert_eq!(full, Recompute::Full.into());
        let none = RecomputePlan::by_layer(vec![Recompute::None; 4]);
        assert!(none.is_none());
        assert_eq!(none, RecomputePlan::default());
        let some = vec![Recompute::Full, Recompute::None, Recompute::None];
        assert_eq!(RecomputePlan::by_layer(some), by_layer("0=full"));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (words, part) in [
            ("most", "there is `most`"),
            ("0-3=full/3=moe", "3 is there twice"),
            ("3-1=full", "there is `3-1`"),
            ("0-4000000000=full", "there is `0-4000000000`"),
            ("0=full/moe", "there is `moe`"),
            ("full,moe", "there is `full`, which stands alone"),
            ("0=act", "there is `act`"),
            ("block-0", "there is `block-0`"),
            ("block-100000", "block-1 to block-99999"),
            ("block-2=full", "there is `block-2=full`"),
        ] {
            let error = words.parse::<RecomputePlan>().expect_err(words);
            assert!(error.contains(part), "{error} lacks {part}");
        }
        let twice = r#"[{"layers": [1, 1], "recompute": "full"}]"#;
        assert!(serde_json::from_str::<RecomputePlan>(twice).is_err());
        for block in [r#"{"block": 0}"#, r#"{"block": 1, "recompute": "full"}"#] {
            assert!(serde_json::from_str::<RecomputePlan>(block).is_err());
        }
    }
}
