//! What the words of `plan`'s flags mean, as types of the planner; and its errors in words of flags.

use std::str::FromStr;

use clap::CommandFactory as _;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use moefold_planner::choice::CpComm;
use moefold_planner::layout::{Order, ParseDegreesError, ParseOrderError, PartialDegrees};
use moefold_profiles::Dtype;

use crate::cli::Cli;

/// What a flag fixes, or `auto`: the search's choice.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Auto<T>(pub(crate) Option<T>);

/// A layout: degrees, or as answers print it, with what else places its ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Placed {
    pub(crate) degrees: PartialDegrees,
    /// How attention reaches the keys of other ranks.
    pub(crate) cp_comm: Option<CpComm>,
    /// How ranks are numbered.
    pub(crate) order: Option<Order>,
}

impl FromStr for Placed {
    type Err = ParseDegreesError;

    fn from_str(text: &str) -> Result<Self, ParseDegreesError> {
        let (mut placed, mut degrees) = (Self::default(), Vec::new());
        for part in text.split('|') {
            let word = part.trim();
            let way = |name: &str| {
                CpComm::ALL
                    .into_iter()
                    .find(|way| way.name() == name.trim())
            };
            if let Some(way) = word.strip_prefix("cp ").and_then(way) {
                placed.cp_comm = Some(way);
            } else if let Ok(order) = word.parse() {
                placed.order = Some(order);
            } else {
                degrees.push(part);
            }
        }
        placed.degrees = degrees.join("|").parse()?;
        Ok(placed)
    }
}

/// One of the names of a closed set.
pub(crate) fn one_of<T: Copy + Send + Sync>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let names = all.iter().map(|&member| name(member));
    PossibleValuesParser::new(names).map(move |word: String| {
        let found = all.iter().find(|&&member| name(member) == word);
        *found.expect("other words are refused")
    })
}

/// The same, or `auto`.
pub(crate) fn one_or_auto<T: Copy + Send + Sync>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = Auto<T>> {
    let names = all.iter().map(|&member| name(member));
    PossibleValuesParser::new(["auto"].into_iter().chain(names)).map(move |word: String| {
        let found = all.iter().find(|&&member| name(member) == word);
        Auto(found.copied())
    })
}

/// What `--objective` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Tokens a second.
    Throughput,
    /// Least peak memory.
    Memory,
    /// Least dollars a token.
    Cost,
    /// Fewest GPUs that train so many tokens in time.
    Gpus,
    /// Tokens a second that last, under failures.
    Goodput,
    /// The longest sequence that fits.
    SeqLen,
}

impl Goal {
    pub(crate) const ALL: [Self; 6] = [
        Self::Throughput,
        Self::Memory,
        Self::Cost,
        Self::Gpus,
        Self::Goodput,
        Self::SeqLen,
    ];

    /// The word of the flag.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::Memory => "memory",
            Self::Cost => "cost",
            Self::Gpus => "gpus",
            Self::Goodput => "goodput",
            Self::SeqLen => "seq-len",
        }
    }
}

/// Types of main gradients, by the words of Megatron-Core.
pub(crate) const GRAD_DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

/// The word of one.
pub(crate) fn grad_dtype(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "fp32",
        other => other.name(),
    }
}

/// Reads `auto`, or an order of ranks.
pub(crate) fn order(words: &str) -> Result<Auto<Order>, String> {
    if words == "auto" {
        return Ok(Auto(None));
    }
    let read = words.parse();
    read.map(|order| Auto(Some(order)))
        .map_err(|error: ParseOrderError| format!("{error}, or auto"))
}

/// Reads `auto`, or what a choice is written as.
pub(crate) fn or_auto<T: FromStr<Err = String>>(words: &str) -> Result<Auto<T>, String> {
    if words == "auto" {
        return Ok(Auto(None));
    }
    let read = words.parse();
    read.map(|value| Auto(Some(value)))
        .map_err(|expected| format!("found `{words}`, expected auto, {expected}"))
}

