//! A schedule as text: ranks by time slots, every pass one slot long.

use std::fmt::Write;

use super::{Action, ActionIndex, Schedule};

/// Slots shown on either side of an offending cell.
const SLOTS_AROUND: usize = 8;

/// A run of a schedule in which passes take one slot and messages none.
pub(super) struct DryRun {
    /// For each rank, the slot of each action that ran.
    slots: Vec<Vec<usize>>,
    /// The first rank that could not finish, and the action it stopped at.
    pub(super) stuck: Option<(u32, usize)>,
}

impl Schedule {
    /// The schedule as text: a row a rank, a column a slot, `F3` for the forward pass of microbatch
    /// 3 (`F3b` of the rank's second chunk), `B` for backward passes, `I` and `W` for the gradients of inputs
    /// and of weights where they are divided, `F3B2` for two passes as one, dots where a rank waits.
    pub fn grid(&self) -> String {
        let run = self.dry_run();
        let slots = 0..self.num_slots(&run);
        self.render(&run, slots, None)
    }

    /// The part of the grid around an action, that action in brackets.
    pub(super) fn grid_around(&self, rank: u32, position: usize) -> String {
        let run = self.dry_run();
        let mark = self.slot_of(&run, rank, position);
        let last = self.num_slots(&run).max(mark + 1);
        let slots = mark.saturating_sub(SLOTS_AROUND)..(mark + SLOTS_AROUND + 1).min(last);
        self.render(&run, slots, Some((rank, position)))
    }

    /// Runs all ranks as far as they get, sends waiting for nobody.
    pub(super) fn dry_run(&self) -> DryRun {
        let index = ActionIndex::of(self);
        let mut slots: Vec<Vec<usize>> = vec![Vec::new(); self.ranks.len()];
        let mut clock = vec![0; self.ranks.len()];
        let mut sent: Vec<Option<usize>> = vec![None; index.len()];
        let mut waiting: Vec<Option<usize>> = vec![None; index.len()];
        let mut runnable: Vec<usize> = (0..self.ranks.len()).rev().collect();
        while let Some(rank) = runnable.pop() {
            while let Some(&action) = self.ranks[rank].get(slots[rank].len()) {
                match action {
                    Action::RecvActivation(..) | Action::RecvGradient(..) => {
                        let message = index.number(action);
                        let Some(arrival) = sent[message] else {
                            waiting[message] = Some(rank);
                            break;
                        };
                        clock[rank] = clock[rank].max(arrival);
                    }
                    Action::SendActivation(..) | Action::SendGradient(..) => {
                        let receive = action.received_as().expect("a send is received");
                        let message = index.number(receive);
                        sent[message] = Some(clock[rank]);
                        runnable.extend(waiting[message].take());
                    }
                    _ => {}
                }
                slots[rank].push(clock[rank]);
                if self.cell(action).is_some() {
                    clock[rank] += 1;
                }
            }
        }
        let stuck = (0..self.ranks.len())
            .find(|&rank| slots[rank].len() < self.ranks[rank].len())
            .map(|rank| (rank as u32, slots[rank].len()));
        DryRun { slots, stuck }
    }

    fn num_slots(&self, run: &DryRun) -> usize {
        let ends = self
            .ranks
            .iter()
            .zip(&run.slots)
            .flat_map(|(actions, slots)| {
                actions
                    .iter()
                    .zip(slots)
                    .filter(|(action, _)| self.cell(**action).is_some())
                    .map(|(_, slot)| slot + 1)
            });
        ends.max().unwrap_or(0)
    }

    /// The slot of an action: its own if it ran, the one after the last that did if not.
    fn slot_of(&self, run: &DryRun, rank: u32, position: usize) -> usize {
        let slots = &run.slots[rank as usize];
        slots.get(position).copied().unwrap_or_else(|| {
            let last = slots.len().checked_sub(1);
            last.map_or(0, |last| {
                let passes = self.cell(self.ranks[rank as usize][last]).is_some();
                slots[last] + usize::from(passes)
            })
        })
    }

    fn cell(&self, action: Action) -> Option<String> {
        action.passes().map(|pass| self.cell_of(pass)).collect()
    }

    fn cell_of(&self, pass: Action) -> Option<String> {
        let (letter, stage, microbatch) = match pass {
            Action::Forward(stage, microbatch) => ('F', stage, microbatch),
            Action::Backward(stage, microbatch) => ('B', stage, microbatch),
            Action::BackwardInput(stage, microbatch) => ('I', stage, microbatch),
            Action::BackwardWeight(stage, microbatch) => ('W', stage, microbatch),
            _ => return None,
        };
        let mut cell = format!("{letter}{}", microbatch.0);
        if self.vpp > 1 {
            let chunk = self.places().chunk_of(stage.0);
            match u8::try_from(chunk).ok().filter(|&c| c < 26) {
                Some(chunk) => cell.push(char::from(b'a' + chunk)),
                None => write!(cell, ".{chunk}").expect("a string takes any text"),
            }
        }
        Some(cell)
    }

    fn render(
        &self,
        run: &DryRun,
        slots: std::ops::Range<usize>,
        mark: Option<(u32, usize)>,
    ) -> String {
        let mut rows = vec![vec![String::new(); slots.len()]; self.ranks.len()];
        for (rank, actions) in self.ranks.iter().enumerate() {
            for (action, slot) in actions.iter().zip(&run.slots[rank]) {
                if slots.contains(slot)
                    && let Some(cell) = self.cell(*action)
                {
                    rows[rank][slot - slots.start] = cell;
                }
            }
        }
        if let Some((rank, position)) = mark {
            let slot = self.slot_of(run, rank, position) - slots.start;
            let row = &mut rows[rank as usize];
            if slot < row.len() {
                let cell = match self.ranks[rank as usize].get(position) {
                    Some(&action) => self.cell(action).unwrap_or_else(|| row[slot].clone()),
                    None => String::new(),
                };
                row[slot] = format!("[{cell}]");
            }
        }
        let width = rows
            .iter()
            .flatten()
            .map(String::len)
            .max()
            .unwrap_or(1)
            .max(1);
        let mut text = String::new();
        for (rank, row) in rows.iter().enumerate() {
            write!(text, "{rank:>3} |").expect("a string takes any text");
            for cell in row {
                let shown = if cell.is_empty() { "." } else { cell };
                write!(text, " {shown:>width$}").expect("a string takes any text");
            }
            text.push('\n');
        }
        text
    }
}
