//! [`pause`]: a forward or backward pass as a future that waits for nothing.
//!
//! Where rows have started to other ranks, a pass [`pause`]s before it asks for those that come. Run [`now`] it goes on at
//! once, and pauses are nothing. Where a schedule lets two passes take turns
//! ([`Action::Combined`](moefold_planner::schedule::Action::Combined)), the other runs up to its own next pause meanwhile: so
//! the one's exchange is beside the other's compute. Who takes turns decides nothing by time, so every rank of a group
//! asks for its exchanges in one order, and memory is the same in every run.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{self, Poll, Waker};

/// Lets another pass have its turn, if there is one.
pub(crate) async fn pause() {
    let mut paused = false;
    poll_fn(|_| {
        if std::mem::replace(&mut paused, true) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

/// Runs a pass up to where it pauses; what it gives where it has ended.
pub(crate) fn turn<T>(pass: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    match pass.poll(&mut task::Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

/// Runs a pass to its end.
pub fn now<T>(pass: impl Future<Output = T>) -> T {
    let mut pass = pin!(pass);
    loop {
        if let Some(result) = turn(pass.as_mut()) {
            return result;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_pass_goes_on_where_it_paused() {
        let said = RefCell::new(Vec::new());
        let pass = |name: &'static str, pauses: usize| {
            let said = &said;
            async move {
                for number in 0..pauses {
                    said.borrow_mut().push((name, number));
                    pause().await;
                }
                pauses
            }
        };
        {
            let (mut first, mut second) = (pin!(pass("a", 2)), pin!(pass("b", 1)));
            assert_eq!(turn(first.as_mut()), None);
            assert_eq!(turn(second.as_mut()), None);
            assert_eq!(turn(first.as_mut()), None);
            assert_eq!(turn(second.as_mut()), Some(1));
            assert_eq!(turn(first.as_mut()), Some(2));
        }
        assert_eq!(now(pass("c", 3)), 3);
        let expected = [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("c", 1), ("c", 2)];
        assert_eq!(*said.borrow(), expected);
    }
}
