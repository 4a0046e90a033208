//! [`Said`]: flags by name, with their meaning as numbers and words; and [`Problem`]: what is wrong with one.

use super::table;
use super::text::{Settings, Value, flag};
use crate::layout::MAX_GPUS;

/// What is wrong with a flag, or what cannot be priced of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// A value that means nothing.
    #[error("{}: found `{found}`, expected {expected}", flag(.name))]
    Value {
        /// The flag.
        name: String,
        /// What was found.
        found: String,
        /// What would work.
        expected: String,
    },
    /// A value that a variable has, which the file does not assign.
    #[error("{}: `{found}` holds a variable that the file does not assign; write its value", flag(.name))]
    Variable {
        /// The flag.
        name: String,
        /// What was found.
        found: String,
    },
    /// A flag that a job cannot do without.
    #[error("{} is missing; expected {expected}", flag(.name))]
    Missing {
        /// The flag.
        name: &'static str,
        /// What would work.
        expected: String,
    },
    /// A flag that Megatron-LM does not have.
    #[error("{} is unknown; nearest: {}", flag(.name), flag(.nearest))]
    Unknown {
        /// The flag.
        name: String,
        /// What would work.
        nearest: &'static str,
    },
    /// A rule of Megatron-LM that the settings break.
    #[error("{rule}; nearest: {nearest}")]
    Illegal {
        /// What does not go together.
        rule: String,
        /// What would work.
        nearest: String,
    },
    /// What Megatron-LM runs and this program does not price.
    #[error("{what} has no price here; nearest: {nearest}")]
    Unable {
        /// What is said.
        what: String,
        /// What would work.
        nearest: String,
    },
}

/// The flags of some settings. Values that mean nothing are collected, and stand as though they were absent.
pub(super) struct Said<'a> {
    settings: &'a Settings,
    /// What keeps the settings from being priced.
    pub(super) problems: Vec<Problem>,
    /// Rules that are broken, beside which they are.
    pub(super) broken: Vec<Problem>,
    /// What is priced otherwise than it is said.
    pub(super) notes: Vec<String>,
}

impl<'a> Said<'a> {
    pub(super) fn new(settings: &'a Settings) -> Self {
        Self {
            settings,
            problems: Vec::new(),
            broken: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Whether a switch is on.
    pub(super) fn on(&self, name: &'static str) -> bool {
        known(name);
        self.settings.is_on(name)
    }

    /// Whether a flag is set at all.
    pub(super) fn is_there(&self, name: &'static str) -> bool {
        known(name);
        !matches!(self.settings.get(name), None | Some(Value::Off))
    }

    /// Whether a flag is a number above another.
    pub(super) fn there_and_above(&self, name: &'static str, least: u64) -> bool {
        known(name);
        match self.settings.get(name) {
            Some(Value::Words(words)) => words
                .first()
                .and_then(|word| word.parse().ok())
                .is_some_and(|number: u64| number > least),
            _ => false,
        }
    }

    /// The words of a flag.
    pub(super) fn words(&mut self, name: &'static str) -> Option<&'a [String]> {
        known(name);
        match self.settings.get(name) {
            None | Some(Value::Off) => None,
            Some(Value::Words(words)) => Some(words),
            Some(Value::On) => {
                self.wrong(name, "nothing", "a value");
                None
            }
        }
    }

    /// The one word of a flag.
    pub(super) fn word(&mut self, name: &'static str) -> Option<&'a str> {
        match self.words(name)? {
            [word] => Some(word),
            words => {
                self.wrong(name, &words.join(" "), "one value");
                None
            }
        }
    }

    /// A whole number of at least 1 and at most `most`.
    pub(super) fn number(&mut self, name: &'static str, most: u64) -> Option<u64> {
        let word = self.word(name)?;
        let number = word.parse().ok();
        if let Some(number) = number.filter(|number| (1..=most).contains(number)) {
            return Some(number);
        }
        self.wrong(name, word, &format!("a whole number from 1 to {most}"));
        None
    }

    /// The same, where it is of ranks.
    pub(super) fn degree(&mut self, name: &'static str) -> Option<u32> {
        let number = self.number(name, u64::from(MAX_GPUS))?;
        u32::try_from(number).ok()
    }

    /// A number within bounds.
    pub(super) fn real(&mut self, name: &'static str, bounds: [f64; 2]) -> Option<f64> {
        let word = self.word(name)?;
        let number: Option<f64> = word.parse().ok();
        let within = |number: &f64| (bounds[0]..=bounds[1]).contains(number);
        if let Some(number) = number.filter(within) {
            return Some(number);
        }
        let [least, most] = bounds;
        self.wrong(name, word, &format!("a number from {least} to {most}"));
        None
    }

    /// One of some words, as what it means.
    pub(super) fn one_of<T: Copy>(
        &mut self,
        name: &'static str,
        meanings: &[(&str, T)],
    ) -> Option<T> {
        let word = self.word(name)?;
        let found = meanings.iter().find(|(own, _)| *own == word);
        if found.is_none() {
            let names: Vec<&str> = meanings.iter().map(|(own, _)| *own).collect();
            self.wrong(name, word, &names.join(" or "));
        }
        found.map(|(_, meaning)| *meaning)
    }

    pub(super) fn missing(&mut self, name: &'static str, expected: &str) {
        known(name);
        let expected = expected.to_owned();
        self.problems.push(Problem::Missing { name, expected });
    }

    pub(super) fn unable(&mut self, what: impl Into<String>, nearest: impl Into<String>) {
        self.problems.push(Problem::Unable {
            what: what.into(),
            nearest: nearest.into(),
        });
    }

    pub(super) fn illegal(&mut self, rule: impl Into<String>, nearest: impl Into<String>) {
        self.broken.push(Problem::Illegal {
            rule: rule.into(),
            nearest: nearest.into(),
        });
    }

    pub(super) fn wrong(&mut self, name: &str, found: &str, expected: &str) {
        let (name, found) = (name.to_owned(), found.to_owned());
        self.problems.push(if found.contains('$') {
            Problem::Variable { name, found }
        } else {
            Problem::Value {
                name,
                found,
                expected: expected.to_owned(),
            }
        });
    }
}

/// Each flag that is read is in the table.
fn known(name: &str) {
    debug_assert!(table::find(name).is_some(), "{name} is not in the table");
}