/// An error of the planner, which names options in backticks, with the flags that set them.
pub(crate) fn in_words_of_flags(message: &str) -> String {
    let command = Cli::command();
    let plan = command.find_subcommand("plan");
    let flags = plan.into_iter().flat_map(clap::Command::get_arguments);
    let flags = flags.filter_map(clap::Arg::get_long);
    flags.fold(message.to_owned(), |message, flag| {
        let option = format!("`{}`", flag.replace('-', "_"));
        message.replace(&option, &format!("--{flag}"))
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use moefold_planner::choice::{
        GraphModule, Module, OffloadModule, Overlap, Recompute, RecomputePlan,
    };

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn golden_layouts_as_answers_print_them() {
        let read = |text: &str| text.parse::<Placed>().expect(text);
        let plain = read("CP4 PP2x9 DP4 | EP8 EDP2 | mbs 8");
        assert_eq!((plain.cp_comm, plain.order), (None, None));
        let whole = read("CP4 PP2x9 DP4 | EP8 EDP2 | mbs 8 | cp a2a+p2p | tp-cp-ep-pp-dp");
        assert_eq!(whole.degrees, plain.degrees);
        assert_eq!(whole.cp_comm, Some(CpComm::Hierarchical));
        assert_eq!(whole.order, Some(Order::DP_LAST));
        assert_eq!(
            read("tp=2,pp=4").degrees,
            "tp=2,pp=4".parse().expect("degrees")
        );
        assert!("CP4 | cp ring".parse::<Placed>().is_err());
    }

    #[test]
    fn every_word_of_a_list_is_in_its_help() {
        let command = Cli::command();
        let plan = command.find_subcommand("plan").expect("a command");
        let expected = "-".parse::<Overlap>().expect_err("no kind");
        let kinds = expected.split_once("some of ").expect("a list").1;
        let kinds = kinds.split_once(';').expect("an end").0;
        let lists = [
            ("overlap", kinds.split(", ").collect::<Vec<_>>()),
            ("recompute", Module::ALL.map(Module::name).to_vec()),
            (
                "offload",
                OffloadModule::ALL.map(OffloadModule::name).to_vec(),
            ),
            (
                "cuda_graph",
                GraphModule::ALL.map(GraphModule::name).to_vec(),
            ),
        ];
        for (flag, names) in lists {
            let flag = plan
                .get_arguments()
                .find(|argument| argument.get_id() == flag);
            let help = flag
                .and_then(|flag| flag.get_help())
                .expect("it is told")
                .to_string();
            let told: Vec<&str> = help
                .split(|letter: char| !letter.is_ascii_alphanumeric() && !"-_".contains(letter))
                .collect();
            for name in names {
                assert!(told.contains(&name), "{name} is not in: {help}");
            }
        }
    }

    #[test]
    fn options_are_named_by_their_flags() {
        assert_eq!(
            in_words_of_flags("`seq_len`: found `0`; `precision` fp8, and `t`"),
            "--seq-len: found `0`; --precision fp8, and `t`"
        );
    }

    #[test]
    fn words_have_their_meaning_or_are_refused_with_what_would_work() {
        let recompute = or_auto::<RecomputePlan>;
        let overlap = or_auto::<Overlap>;
        let modules = Recompute::of(vec![Module::MoeAct, Module::Layernorm]);
        assert_eq!(
            recompute("moe_act, layernorm"),
            Ok(Auto(Some(modules.into())))
        );
        assert_eq!(recompute("auto"), Ok(Auto(None)));
        let error = recompute("moe_act,act").expect_err("refused");
        assert!(
            error.contains("`act`") && error.contains("layernorm"),
            "{error}"
        );
        let both = Overlap {
            grad_reduce: true,
            param_gather: true,
            p2p: false,
            ..Overlap::default()
        };
        assert_eq!(overlap("grad-reduce,param-gather"), Ok(Auto(Some(both))));
        assert_eq!(overlap("none"), Ok(Auto(Some(Overlap::default()))));
        let error = overlap("p2p,cp").expect_err("refused");
        assert!(
            error.contains("`cp`") && error.contains("grad-reduce"),
            "{error}"
        );
    }
}
