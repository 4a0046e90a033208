//! [`States`]: masters and moments of a rank's shards of one family, and the part of them that rests on the host.
//!
//! What rests there ([`HostShare`]) is in pieces, the last elements of the family. An update lets them pass through
//! the device, one after the other: while one is updated the next comes, and it leaves while the next is updated.
//! So the device computes all of it, with the bits that it has without; a CPU rounds other sums of products.
//! Both ways they go in the stream of copies, and the device holds two pieces at once.

use std::ops::Range;

use moefold_kernels::transfer::{self, Coming, Leaving, Parcel};
use moefold_kernels::{Dtype, Tensor, TensorClass};
use moefold_planner::choice::{HostShare, Masters, Optimizer};
use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;

use crate::error::Error;
use crate::model::Family;
use crate::rank::Context;
use crate::weights::State;

/// What is kept of states, and where.
#[derive(Debug, Clone, Copy)]
pub struct Kept {
    /// What updates the weights, and what its moments are stored in.
    pub optimizer: Optimizer,
    /// What is kept of f32 masters.
    pub masters: Masters,
    /// How much of all these rests on the host.
    pub on_host: HostShare,
}

/// The states of the shards of a family, one after the other.
#[derive(Debug)]
pub(super) struct States {
    pub(super) family: Family,
    /// On the device, from the first element on.
    pub(super) kept: Held,
    pieces: Vec<Piece>,
}

/// States of some elements, on the device.
#[derive(Debug)]
pub(super) struct Held {
    /// Of the family's shards.
    pub(super) elements: Range<usize>,
    /// Masters, or their remainders, where weights are not their own; and both moments.
    tensors: Vec<Tensor>,
}

/// States of some elements, on the host but while they are updated.
#[derive(Debug)]
struct Piece {
    elements: Range<usize>,
    parcels: Vec<Parcel>,
}

/// Types of what is kept of an element.
fn dtypes(weights: Dtype, kept: Kept) -> Vec<Dtype> {
    let masters = (weights != Dtype::F32).then(|| kept.masters.dtype());
    let moments = [kept.optimizer.moments(); 2];
    masters.into_iter().chain(moments).collect()
}

impl Held {
    /// One state, where it has one of its own.
    pub(super) fn state(&self, state: State) -> Option<&Tensor> {
        Some(&self.tensors[place(state, self.tensors.len())?])
    }

    fn zeros(cx: &Context, dtypes: &[Dtype], elements: Range<usize>) -> Self {
        let zeros = |&dtype| {
            let class = TensorClass::Optimizer;
            cx.device.zeros(class, dtype, &[elements.len()])
        };
        Self {
            tensors: dtypes.iter().map(zeros).collect(),
            elements,
        }
    }
}

/// Which of `count` states it is: weights that are their own masters have none.
fn place(state: State, count: usize) -> Option<usize> {
    (state as usize).checked_sub(State::ALL.len() - count)
}

impl States {
    /// All zero, for shards of so many elements beside weights of this type.
    pub(super) fn new(
        cx: &Context,
        (family, weights): (Family, Dtype),
        len: usize,
        kept: Kept,
    ) -> Self {
        let dtypes = dtypes(weights, kept);
        let share = kept.on_host;
        let kept = len - share.on_host(len as u64) as usize;
        let mut at = kept;
        let pieces = share.pieces(len as u64).into_iter().map(|len| {
            let mut piece = Piece {
                elements: at..at + len as usize,
                parcels: Vec::new(),
            };
            at = piece.elements.end;
            let zeros = Held::zeros(cx, &dtypes, piece.elements.clone());
            let (parcels, leaving) = transfer::start_to_host(&cx.device, zeros.tensors);
            piece.parcels = parcels;
            leaving.settle(&cx.device);
            piece
        });
        Self {
            family,
            pieces: pieces.collect(),
            kept: Held::zeros(cx, &dtypes, 0..kept),
        }
    }

