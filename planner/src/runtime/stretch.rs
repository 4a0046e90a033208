//! [`Stretch`]: passes cut where they wait for tokens that ranks exchange, and two of them taking turns.
//!
//! A pass runs up to the start of an exchange, pauses, and goes on when it is asked to. Where a forward and a
//! backward pass of two microbatches run as one ([`Action::Combined`](crate::schedule::Action::Combined)), the backward
//! pass begins, and each pause is the other's turn; where one has ended, the other runs to its end. Gradients of weights
//! may wait in a backward pass: they run behind the start of its next exchange, before a piece that exchanges nothing,
//! and at its end. What this does to memory is [`highest`], what it does to time [`seconds`].

use moefold_profiles::trace::Category;
use moefold_profiles::{CollectiveKind, Pass};

use super::level::{Account, Level};
use super::work::{Part, Task, Work};

/// What a pass takes up to where it pauses, or to its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stretch {
    /// Above what was alive before.
    pub own: Account,
    /// Of gradients of weights that it leaves for later.
    pub left: Account,
    /// Whether the pass pauses behind it.
    pub pauses: bool,
    /// Whether what was left before runs before it.
    pub settles: bool,
}

/// Both passes of a piece of the model, or of several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stretches {
    /// Forward.
    pub forward: Vec<Stretch>,
    /// Backward.
    pub backward: Vec<Stretch>,
}

/// The most that is alive while a forward and a backward pass take turns, above what was alive before; either may be
/// nothing.
pub fn highest(forward: &[Stretch], backward: &[Stretch]) -> Level {
    let mut now = Account::default();
    let mut left: Vec<Account> = Vec::new();
    let settle = |now: &mut Account, left: &mut Vec<Account>| {
        left.drain(..).for_each(|work| now.append(&work));
    };
    let mut passes = [backward.iter(), forward.iter()];
    while passes.iter().any(|pass| pass.len() > 0) {
        for (place, pass) in passes.iter_mut().enumerate() {
            if pass.len() == 0 {
                continue;
            }
            for stretch in pass.by_ref() {
                if stretch.settles {
                    settle(&mut now, &mut left);
                }
                now.append(&stretch.own);
                left.push(stretch.left);
                if stretch.pauses {
                    break;
                }
            }
            if place == 0 {
                settle(&mut now, &mut left);
            }
        }
    }
    now.peak()
}

/// How long a pass computes up to where it pauses, and then exchanges tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Slot {
    /// What it waits for.
    pub compute_s: f64,
    /// Gradients of weights.
    pub weight_s: f64,
    /// The exchange that it ends with, where it does.
    pub sent_s: Option<f64>,
}

/// Seconds of a forward and a backward pass that take turns, of which the exchanges run beside the other's compute, and
/// where gradients of weights wait also beside those; either pass may be nothing.
pub fn seconds<'s>(
    forward: impl IntoIterator<Item = &'s Slot>,
    backward: impl IntoIterator<Item = &'s Slot>,
    delays: bool,
) -> f64 {
    let (mut forward, mut backward) = (forward.into_iter(), backward.into_iter());
    // When the device is free, and the network.
    let (mut now, mut sent) = (0.0_f64, 0.0_f64);
    let mut left = 0.0;
    // When what each has sent is there; none where it has ended.
    let mut arrives = [Some(0.0), Some(0.0)];
    while arrives.iter().any(Option::is_some) {
        for (place, arrives) in arrives.iter_mut().enumerate() {
            let Some(there) = arrives.take() else {
                continue;
            };
            let pass: &mut dyn Iterator<Item = &Slot> = match place {
                0 => &mut backward,
                _ => &mut forward,
            };
            now = now.max(there);
            for slot in pass {
                now += slot.compute_s;
                if delays {
                    left += slot.weight_s;
                } else {
                    now += slot.weight_s;
                }
                if let Some(seconds) = slot.sent_s {
                    sent = sent.max(now) + seconds;
                    *arrives = Some(sent);
                    break;
                }
            }
            if place == 0 {
                now += std::mem::take(&mut left);
            }
        }
    }
    now
}

/// Work of a pass, cut behind each exchange of tokens that it pauses for.
///
/// Who declares work names its parts and not its order: there what is of the experts stands between two exchanges, and
/// all else before them or, in a backward pass, behind them.
pub fn cut(list: &[Work], backward: bool) -> Vec<Vec<Work>> {
    if list.iter().any(|work| work.pauses) {
        let cut = list.split_inclusive(|work| work.pauses);
        let mut cut: Vec<Vec<Work>> = cut.map(<[Work]>::to_vec).collect();
        if list.last().is_some_and(|work| work.pauses) {
            cut.push(Vec::new());
        }
        return cut;
    }
    let is_exchange = |work: &Work| work.part == Some(Part::Dispatch) && exchanges(work);
    let sent: Vec<Work> = list.iter().copied().filter(is_exchange).collect();
    let [there, back] = sent[..] else {
        return vec![list.to_vec()];
    };
    let of_experts = |work: &Work| match work.part {
        Some(Part::Experts | Part::ExpertActivation) => true,
        Some(Part::Dispatch) => work.category == Category::TpComm,
        _ => false,
    };
    let rest = list.iter().copied().filter(|work| !is_exchange(work));
    let (mut experts, mut others): (Vec<Work>, Vec<Work>) = rest.partition(of_experts);
    experts.push(back);
    if backward {
        return vec![vec![there], experts, others];
    }
    others.push(there);
    vec![others, experts, Vec::new()]
}

