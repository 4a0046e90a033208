//! Whether what is predicted in a file can be a prediction: sizes and times that exist, parts that
//! sum to their whole. Not whether it is right.

use serde_json::Value;

use super::{PlannedLayout, Predicted};

/// How far a sum of written decimals may be from its total, relative.
const ROUNDING: f64 = 1e-6;

/// How far below zero the rounding of a difference may leave a number.
const DUST: f64 = 1e-12;

/// A number that no prediction has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadPrediction {
    /// Its key, from the plan's top level.
    pub(crate) key: String,
    /// What was found.
    pub(crate) found: String,
    /// What it has to be.
    pub(crate) expected: String,
}

impl PlannedLayout {
    /// Refuses predictions that are negative or no numbers, or do not add up.
    pub(crate) fn check_predicted(&self) -> Result<(), BadPrediction> {
        let Predicted {
            step_s,
            time_s,
            memory_gib_by_pp_rank,
            ..
        } = &self.predicted;
        // Serialized, every number of the record is walked, also those added later.
        let value = serde_json::to_value(&self.predicted).map_err(|error| BadPrediction {
            key: "predicted".to_owned(),
            found: error.to_string(),
            expected: "numbers".to_owned(),
        })?;
        numbers("predicted", &value)?;
        let sum = time_s.total().0;
        if (sum - step_s).abs() > ROUNDING * sum.max(*step_s) {
            return Err(BadPrediction {
                key: "predicted.time_s".to_owned(),
                found: format!("a sum of {sum} s"),
                expected: format!("the {step_s} s of predicted.step_s"),
            });
        }
        let (found, ranks) = (memory_gib_by_pp_rank.len(), self.layout.pp);
        if found != ranks as usize {
            return Err(BadPrediction {
                key: "predicted.memory_gib_by_pp_rank".to_owned(),
                found: format!("{found} entries"),
                expected: format!("{ranks}, one for each pipeline rank"),
            });
        }
        Ok(())
    }
}

/// Refuses any number in a value that is negative or not finite; the latter serialize as null.
fn numbers(key: &str, value: &Value) -> Result<(), BadPrediction> {
    let fits = match value {
        Value::Object(parts) => {
            return parts
                .iter()
                .try_for_each(|(name, part)| numbers(&format!("{key}.{name}"), part));
        }
        Value::Array(parts) => {
            return parts
                .iter()
                .enumerate()
                .try_for_each(|(index, part)| numbers(&format!("{key}[{index}]"), part));
        }
        Value::Number(number) => number.as_f64().is_some_and(|n| n.is_finite() && n >= -DUST),
        Value::Null => false,
        Value::Bool(_) | Value::String(_) => true,
    };
    if fits {
        return Ok(());
    }
    Err(BadPrediction {
        key: key.to_owned(),
        found: match value {
            Value::Null => "not a finite number".to_owned(),
            other => other.to_string(),
        },
        expected: "a finite number of at least 0".to_owned(),
    })
}
