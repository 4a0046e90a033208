//! [`Graphs`]: what CUDA graphs launch at once.

use std::fmt;
use std::str::FromStr;

use moefold_profiles::nearest::instead;
use serde::{Deserialize, Serialize};

moefold_profiles::named! {
    /// Modules of a layer that are graphs of their own, in Megatron-Core's words (`--cuda-graph-modules`).
    pub enum GraphModule {
        /// Attention with its norm and its sum into the residual stream.
        Attn = "attn",
        /// The same of a linear mixer.
        Mamba = "mamba",
        /// A dense feed-forward block.
        Mlp = "mlp",
        /// All of the experts, where each gets as many rows.
        Moe = "moe",
        /// The norm before the experts, the router, and the shared expert where nothing runs beside it.
        MoeRouter = "moe_router",
        /// What the router's choice is made into before tokens are sent.
        MoePreprocess = "moe_preprocess",
    }
}

/// What CUDA graphs launch at once: nothing, modules of each layer, or the passes of a whole step. In JSON and words:
/// `"none"`, modules with commas, or `"full_iteration"`.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct Graphs {
    /// A bit for each module, and one above them for the whole step.
    bits: u8,
}

impl Graphs {
    /// Every kernel is launched by itself.
    pub const NONE: Self = Self { bits: 0 };

    /// All passes of a step are one graph (`--cuda-graph-impl full_iteration`).
    pub const FULL_ITERATION: Self = Self {
        bits: 1 << GraphModule::ALL.len(),
    };

    /// The word for the whole step.
    const WHOLE: &'static str = "full_iteration";

    /// Some modules.
    pub fn of(modules: impl IntoIterator<Item = GraphModule>) -> Self {
        let bits = modules.into_iter().map(|module| 1 << module as u8);
        Self {
            bits: bits.fold(0, |all, bit: u8| all | bit),
        }
    }

    /// Whether nothing is a graph.
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }

    /// Whether the whole step is one.
    pub fn is_whole(self) -> bool {
        self == Self::FULL_ITERATION
    }

    /// Whether a module is launched as part of a graph.
    pub fn covers(self, module: GraphModule) -> bool {
        self.is_whole() || self.bits >> module as u8 & 1 == 1
    }

    /// The modules that are graphs of their own, in order.
    pub fn modules(self) -> impl Iterator<Item = GraphModule> {
        GraphModule::ALL
            .into_iter()
            .filter(move |&module| self.bits >> module as u8 & 1 == 1)
    }
}

fn expected(word: &str) -> String {
    let names = GraphModule::ALL.map(GraphModule::name);
    let whole = Graphs::WHOLE;
    let instead = instead(word, names.into_iter().chain(["none", whole]));
    format!("none, {whole}, or some of {}; {instead}", names.join(", "))
}

impl FromStr for Graphs {
    type Err = String;

    /// Reads `none`, `full_iteration`, or modules with commas or pluses; the error is what was expected.
    fn from_str(words: &str) -> Result<Self, String> {
        match words {
            "none" => return Ok(Self::NONE),
            Self::WHOLE => return Ok(Self::FULL_ITERATION),
            _ => {}
        }
        let module = |word: &str| {
            let named = |module: &GraphModule| module.name() == word.trim();
            let found = GraphModule::ALL.into_iter().find(named);
            found.ok_or_else(|| expected(word.trim()))
        };
        let modules: Result<Vec<_>, _> = words.split([',', '+']).map(module).collect();
        Ok(Self::of(modules?))
    }
}

impl fmt::Display for Graphs {
    /// As [`Graphs::from_str`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("none");
        }
        if self.is_whole() {
            return f.write_str(Self::WHOLE);
        }
        let names: Vec<&str> = self.modules().map(GraphModule::name).collect();
        f.write_str(&names.join(","))
    }
}

impl TryFrom<String> for Graphs {
    type Error = String;

    fn try_from(words: String) -> Result<Self, String> {
        let read = words.parse();
        read.map_err(|expected| format!("found `{words}`, expected {expected}"))
    }
}

impl From<Graphs> for String {
    fn from(graphs: Graphs) -> Self {
        graphs.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_graphs_are_read_as_they_are_written() {
        let modules = GraphModule::ALL;
        let mut all: Vec<Graphs> = (0..1_usize << modules.len())
            .map(|set| {
                let chosen = modules.into_iter().enumerate();
                Graphs::of(chosen.filter_map(|(at, module)| (set >> at & 1 == 1).then_some(module)))
            })
            .collect();
        all.push(Graphs::FULL_ITERATION);
        for graphs in all {
            let written = serde_json::to_string(&graphs).expect("serializes");
            let read: Graphs = serde_json::from_str(&written).expect("reads");
            assert_eq!(read, graphs, "{written}");
            assert_eq!(graphs.is_none(), written == "\"none\"");
        }
        let error = serde_json::from_str::<Graphs>("\"attn,norm\"").expect_err("unknown");
        assert!(error.to_string().contains("`norm`"), "{error}");
        assert!("full_iteration,attn".parse::<Graphs>().is_err());
    }
}