/// Whether tokens go to other ranks and nothing else is waited for.
fn exchanges(work: &Work) -> bool {
    let sends = match work.task {
        Task::Exchange { .. } => true,
        Task::Collective(collective) => collective.kind == CollectiveKind::AllToAll,
        _ => false,
    };
    sends && work.category == Category::EpComm && work.beside.is_none()
}

/// How long the parts of [cut] work take, by the price of each; nothing of what runs beside others of its own pass.
pub fn slots(list: &[Work], backward: bool, mut price: impl FnMut(&Work) -> f64) -> Vec<Slot> {
    let cut = cut(list, backward);
    let last = cut.len() - 1;
    let each = cut.iter().enumerate();
    each.map(|(number, list)| {
        let mut slot = Slot::default();
        let mut sent_s = 0.0;
        for work in list.iter().filter(|work| work.beside.is_none()) {
            let seconds = match work.task {
                Task::Transfer { .. } => continue,
                _ => price(work),
            };
            let of_weights = matches!(work.task, Task::Op(op) if op.pass() == Some(Pass::Wgrad));
            if number < last && exchanges(work) {
                sent_s += seconds;
            } else if work.of_weights || of_weights {
                slot.weight_s += seconds;
            } else {
                slot.compute_s += seconds;
            }
        }
        slot.sent_s = (number < last).then_some(sent_s);
        slot
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use moefold_profiles::TensorClass;
    use moefold_profiles::units::Bytes;

    use super::*;

    fn slot(compute_s: f64, weight_s: f64, sent_s: Option<f64>) -> Slot {
        Slot {
            compute_s,
            weight_s,
            sent_s,
        }
    }

    /// By hand: a layer of one pass beside a layer of the other.
    #[test]
    fn golden_two_layers_take_turns() {
        let forward = [
            slot(3.0, 0.0, Some(2.0)),
            slot(4.0, 0.0, Some(2.0)),
            slot(1.0, 0.0, None),
        ];
        let backward = [
            slot(1.0, 0.0, Some(2.0)),
            slot(4.0, 4.0, Some(2.0)),
            slot(5.0, 2.0, None),
        ];
        assert!((seconds(&forward, &[], false) - 12.0).abs() < 1e-12);
        assert!((seconds(&[], &backward, false) - 20.0).abs() < 1e-12);
        // The second exchange is beside gradients of the experts' weights.
        assert!((seconds(&[], &backward, true) - 18.0).abs() < 1e-12);
        // All exchanges are hidden: 8 and 16 of compute.
        assert!((seconds(&forward, &backward, false) - 24.0).abs() < 1e-12);
        // An exchange of 9 behind a second of compute, beside 3 of the other pass: 6 show.
        let slow = [slot(1.0, 0.0, Some(9.0)), slot(2.0, 0.0, None)];
        assert!((seconds(&forward[..1], &slow, false) - 12.0).abs() < 1e-12);
    }

    /// One pass beside nothing is its stretches in a row; beside another never lower than either, nor higher than both.
    #[test]
    fn law_turns_take_no_more_than_both_passes() {
        let account = |events: &[i64]| {
            let mut account = Account::default();
            for &bytes in events {
                let of = Bytes(bytes.unsigned_abs());
                if bytes > 0 {
                    account.take(TensorClass::Activations, of);
                } else {
                    account.give(TensorClass::Activations, of);
                }
            }
            account
        };
        let stretch = |own: &[i64], left: &[i64], pauses| Stretch {
            own: account(own),
            left: account(left),
            pauses,
            settles: false,
        };
        let forward = [
            stretch(&[5, -2], &[], true),
            stretch(&[7, -1], &[], true),
            stretch(&[1], &[], false),
        ];
        let backward = [
            stretch(&[4, -3], &[2, -4], true),
            stretch(&[6, -9], &[], false),
        ];
        assert_eq!(highest(&forward, &[]).total(), 10);
        assert_eq!(highest(&[], &backward).total(), 5);
        // 1 and 2 more for weights; 5 beside what they left, then 6 beside both.
        assert_eq!(highest(&forward, &backward).total(), 8);
    }
}
