//! [`Branches`]: which variables of a script have several values, as a branch decides them, and which of these count.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// What stands for `&&` and `||` at the beginning of the command that follows.
pub(super) const JOINS: &str = "&&";
/// How many characters of a value are shown in a note.
const MOST_SHOWN: usize = 40;

/// See the module's documentation. All sides of a branch are read, one after the other.
#[derive(Debug, Default)]
pub(super) struct Branches {
    /// Branches inside of which a command stands.
    depth: usize,
    /// Whether a condition was read that no `then` followed yet.
    asks: bool,
    /// Whether the command is a test.
    tests: bool,
    /// Whether a test before it decides on it.
    is_decided: bool,
    /// Braces inside of which it stands that a test decides on.
    braces: usize,
    /// By variable, what branches decide of it, and of what it was made of.
    doubts: BTreeMap<String, Doubts>,
    /// Variables that the command has read.
    read: RefCell<BTreeSet<String>>,
    /// What branches decide of what flags and the environment say.
    said: Doubts,
}

/// By variable.
pub(super) type Doubts = BTreeMap<String, Doubt>;

/// What branches make of a variable.
#[derive(Debug, Clone, Default)]
pub(super) struct Doubt {
    /// What it is in one or the other, and before them, the last of them last.
    values: Vec<String>,
    /// Whether two of them make it the same.
    agree: bool,
    /// What they add to it.
    added: Vec<String>,
}

/// What is assigned to a variable.
pub(super) struct Assigned<'w> {
    pub(super) variable: &'w str,
    /// What it held before.
    pub(super) held: Option<&'w [String]>,
    /// What is added to that, where something is.
    pub(super) added: Option<&'w [String]>,
    /// What it holds now.
    pub(super) all: &'w [String],
}

impl Branches {
    /// Goes on to a command, by its first words: those that begin a part of a branch or a loop, and the three behind them, as far as
    /// they are plain.
    pub(super) fn command(&mut self, begun: &[Option<&str>], words: [Option<&str>; 3]) {
        if self.asks && begun.contains(&Some("then")) {
            (self.asks, self.depth) = (false, self.depth + 1);
        }
        match words {
            [Some("if"), ..] => self.asks = true,
            [Some("case"), _, Some("in")] => self.depth += 1,
            [Some("fi" | "esac"), ..] => self.depth = self.depth.saturating_sub(1),
            [Some("}"), ..] if self.braces > 0 => {
                (self.braces, self.depth) = (self.braces - 1, self.depth.saturating_sub(1));
            }
            _ => {}
        }
        self.is_decided = (self.tests || self.is_decided) && begun.contains(&Some(JOINS));
        if self.is_decided && begun.contains(&Some("{")) {
            (self.braces, self.depth) = (self.braces + 1, self.depth + 1);
        }
        self.tests = matches!(words[0], Some("[" | "[[" | "test"));
        self.read.borrow_mut().clear();
    }

    /// The command reads a variable.
    pub(super) fn reads(&self, variable: &str) {
        self.read.borrow_mut().insert(variable.to_owned());
    }

    /// The command assigns a variable, of what it has read.
    pub(super) fn assigns(&mut self, assigned: &Assigned<'_>) {
        let Assigned {
            variable,
            held,
            added,
            all,
        } = *assigned;
        let mut doubts = self.doubts_read();
        let before = self.doubts.remove(variable).unwrap_or_default();
        if self.depth > 0 || self.is_decided {
            let mut own = before.get(variable).cloned().unwrap_or_default();
            if let Some(added) = added {
                own.added.push(added.join(" "));
            } else {
                if own.values.is_empty() {
                    own.values.extend(held.map(|held| held.join(" ")));
                }
                let all = all.join(" ");
                own.agree |= own.values.contains(&all);
                own.values.retain(|value| *value != all);
                own.values.push(all);
            }
            doubts.insert(variable.to_owned(), own);
        }
        if added.is_some() {
            for (name, own) in before {
                doubts.entry(name).or_insert(own);
            }
        }
        self.doubts.insert(variable.to_owned(), doubts);
    }

    /// What branches decide of the variables that the command has read.
    pub(super) fn doubts_read(&self) -> Doubts {
        let read = self.read.borrow();
        let each = read.iter().filter_map(|name| self.doubts.get(name));
        each.flat_map(Clone::clone).collect()
    }

    /// Something says flags in doubt.
    pub(super) fn say(&mut self, mut doubts: Doubts) {
        // What a branch alone makes of a variable counts where it is said in that branch.
        doubts.retain(|_, doubt| {
            self.depth == 0 || doubt.values.len() != 1 || !doubt.added.is_empty()
        });
        self.said.extend(doubts);
    }

    /// A variable says something: it is exported, or holds flags.
    pub(super) fn say_variable(&mut self, name: &str) {
        if let Some(doubts) = self.doubts.get(name) {
            self.said.extend(doubts.clone());
        }
    }

    /// What counts of what is said in doubt, by variables of some.
    pub(super) fn notes(&self, is_one: impl Fn(&str) -> bool) -> Vec<String> {
        let said = self.said.iter().filter(|(name, _)| is_one(name));
        said.filter_map(|(name, doubt)| doubt.note(name)).collect()
    }
}

impl Doubt {
    fn note(&self, name: &str) -> Option<String> {
        let shown = |word: &String| {
            let mut begin: String = word.chars().take(MOST_SHOWN).collect();
            if begin.len() < word.len() {
                begin.push('…');
            }
            format!("`{}`", begin.trim())
        };
        let each = |words: &[String]| words.iter().map(shown).collect::<Vec<_>>().join(", ");
        match &self.values[..] {
            [others @ .., last] if !others.is_empty() => Some(format!(
                "a branch decides what ${name} is: of {} and {} the last counts",
                each(others),
                shown(last)
            )),
            [one] if self.added.is_empty() && !self.agree && !one.is_empty() => Some(format!(
                "a branch alone makes ${name} {}, which counts",
                shown(one)
            )),
            _ if self.added.is_empty() => None,
            _ => Some(format!(
                "a branch adds {} to ${name}, which counts",
                each(&self.added)
            )),
        }
    }
}
