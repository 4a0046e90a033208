//! [`Upcycled`]: a mixture of experts made of a dense model (sparse upcycling, arXiv 2212.05055).
//!
//! Every expert begins as a copy of the dense MLP, and routers are random. With a granularity `G` the inner width
//! is cut into `G` slices, and expert `e` has slice `e % G`; the `G` experts of a copy have the same row in the
//! router, so a token is sent to whole copies (virtual groups, arXiv 2410.07524, as Megatron-Core's
//! `core/transformer/moe/upcycling_utils.py` lays them out). Weights of the chosen experts sum to one, `1 / G` of it for
//! each slice of a copy, and each down-projection is multiplied by `G`: so the model computes what the dense one
//! does. Megatron-Core multiplies all three matrices by the cube root of `G`, which SiLU does not commute with.

use std::path::Path;

use moefold_planner::model::{Activation, Ffn, Mlp, Model, Moe, Router, Score, hf};

use crate::error::Error;
use crate::model::global_tensors;
use crate::weights::{GlobalTensor, HuggingFace, Region, Source, hf_config};

/// What to make of a dense model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Upcycle {
    /// Experts of a layer.
    pub experts: u64,
    /// Experts a token is sent to.
    pub topk: u64,
    /// Slices of the dense MLP, one for each expert of a copy.
    pub granularity: u64,
    /// Seed of the routers.
    pub seed: u64,
}

/// A dense model's weights, as those of a mixture of experts.
#[derive(Debug)]
pub(super) struct Upcycled {
    dense: HuggingFace,
    upcycle: Upcycle,
    /// Inner width of the dense MLPs.
    width: usize,
    routers: Source,
}

impl Upcycled {
    /// Of the dense `model` in `dir`. Gives the model that they are of too.
    pub(super) fn open(
        dir: &Path,
        model: &Model,
        upcycle: &Upcycle,
    ) -> Result<(Model, Self), Error> {
        let (sparse, width) = sparse(model, upcycle)?;
        let weights = Self {
            dense: HuggingFace::open(dir, &global_tensors(model))?,
            upcycle: *upcycle,
            width: width as usize,
            routers: Source::Random {
                seed: upcycle.seed,
                std: model.initializer_range,
            },
        };
        Ok((sparse, weights))
    }

    pub(super) fn granularity(&self) -> u64 {
        self.upcycle.granularity
    }

    /// The values of a region, row by row.
    pub(super) fn read(&self, region: &Region<'_>) -> Result<Vec<f32>, Error> {
        let slices = self.upcycle.granularity as usize;
        let Some((prefix, rest)) = split(region.tensor) else {
            return self.dense.read(region);
        };
        let Some((expert, projection)) = rest.split_once('.') else {
            return self.router(region, slices);
        };
        let expert: usize = expert.parse().expect("an expert has a number");
        let narrow = self.width / slices;
        let first = expert % slices * narrow;
        let (name, is_down) = match projection {
            "w1.weight" | "gate_proj.weight" => ("gate_proj", false),
            "w3.weight" | "up_proj.weight" => ("up_proj", false),
            "w2.weight" | "down_proj.weight" => ("down_proj", true),
            other => unreachable!("{other} is no matrix of an expert"),
        };
        let hidden = region.dims[usize::from(!is_down)];
        let moved = |range: &std::ops::Range<usize>| first + range.start..first + range.end;
        let (dims, rows, cols) = if is_down {
            let cols = moved(&region.cols);
            (vec![hidden, self.width], region.rows.clone(), cols)
        } else {
            let rows = moved(&region.rows);
            (vec![self.width, hidden], rows, region.cols.clone())
        };
        let dense = GlobalTensor {
            name: format!("{prefix}.mlp.{name}.weight"),
            dims,
        };
        let mut values = self.dense.read(&Region {
            rows,
            cols,
            ..dense.whole()
        })?;
        if is_down && slices > 1 {
            for value in &mut values {
                *value *= slices as f32;
            }
        }
        Ok(values)
    }

