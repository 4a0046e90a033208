//! Reads a TOML table key by key, strictly: a wrong type, an implausible value or a key nobody asked
//! for is an error that names the file and the key.
//!
//! The keys that are known are those that were asked for, so there is no second list to keep.

use std::fmt::Write as _;
use std::path::PathBuf;

use toml::{Table, Value};

use crate::nearest::nearest;

/// The slowest link that a description may have: a MB a second. Less is a slip, and a time that no
/// clock holds.
const LEAST_GB_PER_S: f64 = 0.001;

/// Why a cluster description was refused.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// No preset of that name.
    #[error("no {kind} preset is named `{name}`; the nearest is `{nearest}` (there are: {known})")]
    UnknownPreset {
        /// `cluster` or `GPU`.
        kind: &'static str,
        /// What was asked for.
        name: String,
        /// The closest preset.
        nearest: String,
        /// All presets.
        known: String,
    },
    /// The file could not be read.
    #[error("cannot read the cluster file {path}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{origin} is not valid TOML: {message}")]
    Syntax {
        /// The file or preset.
        origin: String,
        /// What the parser said, with the line.
        message: String,
    },
    /// A key nobody reads.
    #[error("{origin}: unknown key `{key}`; the nearest known key is `{nearest}`")]
    UnknownKey {
        /// The file or preset.
        origin: String,
        /// The key, with its table.
        key: String,
        /// The closest key that is read.
        nearest: String,
    },
    /// A key that must be there is not.
    #[error("{origin}: `{key}` is missing: {hint}")]
    Missing {
        /// The file or preset.
        origin: String,
        /// The key, with its table.
        key: String,
        /// What to write.
        hint: String,
    },
    /// A key has a value that cannot be.
    #[error("{origin}: `{key}` is {found}; expected {expected}")]
    Invalid {
        /// The file or preset.
        origin: String,
        /// The key, with its table.
        key: String,
        /// The value in the file.
        found: String,
        /// What would work.
        expected: String,
    },
}

/// A table that is being read.
pub(super) struct Fields {
    origin: String,
    prefix: String,
    table: Table,
    asked: Vec<&'static str>,
}

impl Fields {
    pub(super) fn parse(origin: &str, text: &str) -> Result<Self, ClusterError> {
        let table: Table = toml::from_str(text).map_err(|error| ClusterError::Syntax {
            origin: origin.to_owned(),
            message: error.to_string().trim_end().replace('\n', "\n    "),
        })?;
        Ok(Self::new(origin, "", table))
    }

    pub(super) fn new(origin: &str, prefix: &str, table: Table) -> Self {
        Self {
            origin: origin.to_owned(),
            prefix: prefix.to_owned(),
            table,
            asked: Vec::new(),
        }
    }

    /// The name of a key with its table, as messages show it.
    fn path(&self, key: &str) -> String {
        let mut path = self.prefix.clone();
        if !path.is_empty() {
            path.push('.');
        }
        path.push_str(key);
        path
    }

    pub(super) fn invalid(
        &self,
        key: &str,
        found: impl std::fmt::Display,
        expected: &str,
    ) -> ClusterError {
        ClusterError::Invalid {
            origin: self.origin.clone(),
            key: self.path(key),
            found: found.to_string(),
            expected: expected.to_owned(),
        }
    }

    /// An error about the preset that a key names, as one of the key.
    pub(super) fn of_key(&self, key: &str, error: ClusterError) -> ClusterError {
        let ClusterError::UnknownPreset {
            kind,
            name,
            nearest,
            known,
        } = error
        else {
            return error;
        };
        let expected = format!("a {kind} preset; the nearest is `{nearest}` (there are: {known})");
        self.invalid(key, format!("`{name}`"), &expected)
    }

    pub(super) fn missing(&self, key: &str, hint: &str) -> ClusterError {
        ClusterError::Missing {
            origin: self.origin.clone(),
            key: self.path(key),
            hint: hint.to_owned(),
        }
    }

    /// Takes the raw value of a key.
    pub(super) fn take(&mut self, key: &'static str) -> Option<Value> {
        self.asked.push(key);
        self.table.remove(key)
    }

    /// Undoes a [`Self::take`].
    pub(super) fn put_back(&mut self, key: &'static str, value: Value) {
        self.table.insert(key.to_owned(), value);
    }

