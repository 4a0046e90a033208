//! [`HostShare`]: how much of the optimizer's state rests on the host between steps.

use serde::{Deserialize, Serialize};

/// A share of the elements of a rank's optimizer shards, from 0 to 1, whose masters and moments rest in memory of
/// the host (Megatron-Core's `--optimizer-offload-fraction`). Of each family of weights these are the last elements,
/// in pieces that pass through the device when they are updated: what is computed is the same, to the bit.
#[derive(Debug, Clone, Copy, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostShare(pub f64);

/// Where the host's part of a shard begins is a multiple of this, and so are sizes of pieces: elements.
const GRAIN: u64 = 128;

/// Elements of a piece, at least and at most. The device holds two of them at once.
const PIECE: [u64; 2] = [8 * GRAIN, 1 << 24];

/// Pieces of a shard that is neither small nor large.
const PIECES: u64 = 8;

impl HostShare {
    /// Whether all rests on the device.
    pub fn is_none(self) -> bool {
        self.0 == 0.0
    }

    /// Whether it is a share.
    pub fn is_legal(self) -> bool {
        (0.0..=1.0).contains(&self.0)
    }

    /// Elements of a shard of `len` whose state rests on the host.
    pub fn on_host(self, len: u64) -> u64 {
        let kept = ((1.0 - self.0) * len as f64).ceil() as u64;
        len.saturating_sub(kept.next_multiple_of(GRAIN))
    }

    /// Sizes of the pieces that they go in, in order; all but the last are alike.
    pub fn pieces(self, len: u64) -> Vec<u64> {
        let all = self.on_host(len);
        let [least, most] = PIECE;
        let piece = all
            .div_ceil(PIECES)
            .next_multiple_of(GRAIN)
            .clamp(least, most);
        (0..all)
            .step_by(piece as usize)
            .map(|at| piece.min(all - at))
            .collect()
    }
}

/// Elements of the most that is on the device at once of pieces that follow one another: two neighbours.
pub fn in_flight(pieces: &[u64]) -> u64 {
    let pairs = pieces.windows(2).map(|pair| pair[0] + pair[1]);
    pairs.chain(pieces.first().copied()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_pieces_are_the_share_of_the_host() {
        for len in [0, 1, 127, 128, 4096, 100_000, 1 << 20, (1 << 28) + 128] {
            let (none, all) = (HostShare(0.0), HostShare(1.0));
            assert_eq!((none.on_host(len), all.on_host(len)), (0, len));
            for share in [0.0, 0.1, 0.25, 0.5, 0.9, 1.0].map(HostShare) {
                let (pieces, on_host) = (share.pieces(len), share.on_host(len));
                assert_eq!(pieces.iter().sum::<u64>(), on_host);
                assert!(on_host as f64 <= share.0 * len as f64);
                assert!((share.0 * len as f64) - (on_host as f64) < GRAIN as f64 + 1.0);
                assert!((len - on_host).is_multiple_of(GRAIN) || on_host == 0 || share == all);
                assert!(pieces.iter().all(|&piece| piece > 0 && piece <= PIECE[1]));
                assert!(in_flight(&pieces) <= on_host.min(2 * PIECE[1]));
            }
        }
        assert_eq!(in_flight(&[8, 3, 9, 1]), 12);
        assert_eq!(in_flight(&[8]), 8);
    }

    #[test]
    fn shares_are_numbers_from_0_to_1() {
        for (share, legal) in [
            (0.0, true),
            (1.0, true),
            (-0.1, false),
            (1.1, false),
            (f64::NAN, false),
        ] {
            assert_eq!(HostShare(share).is_legal(), legal, "{share}");
        }
    }
}
