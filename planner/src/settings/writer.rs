//! [`Writer`]: collects flags with their remarks, and what cannot be said.

use super::table::{self, Facet, Role};
use super::text::{Setting, Settings, Value, flag};
use super::version::Version;

/// Something of a plan that the target has no flag for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}; nearest: {nearest}")]
pub struct Refusal {
    /// What cannot be said, and why.
    pub what: String,
    /// What can.
    pub nearest: String,
}

/// Settings with what is to be said of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Written {
    /// The settings.
    pub settings: Settings,
    /// Remarks by the name of a flag or a variable.
    pub remarks: Vec<(String, String)>,
    /// What a reader should know.
    pub notes: Vec<String>,
}

impl Written {
    /// The remark on a flag or a variable.
    pub fn remark(&self, name: &str) -> Option<&str> {
        let mut all = self.remarks.iter();
        all.find(|(own, _)| own == name)
            .map(|(_, remark)| remark.as_str())
    }

    /// The flags of a facet.
    pub fn of_facet(&self, facet: Facet) -> impl Iterator<Item = &Setting> {
        let own = self.settings.flags.iter();
        own.filter(move |setting| facet_of(&setting.name) == Some(facet))
    }
}

/// The facet that a flag belongs to, if a plan says it.
pub(super) fn facet_of(name: &str) -> Option<Facet> {
    match table::find(name)?.role {
        Role::Read(facet) => Some(facet),
        Role::Unpriced(_) | Role::Kept => None,
    }
}

pub(super) struct Writer {
    pub(super) version: Version,
    pub(super) written: Written,
    pub(super) refused: Vec<Refusal>,
    /// How many of them are of the model.
    pub(super) refused_of_model: usize,
}

impl Writer {
    pub(super) fn new(version: Version) -> Self {
        Self {
            version,
            written: Written::default(),
            refused: Vec::new(),
            refused_of_model: 0,
        }
    }

    /// A switch, on.
    pub(super) fn on(&mut self, name: &'static str) {
        self.put(name, Value::On);
    }

    /// A flag with its value.
    pub(super) fn set(&mut self, name: &'static str, value: &(impl ToString + ?Sized)) {
        self.put(name, Value::word(value));
    }

    /// A flag with words.
    pub(super) fn list<'a>(&mut self, name: &'static str, words: impl Iterator<Item = &'a str>) {
        let words = words.map(str::to_owned).collect();
        self.put(name, Value::Words(words));
    }

    /// Says why the flag written last is as it is.
    pub(super) fn because(&mut self, why: impl Into<String>) {
        if let Some(last) = self.written.settings.flags.last() {
            let name = last.name.clone();
            self.written.remarks.push((name, why.into()));
        }
    }

    pub(super) fn refuse(&mut self, what: impl Into<String>, nearest: impl Into<String>) {
        self.refused.push(Refusal {
            what: what.into(),
            nearest: nearest.into(),
        });
    }

    fn put(&mut self, name: &'static str, value: Value) {
        let known = table::find(name);
        debug_assert!(known.is_some(), "{name} is not in the table");
        if let Some(known) = known.filter(|known| known.since > self.version) {
            let (own, since) = (flag(name), known.since.name());
            self.refuse(
                format!("Megatron-Core {} has no {own}", self.version.name()),
                format!("--megatron {since}, or a plan without it"),
            );
        }
        self.written.settings.set(name, value);
    }
}
