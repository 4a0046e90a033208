//! [`Away`]: what the blocks of a stage have left on the host between their passes, and when it goes and comes.
//!
//! When a block has run forward, the tensors of its modules that the plan's [`Offload`] names start to leave, beside
//! what is asked for next; their memory is let go of once the next block has run. Before a block runs backward,
//! those of the block that is next after it start to come back. So at most one block's tensors are on their way,
//! beside one block's work, and the host waits for neither. What nothing of the stage runs after stays where it
//! is, since it is needed at once: the last block, where no head follows. Nothing is computed otherwise, so all
//! bits are the same.
//!
//! A tensor that something else holds too is not moved: its memory would not be free. Where a module runs again,
//! there is nothing of it to move.

use moefold_kernels::Tensor;
use moefold_kernels::transfer::{self, Coming, Leaving, Parcel};
use moefold_planner::choice::{Offload, OffloadModule};
use moefold_profiles::trace::Category;

use crate::rank::Context;

/// What a block saves, as [`Offload`] sees it.
pub(crate) trait Saved {
    /// Shows every tensor that is there and that a module could move, always in the same order.
    fn each_tensor(&mut self, see: &mut dyn FnMut(OffloadModule, &mut Tensor));
}

/// What blocks of a stage have on the host, the last that ran on top.
#[derive(Debug, Default)]
pub(crate) struct Away {
    blocks: Vec<Gone>,
    /// What leaves now, with its number.
    leaving: Option<(Leaving, u64)>,
    /// What comes back, of the block that is next backward.
    coming: Option<(Coming, u64)>,
}

/// Of one block: parcels, in the order of its tensors, and which of these they are.
#[derive(Debug, Default)]
struct Gone {
    parcels: Vec<Parcel>,
    places: Vec<usize>,
}

impl Away {
    /// A block has run forward: what the one before it had leave has left, and its own tensors leave, if
    /// something runs after it.
    pub(crate) fn forward(
        &mut self,
        cx: &Context,
        offload: Offload,
        saved: Option<&mut dyn Saved>,
        stays: bool,
    ) {
        self.settle(cx);
        let mut gone = Gone::default();
        let mut tensors = Vec::new();
        if let Some(saved) = saved.filter(|_| !stays && !offload.is_none()) {
            let mut place = 0;
            saved.each_tensor(&mut |module, tensor| {
                if offload.covers(module) && !tensor.is_empty() && !tensor.is_shared() {
                    gone.places.push(place);
                    tensors.push(std::mem::replace(tensor, cx.nothing.clone()));
                }
                place += 1;
            });
        }
        if !tensors.is_empty() {
            let bytes = tensors.iter().map(Tensor::bytes).sum();
            let number = cx.recorder.transfer(bytes, true, &cx.device);
            let start = || transfer::start_to_host(&cx.device, tensors);
            let (parcels, leaving) = cx.op(Category::Offload, start);
            gone.parcels = parcels;
            self.leaving = Some((leaving, number));
        }
        self.blocks.push(gone);
    }

    /// Lets go of what leaves: after a stage's forward pass, all that is to leave has left.
    pub(crate) fn settle(&mut self, cx: &Context) {
        if let Some((leaving, number)) = self.leaving.take() {
            cx.wait_for_transfer(number, || leaving.settle(&cx.device));
        }
    }

    /// Lets what the next block has on the host come back.
    pub(crate) fn ahead(&mut self, cx: &Context) {
        let parcels = match self.blocks.last_mut() {
            Some(gone) if !gone.parcels.is_empty() => std::mem::take(&mut gone.parcels),
            _ => return,
        };
        let bytes = parcels.iter().map(Parcel::bytes).sum();
        let number = cx.recorder.transfer(bytes, false, &cx.device);
        let start = || transfer::start_to_device(&cx.device, parcels);
        self.coming = Some((cx.op(Category::Offload, start), number));
    }

    /// A block is to run backward: its tensors are back in their places, and those of the next one come.
    pub(crate) fn backward(&mut self, cx: &Context, saved: Option<&mut dyn Saved>) {
        let gone = self.blocks.pop().expect("a block runs backward once");
        if let (Some((coming, number)), Some(saved)) = (self.coming.take(), saved) {
            let tensors = cx.wait_for_transfer(number, || coming.settle(&cx.device));
            let mut back = gone.places.into_iter().zip(tensors);
            let mut next = back.next();
            let mut place = 0;
            saved.each_tensor(&mut |_, tensor| {
                if let Some((_, own)) = next.take_if(|(own, _)| *own == place) {
                    *tensor = own;
                    next = back.next();
                }
                place += 1;
            });
            assert!(next.is_none(), "what left comes back to where it was");
        }
        self.ahead(cx);
    }
}
