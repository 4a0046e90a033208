//! [`Routing`]: a measured histogram of tokens an expert, and the load of the busiest rank it means.

use std::path::Path;

use serde::Deserialize;

use super::PlanError;
use crate::model::Model;

/// Tokens each expert got, a list a layer (or one list for all of them).
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Where it came from.
    path: String,
    layers: Vec<Vec<f64>>,
}

impl Routing {
    /// Reads `[n, n, ...]`, or a list of such lists, one a layer.
    pub fn read(path: &str) -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Histogram {
            One(Vec<f64>),
            Layers(Vec<Vec<f64>>),
        }
        let text = std::fs::read_to_string(Path::new(path))
            .map_err(|error| refuse(path, error.to_string()))?;
        let histogram: Histogram = serde_json::from_str(&text).map_err(|_| {
            let expected = "is not a JSON list of tokens an expert, or a list of such lists";
            refuse(path, expected.to_owned())
        })?;
        let layers = match histogram {
            Histogram::One(tokens) => vec![tokens],
            Histogram::Layers(layers) => layers,
        };
        Self::new(path, layers)
    }

    /// A histogram as numbers; `path` is named in errors.
    pub fn new(path: &str, layers: Vec<Vec<f64>>) -> Result<Self, PlanError> {
        if layers.is_empty() {
            return Err(refuse(path, "holds no layer; expected one or more".into()));
        }
        for (layer, tokens) in layers.iter().enumerate() {
            if let Some(found) = tokens.iter().find(|n| !n.is_finite() || **n < 0.0) {
                return Err(refuse(
                    path,
                    format!("list {layer} has {found}; expected tokens, 0 or more"),
                ));
            }
            let total: f64 = tokens.iter().sum();
            if !total.is_finite() || total <= 0.0 {
                return Err(refuse(
                    path,
                    format!("list {layer} sums to {total}; expected a finite number above 0"),
                ));
            }
        }
        Ok(Self {
            path: path.to_owned(),
            layers,
        })
    }

    /// Refuses a histogram of another number of experts than the model has.
    pub fn check(&self, model: &Model) -> Result<(), PlanError> {
        let Some(moe) = model.moe() else {
            let problem = format!("counts tokens of experts, and {} has none", model.name);
            return Err(refuse(&self.path, problem));
        };
        let wrong = |tokens: &&Vec<f64>| tokens.len() as u64 != moe.experts;
        match self.layers.iter().find(wrong) {
            None => Ok(()),
            Some(tokens) => Err(refuse(
                &self.path,
                format!(
                    "has {} numbers; expected {}, one for each expert of {}",
                    tokens.len(),
                    moe.experts,
                    model.name
                ),
            )),
        }
    }

    /// Rows of the busiest of `ep` expert ranks over their mean, in the worst layer; 1 at `ep` 1.
    ///
    /// Ranks hold consecutive experts, as Megatron-Core places them
    /// (`local_expert_indices_offset`, `megatron/core/transformer/moe/moe_layer.py`).
    pub fn load(&self, ep: u32) -> f64 {
        let busiest = |tokens: &Vec<f64>| {
            let each = tokens.len().div_ceil(ep.max(1) as usize).max(1);
            let total: f64 = tokens.iter().sum();
            let largest = tokens
                .chunks(each)
                .map(|held| held.iter().sum::<f64>())
                .fold(0.0, f64::max);
            largest * f64::from(ep.max(1)) / total
        };
        self.layers.iter().map(busiest).fold(1.0, f64::max)
    }
}

fn refuse(path: &str, problem: String) -> PlanError {
    PlanError::File {
        path: path.to_owned(),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    fn one_busy() -> Vec<f64> {
        let mut tokens = vec![0.0; 8];
        tokens[0] = 1000.0;
        tokens
    }

    #[test]
    fn oracle_one_busy_expert_loads_its_rank_alone() {
        let routing = Routing::new("h.json", vec![one_busy()]).expect("fits");
        for (ep, load) in [(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)] {
            assert_eq!(routing.load(ep), load, "ep {ep}");
        }
        let even = vec![5.0; 8];
        let layers = Routing::new("h.json", vec![even, one_busy()]).expect("fits");
        assert_eq!(layers.load(8), 8.0, "the worst layer counts");
    }

    #[test]
    fn what_is_no_histogram_of_the_model_is_refused() {
        for tokens in [vec![], vec![0.0; 8], vec![-1.0, 2.0], vec![f64::MAX; 8]] {
            assert!(
                Routing::new("h.json", vec![tokens.clone()]).is_err(),
                "{tokens:?}"
            );
        }
        assert!(Routing::new("h.json", Vec::new()).is_err());
        let mixtral = presets::load("mixtral-8x7b").expect("a preset");
        let routing = Routing::new("h.json", vec![vec![1.0; 7]]).expect("a histogram");
        let message = routing.check(&mixtral).expect_err("too short").to_string();
        for expected in ["h.json", "7 numbers", "expected 8"] {
            assert!(message.contains(expected), "{message}");
        }
    }
}
