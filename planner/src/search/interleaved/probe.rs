//! What layers a rank or a stage can have in no split that takes less than the best.
//!
//! A program with many layers in one of them takes longer, and with cuts of its own so much longer that often no split with so many can be
//! better: the rank or the stage has fewer then, in all splits that are left. Each of these is hardly a loss to the program of all, all of
//! them together are a great one (bound tightening by optimization; for mixed-integer programs Gleixner, Berthold, Mueller and Weltge,
//! Three enhancements for optimization-based bound tightening, 2017).

use rayon::prelude::*;

use super::super::watch::Looks;
use super::program::{Limits, Point, Program, Unsolved, WHOLE};
use super::{Interleaved, Node, own};

/// How many layers more than a point and the best split have, and fewer than the point has, are probed.
const PROBES: usize = 4;
/// Rows that a program of a probe is given at most.
const ROWS: usize = 40;
/// After how many of them it is asked whether the others can suffice.
const PACE: usize = 5;
/// How much of what those before have added each of the others does, at most.
const FADING: f64 = 0.5;

/// By what share of its seconds a program may be below a cut that is not added.
const CUT_OFF: f64 = 1e-4;

/// Layers of a rank or of a stage.
struct Probed {
    stages: Vec<usize>,
    limits: [u32; 2],
}

impl Interleaved<'_> {
    /// Limits of the splits of a node without what none has that takes less than something, with about so many rows added to programs at
    /// most; none where no split is left. And how many were.
    pub(super) fn probed(
        &self,
        node: &Node,
        (below_s, rows): (f64, usize),
        looks: &Looks<'_>,
    ) -> (Option<Limits>, usize) {
        let layout = self.case.layout;
        let program = Program::new(layout, &self.classes, &node.limits, node.rows.clone());
        let (Ok(program), Some(point)) = (program, &node.point) else {
            return (Some(node.limits.clone()), 0);
        };
        let ranks = node.limits.ranks.iter().enumerate();
        let ranks = ranks.map(|(rank, &limits)| Probed {
            stages: own(layout, rank).collect(),
            limits,
        });
        let stages = node.limits.stages.iter().enumerate();
        let stages = stages.map(|(stage, &limits)| Probed {
            stages: vec![stage],
            limits,
        });
        let all: Vec<Probed> = ranks.chain(stages).collect();
        let of_each = rows / all.len();
        let enough_s = self.enough_s(below_s);
        let probe = |probed: &Probed| {
            let mut added = 0;
            if looks.look().is_break() {
                return (probed.limits, added);
            }
            let mut is_open = |limits, rows: usize| {
                let rows = rows.min(of_each.saturating_sub(added));
                added += 1;
                let part = program.clone().between(&probed.stages, limits);
                let cut = part.and_then(|part| {
                    self.cut_to((part, &node.limits), (enough_s, rows), &mut added)
                });
                match cut {
                    Ok(program) => program.seconds() < enough_s,
                    Err(unsolved) => unsolved == Unsolved::Failed,
                }
            };
            let layers = |point: &Point| -> f64 {
                let stages = probed.stages.iter();
                stages.map(|&stage| point.stages[stage]).sum()
            };
            let own = layers(point);
            // As many as the best split has are not probed.
            let most = self.good.as_ref().map_or(own, layers).max(own);
            let low = (most + WHOLE).floor() as u32;
            let high = (own - WHOLE).ceil() as u32;
            let [fewest, most] = probed.limits;
            // How few there are at least follows from how many the others have at most.
            let mut below = (fewest..high).rev().take(PROBES);
            let below = below.find(|layers| !is_open([0, *layers], 0));
            let mut above = (low + 1..=most).take(PROBES);
            let above = above.find(|layers| !is_open([*layers, u32::MAX], ROWS));
            let limits = [
                below.map_or(fewest, |below| below + 1),
                above.map_or(most, |above| above - 1),
            ];
            (limits, added)
        };
        let (mut limits, added): (Vec<[u32; 2]>, Vec<usize>) = all.par_iter().map(probe).unzip();
        let stages = limits.split_off(layout.pp() as usize);
        let limits = Limits {
            stages,
            ranks: limits,
        };
        let narrowed = limits.narrowed(layout, &self.classes);
        (narrowed, added.into_iter().sum())
    }

    /// A program of splits within some limits with so many rows added at most, as long as it takes less than something.
    pub(super) fn cut_to(
        &self,
        (mut program, limits): (Program, &Limits),
        (enough_s, rows): (f64, usize),
        added: &mut usize,
    ) -> Result<Program, Unsolved> {
        let mut before_s = program.seconds();
        for row in 0..rows {
            let least_s = program.seconds();
            if least_s >= enough_s {
                break;
            }
            if row > 0 && row % PACE == 0 {
                let each_s = FADING * (least_s - before_s) / PACE as f64;
                if least_s + each_s * ((rows - row) as f64) < enough_s {
                    break;
                }
                before_s = least_s;
            }
            let (next, more) = self.cut_once(program, limits, CUT_OFF)?;
            program = next;
            *added += more;
            if more == 0 {
                break;
            }
        }
        Ok(program)
    }
}
