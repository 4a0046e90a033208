//! [`check`]: what this version runs, and everything in a plan that it does not.
//!
//! Refusing happens once, before any rank starts, and names every reason together; nothing further
//! in checks again. A plan for another executor is no error of the plan.

use std::fmt;

use moefold_planner::model::{Ffn, Layer, Mixer, Mlp, Model, Moe, NormKind, QkNorm, Score};
use moefold_planner::plan::{
    Dispatcher, Offload, Optimizer, PlannedLayout, Recompute, ScheduleName,
};
use moefold_profiles::Precision;

/// Everything in a plan that the executor does not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Unsupported {
    /// One line for each feature: what was asked for and what would work.
    pub reasons: Vec<String>,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the executor does not run this plan: {}",
            self.reasons.join("; ")
        )
    }
}

/// Refuses a plan or a model that this version cannot run.
pub fn check(plan: &PlannedLayout, model: &Model) -> Result<(), Unsupported> {
    let mut list = Reasons(Vec::new());
    layout(&mut list, plan);
    architecture(&mut list, model);
    if list.0.is_empty() {
        Ok(())
    } else {
        Err(Unsupported { reasons: list.0 })
    }
}

struct Reasons(Vec<String>);

impl Reasons {
    fn refuse(&mut self, refused: bool, reason: impl FnOnce() -> String) {
        if refused {
            let reason = reason();
            if !self.0.contains(&reason) {
                self.0.push(reason);
            }
        }
    }
}

fn layout(list: &mut Reasons, plan: &PlannedLayout) {
    let degrees = &plan.layout;
    list.refuse(degrees.cp > 1, || {
        format!(
            "context parallelism (cp={}) is not implemented, use cp=1",
            degrees.cp
        )
    });
    list.refuse(degrees.pp > 1, || {
        format!(
            "pipeline parallelism (pp={}) is not implemented, use pp=1",
            degrees.pp
        )
    });
    list.refuse(degrees.vpp > 1, || {
        format!(
            "virtual pipeline stages (vpp={}) are not implemented, use vpp=1",
            degrees.vpp
        )
    });
    list.refuse(
        degrees.pp == 1 && plan.pipeline.schedule == ScheduleName::Interleaved,
        || "the interleaved schedule needs a pipeline, use `none`".to_owned(),
    );
    list.refuse(plan.dispatcher != Dispatcher::Alltoall, || {
        format!(
            "dispatcher {:?} is not implemented, use alltoall",
            plan.dispatcher
        )
        .to_lowercase()
    });
    list.refuse(plan.recompute != Recompute::None, || {
        "recomputation is not implemented, use `none`".to_owned()
    });
    list.refuse(plan.offload != Offload::None, || {
        "offloading is not implemented, use `none`".to_owned()
    });
    list.refuse(plan.precision != Precision::Fp32, || {
        format!(
            "precision {} is not implemented on the CPU, use fp32",
            plan.precision
        )
    });
    list.refuse(plan.optimizer != Optimizer::Adam, || {
        "bf16 optimizer moments are not implemented, use adam".to_owned()
    });
}

fn architecture(list: &mut Reasons, model: &Model) {
    let family = &model.model_type;
    let known = ["mixtral", "qwen3_moe", "llama", "qwen3", "mistral"];
    list.refuse(!known.contains(&family.as_str()), || {
        format!(
            "model_type {family} is not implemented, known: {}",
            known.join(", ")
        )
    });
    list.refuse(model.residual_streams > 1, || {
        "several residual streams are not implemented".to_owned()
    });
    list.refuse(model.head_bias, || {
        "a bias on the head is not implemented".to_owned()
    });
    list.refuse(!model.mtp.is_empty(), || {
        "multi-token prediction is not implemented".to_owned()
    });
    list.refuse(model.norm.kind != NormKind::Rms, || {
        format!(
            "norm {:?} is not implemented, only RMSNorm is",
            model.norm.kind
        )
    });
    list.refuse(model.extra_params > 0, || {
        "model-wide extra parameters are not implemented".to_owned()
    });
    for layer in &model.layers {
        layer_parts(list, layer, model);
    }
}

fn layer_parts(list: &mut Reasons, layer: &Layer, model: &Model) {
    list.refuse(layer.extra_params > 0, || {
        "extra parameters of a layer are not implemented".to_owned()
    });
    match &layer.mixer {
        Some(Mixer::Gqa(gqa)) => {
            list.refuse(gqa.qkv_bias || gqa.out_bias, || {
                "attention biases are not implemented".to_owned()
            });
            list.refuse(
                !matches!(gqa.qk_norm, QkNorm::None | QkNorm::PerHead),
                || format!("query/key norm {:?} is not implemented", gqa.qk_norm),
            );
            list.refuse(gqa.output_gate, || {
                "an attention output gate is not implemented".to_owned()
            });
            list.refuse(gqa.sinks, || {
                "attention sinks are not implemented".to_owned()
            });
            list.refuse(gqa.window.is_some(), || {
                "sliding-window attention is not implemented".to_owned()
            });
            list.refuse(gqa.rotary_dim > 0 && model.rope_theta.is_none(), || {
                "rotary attention needs rope_theta".to_owned()
            });
        }
        Some(Mixer::Mla(_)) => list.refuse(true, || {
            "multi-head latent attention is not implemented".to_owned()
        }),
        Some(Mixer::SharedKv(_)) => list.refuse(true, || {
            "shared key/value attention is not implemented".to_owned()
        }),
        Some(Mixer::Linear(linear)) => {
            list.refuse(true, || {
                format!("the {:?} mixer is not implemented", linear.kind)
            });
        }
        None => list.refuse(true, || {
            "layers without a mixer are not implemented".to_owned()
        }),
    }
    match &layer.ffn {
        Some(Ffn::Dense(mlp)) => gated(list, mlp, "dense MLPs"),
        Some(Ffn::Moe(moe)) => experts(list, moe),
        None => list.refuse(true, || {
            "layers without a feed-forward block are not implemented".to_owned()
        }),
    }
}

fn experts(list: &mut Reasons, moe: &Moe) {
    gated(list, &moe.expert, "experts");
    list.refuse(moe.shared.is_some(), || {
        "shared experts are not implemented".to_owned()
    });
    let router = &moe.router;
    list.refuse(
        !matches!(
            router.score,
            Score::SoftmaxThenTopk | Score::TopkThenSoftmax
        ),
        || {
            format!(
                "router score {:?} is not implemented, only softmax is",
                router.score
            )
        },
    );
    list.refuse(router.bias || router.correction_bias, || {
        "router biases are not implemented".to_owned()
    });
    list.refuse(router.groups.is_some(), || {
        "group-limited routing is not implemented".to_owned()
    });
}

fn gated(list: &mut Reasons, mlp: &Mlp, what: &str) {
    list.refuse(!mlp.gated, || format!("ungated {what} are not implemented"));
    list.refuse(mlp.bias, || format!("biases of {what} are not implemented"));
}