    /// Takes a number within bounds, both included. `unit` is what an error says it is.
    pub(super) fn number(
        &mut self,
        key: &'static str,
        least: f64,
        most: f64,
        unit: &str,
    ) -> Result<Option<f64>, ClusterError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let number = match value {
            Value::Float(number) => number,
            Value::Integer(number) => number as f64,
            other => {
                return Err(self.invalid(
                    key,
                    format!("`{other}` ({})", other.type_str()),
                    &format!("a number: {unit}"),
                ));
            }
        };
        if !(least..=most).contains(&number) {
            return Err(self.invalid(key, number, &format!("{unit}, from {least} to {most}")));
        }
        Ok(Some(number))
    }

    /// Takes a rate in GB/s: 0 where there is no link, otherwise at least [`LEAST_GB_PER_S`].
    pub(super) fn rate_or_none(
        &mut self,
        key: &'static str,
        most: f64,
        unit: &str,
    ) -> Result<Option<f64>, ClusterError> {
        match self.number(key, 0.0, most, unit)? {
            Some(rate) if rate > 0.0 && rate < LEAST_GB_PER_S => Err(self.invalid(
                key,
                rate,
                &format!("{unit}: 0 for none, or from {LEAST_GB_PER_S} to {most}"),
            )),
            rate => Ok(rate),
        }
    }

    /// Takes a whole number of at least one.
    pub(super) fn count(
        &mut self,
        key: &'static str,
        what: &str,
    ) -> Result<Option<u32>, ClusterError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Integer(number)) if number >= 1 && u32::try_from(number).is_ok() => {
                Ok(Some(number as u32))
            }
            Some(other) => Err(self.invalid(
                key,
                format!("`{other}`"),
                &format!("{what}: a whole number of at least 1"),
            )),
        }
    }

    pub(super) fn string(&mut self, key: &'static str) -> Result<Option<String>, ClusterError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) if !text.trim().is_empty() => Ok(Some(text)),
            Some(other) => Err(self.invalid(key, format!("`{other}`"), "a text")),
        }
    }

    pub(super) fn strings(
        &mut self,
        key: &'static str,
    ) -> Result<Option<Vec<String>>, ClusterError> {
        let expected = "a list of texts";
        match self.take(key) {
            None => Ok(None),
            Some(Value::Array(items)) => items
                .into_iter()
                .map(|item| match item {
                    Value::String(text) => Ok(text),
                    other => Err(self.invalid(key, format!("`{other}`"), expected)),
                })
                .collect::<Result<_, _>>()
                .map(Some),
            Some(other) => Err(self.invalid(key, format!("`{other}`"), expected)),
        }
    }

    /// Takes a table.
    pub(super) fn table(&mut self, key: &'static str) -> Result<Option<Fields>, ClusterError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Table(table)) => Ok(Some(Self::new(&self.origin, &self.path(key), table))),
            Some(other) => Err(self.invalid(key, format!("`{other}`"), "a table")),
        }
    }

    /// Takes a list of tables.
    pub(super) fn tables(
        &mut self,
        key: &'static str,
    ) -> Result<Option<Vec<Fields>>, ClusterError> {
        let expected = "a list of tables";
        match self.take(key) {
            None => Ok(None),
            Some(Value::Array(items)) => items
                .into_iter()
                .enumerate()
                .map(|(index, item)| match item {
                    Value::Table(table) => {
                        let mut path = self.path(key);
                        let _ = write!(path, "[{index}]");
                        Ok(Self::new(&self.origin, &path, table))
                    }
                    other => Err(self.invalid(key, format!("`{other}`"), expected)),
                })
                .collect::<Result<_, _>>()
                .map(Some),
            Some(other) => Err(self.invalid(key, format!("`{other}`"), expected)),
        }
    }

    /// Refuses what is left: nobody asked for it.
    pub(super) fn finish(self) -> Result<(), ClusterError> {
        let Some((key, _)) = self.table.iter().next() else {
            return Ok(());
        };
        Err(ClusterError::UnknownKey {
            nearest: self.path(nearest(key, self.asked.iter().copied()).unwrap_or("none")),
            key: self.path(key),
            origin: self.origin,
        })
    }
}
