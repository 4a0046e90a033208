//! What streams did with a block of memory: for every byte, who wrote it last and who has read it since.
//!
//! A use is one event over some ranges. It has to come after the last write of all of them and, where it
//! writes, after the reads since: in the clock of its stream, whatever the order in which the emulator did
//! them. All that matters is remembered, so a wait that is missing is found in every run that asks for
//! both pieces of work. (Happens-before over streams; of reads those that a later read came after are
//! dropped, since whoever comes after that came after them.)

use std::collections::BTreeMap;
use std::ops::Range;

use crate::streams::{Clock, Work};

/// Who used the bytes of a block.
#[derive(Debug)]
pub(crate) struct History {
    /// By where they start; each ends where the next one starts.
    pieces: BTreeMap<usize, Piece>,
    end: usize,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Piece {
    write: Option<Work>,
    /// None of them came after another.
    reads: Vec<Work>,
}

/// A range that an event uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) range: Range<usize>,
    pub(crate) writes: bool,
}

/// Two uses that nothing orders.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Collision {
    pub(crate) range: Range<usize>,
    pub(crate) writes: bool,
    pub(crate) before: Work,
    pub(crate) wrote_before: bool,
}

impl History {
    /// Of memory that nobody has used.
    pub(crate) fn new(bytes: usize) -> Self {
        Self {
            pieces: BTreeMap::from([(0, Piece::default())]),
            end: bytes,
        }
    }

    /// Notes what an event uses; `over` is what came before it.
    pub(crate) fn note(
        &mut self,
        event: Work,
        over: &Clock,
        uses: &[Use],
    ) -> Result<(), Collision> {
        for Use { range, writes } in uses {
            if range.is_empty() {
                continue;
            }
            self.cut(range.start);
            self.cut(range.end);
            self.check(over, range, *writes)?;
            if *writes {
                self.write(event, range);
            } else {
                self.read(event, over, range);
            }
        }
        Ok(())
    }

    /// Lets a piece start here.
    fn cut(&mut self, at: usize) {
        if at >= self.end || self.pieces.contains_key(&at) {
            return;
        }
        let before = self.pieces.range(..at).next_back();
        let (_, piece) = before.expect("the first piece starts at 0");
        let piece = piece.clone();
        self.pieces.insert(at, piece);
    }

    fn check(&self, over: &Clock, range: &Range<usize>, writes: bool) -> Result<(), Collision> {
        for (&start, piece) in self.pieces.range(range.clone()) {
            let read = piece.reads.iter().filter(|_| writes);
            let wrote = piece.write.iter();
            let mut before = wrote.map(|e| (e, true)).chain(read.map(|e| (e, false)));
            if let Some((&before, wrote_before)) = before.find(|(event, _)| !over.knows(**event)) {
                let next = self.pieces.range(start + 1..range.end).next();
                return Err(Collision {
                    range: start..next.map_or(range.end, |(&next, _)| next),
                    writes,
                    before,
                    wrote_before,
                });
            }
        }
        Ok(())
    }

    fn write(&mut self, event: Work, range: &Range<usize>) {
        let written = Piece {
            write: Some(event),
            reads: Vec::new(),
        };
        for start in self.starts(range.clone()) {
            self.pieces.remove(&start);
        }
        self.pieces.insert(range.start, written);
    }

    fn read(&mut self, event: Work, over: &Clock, range: &Range<usize>) {
        for (_, piece) in self.pieces.range_mut(range.clone()) {
            piece.reads.retain(|before| !over.knows(*before));
            if !piece.reads.contains(&event) {
                piece.reads.push(event);
            }
        }
        self.join(range);
    }

    /// Lets neighbours with one history be one piece again.
    fn join(&mut self, range: &Range<usize>) {
        let before = self.pieces.range(..range.start).next_back();
        let mut last = before.map(|(&start, _)| start);
        for start in self.starts(range.start..range.end + 1) {
            match last {
                Some(last) if self.pieces[&last] == self.pieces[&start] => {
                    self.pieces.remove(&start);
                }
                _ => last = Some(start),
            }
        }
    }

    /// Where pieces start in a range.
    fn starts(&self, range: Range<usize>) -> Vec<usize> {
        self.pieces.range(range).map(|(&start, _)| start).collect()
    }
}

#[cfg(test)]
mod tests;
