//! Refusals of [`Keys`]: missing keys, wrong values, and keys that contradict each other.
//!
//! Each message names the key with the objects around it, what was found, what it clashes with, and
//! what would work.

use moefold_profiles::nearest::slip;
use serde_json::Value;

use super::keys::Keys;
use crate::model::ModelError;

impl Keys<'_> {
    /// Refuses a list that has not one entry a layer.
    pub(super) fn expect_len(
        &self,
        names: &[&str],
        found: usize,
        layers: u64,
    ) -> Result<(), ModelError> {
        if found as u64 == layers {
            return Ok(());
        }
        Err(self.clash(
            names[0],
            &format!("a list of {found}"),
            &format!("num_hidden_layers = {layers}"),
            &format!("write {layers} entries, one a layer"),
        ))
    }

    /// Refuses a value unless it divides another.
    pub(super) fn expect_divides(
        &self,
        (key, divisor): (&str, u64),
        (of_key, of): (&str, u64),
    ) -> Result<(), ModelError> {
        if divisor != 0 && of % divisor == 0 {
            return Ok(());
        }
        let fits: Vec<String> = divisors_near(of, divisor)
            .iter()
            .map(u64::to_string)
            .collect();
        Err(self.clash(
            key,
            &divisor.to_string(),
            &format!("{of_key} = {of}, which it must divide"),
            &format!("nearest that do: {}", fits.join(", ")),
        ))
    }

    /// Refuses a value above another.
    pub(super) fn expect_at_most(
        &self,
        (key, value): (&str, u64),
        (limit_key, limit): (&str, u64),
    ) -> Result<(), ModelError> {
        if value <= limit {
            return Ok(());
        }
        Err(self.clash(
            key,
            &value.to_string(),
            &format!("{limit_key} = {limit}"),
            &format!("at most {limit} works"),
        ))
    }

    /// A contradiction between two keys.
    pub(super) fn clash(&self, key: &str, found: &str, rule: &str, fix: &str) -> ModelError {
        ModelError::Inconsistent {
            file: self.file().to_owned(),
            key: self.full(key),
            found: found.to_owned(),
            rule: rule.to_owned(),
            fix: fix.to_owned(),
        }
    }

    /// A key that is not there.
    pub(super) fn missing(&self, names: &[&str], expected: &str) -> ModelError {
        let spellings: Vec<String> = names.iter().map(|name| self.full(name)).collect();
        let written = names.iter().find_map(|name| slip(name, self.names()));
        let written = written.map_or_else(String::new, |key| {
            format!("; there is `{}`", self.full(key))
        });
        ModelError::Missing {
            file: self.file().to_owned(),
            key: spellings.join("` or `"),
            expected: format!("{expected}{written}"),
        }
    }

    /// A key that is there in one of its spellings, if only with null.
    pub(super) fn expect_stated(&self, names: &[&str]) -> Result<(), ModelError> {
        if names.iter().any(|name| self.is_stated(name)) {
            return Ok(());
        }
        let expected = "its value, or null where the file is to leave it open: models of this type differ in it";
        Err(self.missing(names, expected))
    }

    /// A value that will not do.
    pub(super) fn wrong(&self, key: &str, found: &Value, expected: &str) -> ModelError {
        let mut found = found.to_string();
        if found.len() > 60 {
            let cut = (0..=57).rev().find(|i| found.is_char_boundary(*i));
            found.truncate(cut.unwrap_or(0));
            found.push_str("...");
        }
        ModelError::Value {
            file: self.file().to_owned(),
            key: self.full(key),
            found,
            expected: expected.to_owned(),
        }
    }
}

/// Up to three divisors of `of` closest to `near`, in order.
fn divisors_near(of: u64, near: u64) -> Vec<u64> {
    let mut divisors: Vec<u64> = (1..=of.min(65_536))
        .filter(|d| of.is_multiple_of(*d))
        .collect();
    divisors.sort_by_key(|d| d.abs_diff(near));
    divisors.truncate(3);
    divisors.sort_unstable();
    divisors
}
