//! Is there room for the checkpoints of a run: asked before its first step, not after its hundredth.

use std::path::Path;

use moefold_planner::model::Model;
use moefold_profiles::units::Bytes;

use super::KEPT;
use crate::error::Error;
use crate::files::free;
use crate::model::global_tensors;
use crate::weights::{GlobalTensor, State};

/// Bytes of a checkpoint, and of the copy in memory of the host that it is written from, over all ranks: masters and
/// both moments in f32.
pub fn bytes(model: &Model) -> u64 {
    bytes_of(&global_tensors(model))
}

/// The same of a model's tensors.
pub(super) fn bytes_of(tensors: &[GlobalTensor]) -> u64 {
    let elements: usize = tensors.iter().map(GlobalTensor::len).sum();
    (State::ALL.len() * elements * size_of::<f32>()) as u64
}

/// How many checkpoints of a run the disk has to take beside those that are `there`: as many as are kept, and one that is
/// written before the oldest of them goes, less those; fewer where the run ends earlier.
pub(super) fn to_come([first, last]: [u64; 2], every: u64, there: usize) -> u64 {
    let due = last / every - first / every + u64::from(!last.is_multiple_of(every));
    due.min((KEPT + 1 - there.min(KEPT)) as u64)
}

/// Refuses to save `count` checkpoints of `bytes` each below `folder`, which need not be there yet, where
/// its file system has no room for them. One that does not say how much it has is trusted.
pub(super) fn check(folder: &Path, count: u64, bytes: u64) -> Result<(), Error> {
    free(folder).map_or(Ok(()), |free| check_free(folder, count, bytes, free))
}

fn check_free(folder: &Path, count: u64, bytes: u64, free: u64) -> Result<(), Error> {
    if count * bytes <= free {
        return Ok(());
    }
    let [each, all, free] = [bytes, count * bytes, free].map(Bytes);
    Err(Error::Request(format!(
        "{}: {all} are needed for {count} checkpoints of {each} to come ({KEPT} are kept, and the \
         next is written before the older goes), and {free} are free: make room, choose another \
         folder for the run, or save no checkpoints",
        folder.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_checkpoints_to_come() {
        for (steps, every, there, expected) in [
            ([0, 1], 5, 0, 1),
            ([0, 5], 5, 0, 1),
            ([0, 6], 5, 0, 2),
            ([0, 10], 5, 0, 2),
            ([0, 100], 5, 0, 3),
            ([95, 100], 5, 0, 1),
            ([94, 100], 5, 0, 2),
            ([0, 100], 1, 0, 3),
            // A run that goes on.
            ([5, 15], 5, 1, 2),
            ([5, 100], 5, 1, 2),
            ([10, 100], 5, 2, 1),
            ([10, 100], 5, 9, 1),
            ([100, 100], 5, 2, 0),
        ] {
            assert_eq!(
                to_come(steps, every, there),
                expected,
                "{steps:?}, {every}, {there}"
            );
        }
    }

    #[test]
    fn too_little_room_is_refused_with_every_number() {
        let folder = Path::new("run/checkpoints");
        let gib = 1_u64 << 30;
        check_free(folder, 3, gib, 3 * gib).expect("just enough");
        let refused = check_free(folder, 3, gib, 3 * gib - 1).expect_err("a byte less");
        assert!(refused.is_bad_request());
        let text = refused.to_string();
        for part in [
            "run/checkpoints: 3.00 GiB",
            "3 checkpoints of 1.00 GiB to come",
            "choose another folder",
        ] {
            assert!(text.contains(part), "{text}");
        }
        // This file system is asked through a folder that is yet to be made.
        let temporary = tempfile::tempdir().expect("a temporary folder");
        let folder = temporary.path().join("new/checkpoints");
        check(&folder, 1, 1).expect("a byte");
        check(&folder, 1, u64::MAX).expect_err("more than any disk has");
    }
}
