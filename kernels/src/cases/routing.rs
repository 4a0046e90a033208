//! What happens between the router's logits and the experts, and inside of experts.

use moefold_profiles::Pass;

use super::{Call, Source};
use crate::permute;
use crate::router::{self, RouterRule, Score};
use crate::swiglu::{self, Rule};

/// Experts that rows are spread over where the key does not say.
const EXPERTS: usize = 8;

/// The router of Mixtral and Qwen3.
pub(crate) const SOFTMAX_THEN_TOPK: RouterRule = RouterRule {
    score: Score::SoftmaxThenTopk,
    normalize: true,
    scale: 1.0,
    groups: None,
};

/// SwiGLU of `rows` of `2 dim`, each times its probability.
pub(super) fn activation(source: &mut dyn Source, rows: usize, dim: usize, pass: Pass) -> Call {
    let x = source.tensor(&[rows, 2 * dim], 2.0);
    if pass == Pass::Forward {
        let probs = source.statistic(&[rows], 1.0);
        return Call::new(move |out| out("y", &swiglu::forward(&x, Some(&probs), &Rule::SWIGLU)));
    }
    let (dy, probs) = (
        source.tensor(&[rows, dim], 1.0),
        source.statistic(&[rows], 1.0),
    );
    Call::new(move |out| {
        let (dx, dprobs) = swiglu::backward(&dy, &x, Some(&probs), &Rule::SWIGLU);
        out("dx", &dx);
        out("dprobs", &dprobs.expect("probabilities were given"));
    })
}

/// The choice of `topk` of `experts` for `rows` tokens.
pub(super) fn choice(
    source: &mut dyn Source,
    [rows, experts, topk]: [usize; 3],
    pass: Pass,
) -> Call {
    let rule = SOFTMAX_THEN_TOPK;
    let logits = source.statistic(&[rows, experts], 2.0);
    if pass == Pass::Forward {
        return Call::new(move |out| {
            let routing = router::forward(&logits, topk, &rule, None);
            out("ids", &routing.ids);
            out("probs", &routing.probs);
            out("scores", &routing.scores);
        });
    }
    let dprobs = source.statistic(&[rows, topk], 1.0);
    let routing = router::forward(&logits, topk, &rule, None);
    Call::new(move |out| out("dlogits", &router::backward(&dprobs, &routing, &rule, None)))
}

/// Copies of token rows into expert order, or sums of expert rows into token order.
pub(super) fn permutation(source: &mut dyn Source, rows: usize, dim: usize, copies: bool) -> Call {
    let topk = if rows.is_multiple_of(2) { 2 } else { 1 };
    let tokens = rows / topk;
    let map = permute::map(&source.ids(&[tokens, topk], EXPERTS), EXPERTS);
    if copies {
        let x = source.tensor(&[tokens, dim], 1.0);
        return Call::new(move |out| out("y", &permute::forward(&x, &map)));
    }
    let y = source.tensor(&[rows, dim], 1.0);
    Call::new(move |out| out("x", &permute::unpermute(&y, &map, None)))
}
