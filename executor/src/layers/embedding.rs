//! The token embedding, its vocabulary split over TP.
//!
//! Each rank looks up the tokens of its own vocabulary rows and leaves zeros for the others; the sum
//! over TP ranks is the embedding, scattered to each rank's tokens. It saves only token ids.

use moefold_kernels::{Tensor, embedding};
use moefold_profiles::trace::Category;

use super::tokens;
use crate::error::Error;
use crate::model::Part;
use crate::rank::Context;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::Dense;

/// The embedding, on the first stage.
#[derive(Debug)]
pub struct Embedding {
    table: Weight,
    vocab_start: usize,
}

impl Embedding {
    /// The embedding on weights of `store`.
    pub fn new(store: &Store) -> Self {
        let parameter = store.shard.find(None, Part::Embedding);
        Self {
            table: store.weight(None, Part::Embedding),
            vocab_start: parameter.slices[0].rows.start,
        }
    }

    /// `ids [T] -> [t, h]`.
    pub fn forward(&self, cx: &Context, ids: &Tensor) -> Result<Tensor, Error> {
        let own = cx.op(CATEGORY, || {
            embedding::forward(ids, &self.table.value, self.vocab_start)
        });
        tokens::scatter_sum(cx, own)
    }

    /// Adds `dx [t, h]` to the rows that `ids [T]` name.
    pub fn backward(&self, cx: &Context, dx: &Tensor, ids: &Tensor) -> Result<(), Error> {
        let dx_all = tokens::gather(cx, dx)?;
        let (ids, grad, start) = (ids.clone(), self.table.grad.clone(), self.vocab_start);
        cx.of_weights(CATEGORY, move || {
            embedding::backward(&dx_all, &ids, &grad, start);
        });
        Ok(())
    }
}
