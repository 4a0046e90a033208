//! [`Keys`]: typed access to the keys of one JSON object, with errors that name key, value and file.
//!
//! What two keys may not say together is in [`super::checks`]. Rules that hold in every configuration: `null` is the same as absent, an integer may be written
//! as a float, and one quantity may go by several spellings (the first found counts, and of whole numbers all are to be the same). Numbers are
//! bounded so that no product of a few of them can overflow a count.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::model::ModelError;

pub(super) use crate::model::bounds::{EXPERTS, HEADS, LAYERS, POSITIONS, VOCAB, WIDTH};

/// A JSON object of a configuration.
#[derive(Debug, Clone)]
pub(super) struct Keys<'a> {
    file: &'a str,
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// The top of a file.
    pub(super) fn new(file: &'a str, map: &'a Map<String, Value>) -> Self {
        Self {
            file,
            prefix: String::new(),
            map,
        }
    }

    /// A nested object; its keys are named `outer.key` in messages. `null` is absent.
    pub(super) fn nested(&self, key: &str) -> Result<Option<Keys<'a>>, ModelError> {
        match self.find(&[key]) {
            None => Ok(None),
            Some((_, Value::Object(map))) => Ok(Some(Keys {
                file: self.file,
                prefix: format!("{}{key}.", self.prefix),
                map,
            })),
            Some((name, other)) => Err(self.wrong(name, other, "an object")),
        }
    }

    /// The first of the spellings that is present and not null.
    pub(super) fn find<'n>(&self, names: &[&'n str]) -> Option<(&'n str, &'a Value)> {
        names.iter().find_map(|name| match self.map.get(*name) {
            None | Some(Value::Null) => None,
            Some(value) => Some((*name, value)),
        })
    }

    /// The keys that are present and not null.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let stated = self.map.iter().filter(|(_, value)| !value.is_null());
        stated.map(|(name, _)| name.as_str())
    }

    /// Whether a key is present, if only with null.
    pub(super) fn is_stated(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Whether any spelling is present and not null.
    pub(super) fn has(&self, names: &[&str]) -> bool {
        self.find(names).is_some()
    }

    /// A whole number, if present.
    pub(super) fn opt_u64(
        &self,
        names: &[&str],
        range: &RangeInclusive<u64>,
    ) -> Result<Option<u64>, ModelError> {
        let Some((name, value)) = self.find(names) else {
            return Ok(None);
        };
        let expected = || format!("a whole number from {} to {}", range.start(), range.end());
        let number = whole(value)
            .filter(|n| range.contains(n))
            .ok_or_else(|| self.wrong(name, value, &expected()))?;
        for (other, found) in names.iter().filter_map(|name| self.find(&[name])) {
            if whole(found) != Some(number) {
                return Err(self.clash(
                    other,
                    &found.to_string(),
                    &format!("{name} = {number}, which is the same number"),
                    &format!("leave one of them out, or write {other} = {number}"),
                ));
            }
        }
        Ok(Some(number))
    }

    /// A whole number that must be there.
    pub(super) fn u64(
        &self,
        names: &[&str],
        range: &RangeInclusive<u64>,
    ) -> Result<u64, ModelError> {
        self.opt_u64(names, range)?.ok_or_else(|| {
            self.missing(
                names,
                &format!("a whole number from {} to {}", range.start(), range.end()),
            )
        })
    }

    /// A whole number with a default.
    pub(super) fn u64_or(
        &self,
        names: &[&str],
        range: &RangeInclusive<u64>,
        default: u64,
    ) -> Result<u64, ModelError> {
        Ok(self.opt_u64(names, range)?.unwrap_or(default))
    }

    /// A finite number, if present.
    pub(super) fn opt_f64(&self, names: &[&str]) -> Result<Option<f64>, ModelError> {
        let Some((name, value)) = self.find(names) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.wrong(name, value, "a number")),
        }
    }

    /// A finite number with a default.
    pub(super) fn f64_or(&self, names: &[&str], default: f64) -> Result<f64, ModelError> {
        Ok(self.opt_f64(names)?.unwrap_or(default))
    }

    /// A positive number, if present.
    fn opt_positive(&self, names: &[&str]) -> Result<Option<f64>, ModelError> {
        match self.opt_f64(names)? {
            Some(number) if number <= 0.0 => {
                let (name, value) = self.find(names).expect("a value was just read from it");
                Err(self.wrong(name, value, "a number above 0"))
            }
            found => Ok(found),
        }
    }

    /// A positive number that must be there.
    pub(super) fn positive(&self, names: &[&str]) -> Result<f64, ModelError> {
        let found = self.opt_positive(names)?;
        found.ok_or_else(|| self.missing(names, "a number above 0"))
    }

    /// A positive number with a default.
    pub(super) fn positive_or(&self, names: &[&str], default: f64) -> Result<f64, ModelError> {
        Ok(self.opt_positive(names)?.unwrap_or(default))
    }

    /// A truth value with a default; 0 and 1 are accepted for false and true.
    pub(super) fn bool_or(&self, names: &[&str], default: bool) -> Result<bool, ModelError> {
        match self.find(names) {
            None => Ok(default),
            Some((_, Value::Bool(truth))) => Ok(*truth),
            Some((name, value)) => match whole(value) {
                Some(0) => Ok(false),
                Some(1) => Ok(true),
                _ => Err(self.wrong(name, value, "true or false")),
            },
        }
    }

    /// A string, if present.
    pub(super) fn opt_str(&self, names: &[&str]) -> Result<Option<&'a str>, ModelError> {
        match self.find(names) {
            None => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text)),
            Some((name, value)) => Err(self.wrong(name, value, "a string")),
        }
    }

    /// A list, if present.
    pub(super) fn opt_list(&self, names: &[&str]) -> Result<Option<&'a [Value]>, ModelError> {
        match self.find(names) {
            None => Ok(None),
            Some((_, Value::Array(items))) => Ok(Some(items)),
            Some((name, value)) => Err(self.wrong(name, value, "a list")),
        }
    }

    /// A list of one string a layer, if present.
    pub(super) fn opt_strings(
        &self,
        names: &[&str],
        layers: u64,
    ) -> Result<Option<Vec<&'a str>>, ModelError> {
        let Some(items) = self.opt_list(names)? else {
            return Ok(None);
        };
        self.expect_len(names, items.len(), layers)?;
        items
            .iter()
            .map(|item| {
                item.as_str()
                    .ok_or_else(|| self.wrong(names[0], item, "a list of strings"))
            })
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// A list of whole numbers, if present.
    pub(super) fn opt_numbers(&self, names: &[&str]) -> Result<Option<Vec<u64>>, ModelError> {
        let Some(items) = self.opt_list(names)? else {
            return Ok(None);
        };
        items
            .iter()
            .map(|item| {
                whole(item)
                    .filter(|number| *number <= *WIDTH.end())
                    .ok_or_else(|| self.wrong(names[0], item, "a list of whole numbers"))
            })
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// One of a closed set of words.
    pub(super) fn word_or<T: Copy>(
        &self,
        names: &[&str],
        words: &[(&str, T)],
        default: T,
    ) -> Result<T, ModelError> {
        match self.opt_str(names)? {
            None => Ok(default),
            Some(found) => words
                .iter()
                .find_map(|(word, meaning)| (*word == found).then_some(*meaning))
                .ok_or_else(|| self.unknown_word(names[0], found, words.iter().map(|w| w.0))),
        }
    }

    /// A word outside the set that is understood.
    pub(super) fn unknown_word<'w>(
        &self,
        key: &str,
        found: &str,
        known: impl Iterator<Item = &'w str>,
    ) -> ModelError {
        let known: Vec<String> = known.map(|word| format!("\"{word}\"")).collect();
        self.wrong(
            key,
            &Value::String(found.to_owned()),
            &format!("one of {}", known.join(", ")),
        )
    }

    /// The file the keys come from.
    pub(super) fn file(&self) -> &'a str {
        self.file
    }

    /// A key with the objects around it.
    pub(super) fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

/// A whole number, written as an integer or as a float without fraction.
fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        value
            .as_f64()
            .filter(|number| *number >= 0.0 && *number < 9e15 && number.fract() == 0.0)
            .map(|number| number as u64)
    })
}