    /// A state of some elements, where weights are not their own: tensors in order, those that rest on the host in
    /// memory of their own.
    pub(super) fn read(&self, state: State, elements: &Range<usize>) -> Option<Vec<Tensor>> {
        let kept = self.kept.state(state)?;
        let mut found = vec![view(kept, &common(elements, &self.kept.elements))];
        for piece in &self.pieces {
            let own = common(elements, &piece.elements);
            if !own.is_empty() {
                let number = place(state, piece.parcels.len()).expect("as of those kept");
                let at = piece.elements.start;
                found.push(piece.parcels[number].part(own.start - at..own.end - at));
            }
        }
        found.retain(|tensor| !tensor.is_empty());
        Some(found)
    }

    /// Overwrites a state of some elements with those of tensors as [`States::read`] gives them.
    pub(super) fn write(&self, state: State, elements: &Range<usize>, tensors: &[Tensor]) {
        let mut tensors = tensors.iter();
        if !common(elements, &self.kept.elements).is_empty() {
            tensors.next();
        }
        for piece in &self.pieces {
            let own = common(elements, &piece.elements);
            if !own.is_empty() {
                let number = place(state, piece.parcels.len()).expect("as of those kept");
                let tensor = tensors.next().expect("one for each");
                piece.parcels[number].put_part(own.start - piece.elements.start, tensor);
            }
        }
    }
}

/// Elements of both.
pub(super) fn common(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let start = one.start.max(other.start);
    // Where there are none, nothing from the start of one of them on.
    if start >= one.end.min(other.end) {
        return other.start..other.start;
    }
    start..one.end.min(other.end)
}

/// What passes through the device in an update.
#[derive(Debug)]
pub(super) struct Stream {
    /// Of each piece, whose states it has and its number among them.
    order: Vec<(usize, usize)>,
    next: usize,
    coming: Option<(Coming, u64)>,
    leaving: Option<(Leaving, u64)>,
}

impl Stream {
    /// Lets the first piece come.
    pub(super) fn begin(cx: &Context, all: &mut [States]) -> Self {
        let of = |(number, states): (usize, &States)| -> Vec<(usize, usize)> {
            (0..states.pieces.len())
                .map(|piece| (number, piece))
                .collect()
        };
        let mut stream = Self {
            order: all.iter().enumerate().flat_map(of).collect(),
            next: 0,
            coming: None,
            leaving: None,
        };
        stream.fetch(cx, all);
        stream
    }

    /// Calls `update` for every piece, in order, with whose states it has.
    pub(super) fn run(
        mut self,
        cx: &Context,
        all: &mut [States],
        mut update: impl FnMut(&States, &Held) -> Result<(), Error>,
    ) -> Result<(), Error> {
        while let Some((coming, number)) = self.coming.take() {
            let (of, piece) = self.order[self.next - 1];
            let held = Held {
                tensors: cx.wait_for_transfer(number, || coming.settle(&cx.device)),
                elements: all[of].pieces[piece].elements.clone(),
            };
            self.settle(cx);
            self.fetch(cx, all);
            update(&all[of], &held)?;
            let number = cx.recorder.transfer(bytes(&held.tensors), true, &cx.device);
            let start = || transfer::start_to_host(&cx.device, held.tensors);
            let (parcels, leaving) = cx.op(Category::Offload, start);
            all[of].pieces[piece].parcels = parcels;
            self.leaving = Some((leaving, number));
        }
        self.settle(cx);
        Ok(())
    }

    /// Lets the next piece come, if there is one.
    fn fetch(&mut self, cx: &Context, all: &mut [States]) {
        let Some(&(of, piece)) = self.order.get(self.next) else {
            return;
        };
        self.next += 1;
        let parcels = std::mem::take(&mut all[of].pieces[piece].parcels);
        let bytes = parcels.iter().map(Parcel::bytes).sum();
        let number = cx.recorder.transfer(bytes, false, &cx.device);
        let start = || transfer::start_to_device(&cx.device, parcels);
        self.coming = Some((cx.op(Category::Offload, start), number));
    }

    /// Lets go of the piece that leaves.
    fn settle(&mut self, cx: &Context) {
        if let Some((leaving, number)) = self.leaving.take() {
            cx.wait_for_transfer(number, || leaving.settle(&cx.device));
        }
    }
}

fn bytes(tensors: &[Tensor]) -> Bytes {
    tensors.iter().map(Tensor::bytes).sum()
}

pub(super) fn view(flat: &Tensor, range: &Range<usize>) -> Tensor {
    flat.view(range.start, &[range.len()])
}
