//! What works on rows: norms, the head's loss, embeddings.

use moefold_profiles::Pass;

use super::{Call, Source};
use crate::cross_entropy::{self, Reduced};
use crate::tensor::Tensor;
use crate::{embedding, rms_norm};

/// Entries of a vocabulary where the key does not say.
pub(super) const VOCAB: usize = 4096;

const EPS: f32 = 1e-6;

pub(super) fn norm(source: &mut dyn Source, [rows, dim]: [usize; 2], pass: Pass) -> Call {
    let (x, w) = (source.tensor(&[rows, dim], 1.0), source.tensor(&[dim], 1.0));
    if pass == Pass::Forward {
        return Call::new(move |out| {
            let (y, rstd) = rms_norm::forward(&x, &w, EPS);
            out("y", &y);
            out("rstd", &rstd);
        });
    }
    let (dy, dw) = (
        source.tensor(&[rows, dim], 1.0),
        source.statistic(&[dim], 1.0),
    );
    let (_, rstd) = rms_norm::forward(&x, &w, EPS);
    Call::new(move |out| {
        let dx = rms_norm::backward(&dy, &x, &w, &rstd, &dw);
        out("dx", &dx);
        out("dw", &dw);
    })
}

/// Vectors of `rows` ids out of a table of `[vocab, dim]`, or their gradients into it.
pub(crate) fn lookup(source: &mut dyn Source, [rows, vocab, dim]: [usize; 3], pass: Pass) -> Call {
    let ids = source.ids(&[rows], vocab);
    if pass == Pass::Forward {
        let table = source.tensor(&[vocab, dim], 1.0);
        return Call::new(move |out| out("y", &embedding::forward(&ids, &table, 0)));
    }
    let (dy, dtable) = (
        source.tensor(&[rows, dim], 1.0),
        source.statistic(&[vocab, dim], 1.0),
    );
    Call::new(move |out| {
        embedding::backward(&dy, &ids, &dtable, 0);
        out("dtable", &dtable);
    })
}

/// What a rank's logits say of the loss, or the loss with the gradient in the logits' place.
pub(super) fn loss(source: &mut dyn Source, rows: usize, vocab: usize, pass: Pass) -> Call {
    let logits = source.tensor(&[rows, vocab], 4.0);
    let targets = source.ids(&[rows], vocab);
    let forward = |logits: &Tensor, targets: &Tensor| {
        let own = cross_entropy::row_statistics(logits);
        let (sum_exp, target) = cross_entropy::rebase(logits, &own, &own.top, targets, 0);
        (own.top, sum_exp, target)
    };
    if pass == Pass::Forward {
        return Call::new(move |out| {
            let (top, sum_exp, target) = forward(&logits, &targets);
            out("top", &top);
            out("sum_exp", &sum_exp);
            out("target", &target);
        });
    }
    let (top, sum_exp, target) = forward(&logits, &targets);
    Call::new(move |out| {
        let reduced = Reduced {
            top: &top,
            sum_exp: &sum_exp,
            target: &target,
        };
        // The gradient replaces the logits: small numbers again, as logits are.
        let loss = cross_entropy::finish(&logits, reduced, &targets, 0, 1.0);
        out("loss", &loss);
        out("dlogits", &logits);
    })
}
