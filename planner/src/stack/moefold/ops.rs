//! [`Pass`]: a tape with the ops that the layers are made of, and what each takes.
//!
//! Ops give their results as activations, collectives take room as transient, and products of a
//! backward pass are transient as well: the classes are the executor's.

use moefold_profiles::{Dtype, TensorClass as Class};

use super::Site;
use crate::memory::tape::{Held, Tape};

/// One pass of a block on a rank.
pub(super) struct Pass<'a> {
    pub(super) at: &'a Site<'a>,
    pub(super) tape: Tape,
}

/// What a norm keeps of its input besides that: see [`Pass::norm`].
pub(super) struct Normed {
    pub(super) rstd: Held,
    pub(super) output: Held,
}

impl<'a> Pass<'a> {
    pub(super) fn new(at: &'a Site<'a>) -> Self {
        Self {
            at,
            tape: Tape::default(),
        }
    }

    pub(super) fn take(&mut self, class: Class, dtype: Dtype, elements: u64) -> Held {
        self.tape.take(class, dtype, elements)
    }

    pub(super) fn give(&mut self, held: Held) {
        self.tape.give(held);
    }

    pub(super) fn give_all<const N: usize>(&mut self, all: [Held; N]) {
        for held in all {
            self.give(held);
        }
    }

    /// A result in the precision's dtype.
    pub(super) fn float(&mut self, elements: u64) -> Held {
        self.take(Class::Activations, self.at.dtype, elements)
    }

    /// A result that is f32 under every precision.
    pub(super) fn single(&mut self, elements: u64) -> Held {
        self.take(Class::Activations, Dtype::F32, elements)
    }

    /// Ids, maps, offsets.
    pub(super) fn integers(&mut self, elements: u64) -> Held {
        self.take(Class::Activations, Dtype::I32, elements)
    }

    /// The input gradient of a linear layer.
    pub(super) fn dgrad(&mut self, elements: u64) -> Held {
        self.take(Class::Transient, self.at.dtype, elements)
    }

    /// A handle on something else: no memory of its own.
    pub(super) fn alias(&self) -> Held {
        Held::given(Class::Activations, self.at.dtype, 0)
    }

    /// Every TP rank's rows, `[T, width]`; with one rank its own.
    pub(super) fn gather(&mut self, width: u64) -> Held {
        if self.at.local.tp == 1 {
            return self.alias();
        }
        let elements = self.at.local.tokens * width;
        self.take(Class::Transient, self.at.dtype, elements)
    }

    /// The sum over TP ranks at this rank's rows: `[T, h]` to `[t, h]`.
    pub(super) fn scatter_sum(&mut self, partial: Held) -> Held {
        if self.at.local.tp == 1 {
            return partial;
        }
        let own = self.float(self.at.local.tokens_local * self.at.model.hidden);
        self.give(partial);
        own
    }

    /// A norm of `rows` rows.
    pub(super) fn norm(&mut self, rows: u64, width: u64) -> Normed {
        let output = self.float(rows * width);
        Normed {
            rstd: self.single(rows),
            output,
        }
    }

    /// The norm of a block's input.
    pub(super) fn block_norm(&mut self) -> Normed {
        self.norm(self.at.local.tokens_local, self.at.model.hidden)
    }

    /// A norm's input gradient.
    pub(super) fn norm_backward(&mut self, rows: u64, width: u64) -> Held {
        let dx = self.float(rows * width);
        let partial = self.at.device.norm_sums(self.at.dtype, rows, width);
        self.tape.work_in(Dtype::F32, partial);
        dx
    }

    /// The gradient of a block's input.
    pub(super) fn block_norm_backward(&mut self) -> Held {
        self.norm_backward(self.at.local.tokens_local, self.at.model.hidden)
    }
}