    /// Rows of a router: one for each copy, again for each of its slices.
    fn router(&self, region: &Region<'_>, slices: usize) -> Result<Vec<f32>, Error> {
        let copies = [region.dims[0] / slices, region.dims[1]];
        let mut values = Vec::with_capacity(region.len());
        for row in region.rows.clone() {
            values.extend(self.routers.read(&Region {
                dims: &copies,
                rows: row / slices..row / slices + 1,
                ..region.clone()
            })?);
        }
        Ok(values)
    }
}

/// The layer that a tensor of experts or of their router is of, and what follows; none of other tensors.
fn split(tensor: &str) -> Option<(&str, &str)> {
    [".block_sparse_moe.", ".mlp."]
        .into_iter()
        .find_map(|block| {
            let (prefix, rest) = tensor.split_once(block)?;
            match rest.strip_prefix("experts.") {
                Some(expert) => Some((prefix, expert)),
                None => (rest == "gate.weight").then_some((prefix, "gate")),
            }
        })
}

/// The mixture of experts that a dense model becomes, and the inner width of the dense one.
fn sparse(dense: &Model, upcycle: &Upcycle) -> Result<(Model, u64), Error> {
    let &Upcycle {
        experts,
        topk,
        granularity,
        ..
    } = upcycle;
    let model_type = match &*dense.model_type {
        "llama" | "mistral" => "mixtral",
        "qwen3" => "qwen3_moe",
        other => {
            return Err(Error::Unsupported {
                what: format!("upcycling {} (model_type {other})", dense.name),
                instead: "llama and mistral become mixtral, qwen3 becomes qwen3_moe".to_owned(),
            });
        }
    };
    let width = match dense.layers.first().and_then(|layer| layer.ffn.as_ref()) {
        Some(Ffn::Dense(mlp)) => mlp.width,
        _ => unreachable!("a dense family has dense layers"),
    };
    let refuse = |why: String| Err(Error::Request(why));
    if topk == 0 || topk > experts {
        return refuse(format!(
            "--topk {topk}: expected 1 to {experts}, the experts of --upcycle"
        ));
    }
    for (flag, value) in [("--upcycle", experts), ("--topk", topk)] {
        if granularity == 0 || !value.is_multiple_of(granularity) {
            return refuse(format!(
                "{flag} {value}: does not divide by --granularity {granularity}; a copy of the dense MLP is as many \
                 experts, and a token is sent to whole copies"
            ));
        }
    }
    if !width.is_multiple_of(granularity) {
        return refuse(format!(
            "--granularity {granularity}: does not divide {width}, the inner width of {}",
            dense.name
        ));
    }
    let moe = Moe {
        experts,
        topk,
        expert: Mlp {
            width: width / granularity,
            gated: true,
            bias: false,
            activation: Activation::Silu,
        },
        shared: None,
        router: Router {
            score: Score::SoftmaxThenTopk,
            normalize: true,
            scale: 1.0,
            bias: false,
            correction_bias: false,
            groups: None,
            aux_loss_coef: 0.0,
            scales_input: false,
        },
    };
    let mut model = dense.clone();
    model_type.clone_into(&mut model.model_type);
    for layer in &mut model.layers {
        layer.ffn = Some(Ffn::Moe(moe.clone()));
    }
    // What the other family's configuration has no key for would be lost without a word.
    let written = hf_config(&model)?;
    let read = hf::parse(&model.name, &written.to_string());
    let read = read.map_err(|error| Error::Request(error.to_string()))?;
    if read != model {
        return Err(Error::Unsupported {
            what: format!("upcycling {} to {model_type}", dense.name),
            instead: format!(
                "the configuration of a {model_type} cannot say all that it has (biases of attention, say)"
            ),
        });
    }
    Ok((model, width))
}
