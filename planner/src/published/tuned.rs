//! [`tuned`]: layouts that experts arrived at by measuring, beside the search's own answer to the same question.

use std::collections::BTreeMap;

use moefold_profiles::pricing::Costs;
use moefold_profiles::trace::Category;
use serde::Serialize;

use super::price::{Priced, price};
use super::row::Row;
use crate::choice::RecomputePlan;
use crate::layout::PartialDegrees;
use crate::options::SearchOptions;
use crate::plan::{LayoutRecord, PlannedLayout};
use crate::search;
use crate::stack::megatron::Declared;

/// Shipped rows whose authors say that they tuned the layout, one for each question that they asked.
const TUNED: [&str; 14] = [
    "mpf-005",
    "mz-021",
    "mpf-010",
    "mpf-089",
    "mb-25.09-026",
    "mb-card-001",
    "mcp-002",
    "mcp-001",
    "mb-26.06-008",
    "mb-26.06-010",
    "mb-26.04.01-018",
    "mb-card-025",
    "mb-26.06-015",
    "mb-26.04.01-023",
];

/// A layout that was tuned, and the best that a search finds in its place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tuned {
    /// The row.
    pub id: String,
    /// The model.
    pub model: String,
    /// The GPU.
    pub gpu: String,
    /// Ranks.
    pub gpus: u32,
    /// Precision.
    pub precision: String,
    /// Seconds a step that were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_step_s: Option<f64>,
    /// As it was tuned, priced.
    pub tuned: Choice,
    /// Whether it is said to fit.
    pub fits: bool,
    /// What a search finds where degrees, stages and recomputation are free, all else as in the row.
    pub found: Choice,
    /// Seconds a step that the tuned one takes more of than the found one, by category; below 0 where less.
    pub more_s: BTreeMap<&'static str, f64>,
}

/// A layout and what is predicted for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// Its degrees.
    pub layout: LayoutRecord,
    /// What layers compute again.
    pub recompute: RecomputePlan,
    /// Seconds a step.
    pub step_s: f64,
    /// GiB at the peak of the fullest rank.
    pub peak_gib: f64,
}

impl From<&PlannedLayout> for Choice {
    fn from(plan: &PlannedLayout) -> Self {
        Self {
            layout: plan.layout,
            recompute: plan.recompute.clone(),
            step_s: plan.predicted.step_s,
            peak_gib: plan.predicted.peak_gib,
        }
    }
}

/// Of shipped rows those that were tuned.
pub fn tuned_rows(mut rows: Vec<Row>) -> Vec<Row> {
    rows.retain(|row| TUNED.contains(&row.id.as_str()));
    rows
}

/// A row beside what a search finds for its question.
///
/// # Errors
///
/// Why the row itself cannot be planned, or nothing is found in its place.
pub fn tuned(row: &Row) -> Result<Tuned, String> {
    let priced = price(row, &[]);
    let own = match &priced {
        Priced::Fits(own) | Priced::TooLarge(own) => own,
        Priced::Refused(why) => return Err(why.clone()),
    };
    let options = SearchOptions {
        pins: PartialDegrees::default(),
        stages: None,
        recompute: None,
        ..row.options.clone()
    };
    let costs = Costs::for_cluster(&row.cluster, &[]);
    let found = search::plan(
        &row.model,
        &row.cluster,
        row.gpus,
        &options,
        &costs,
        &Declared,
    )
    .map_err(|error| format!("nothing is found in its place: {error}"))?;
    let found = &found.plans[0];
    let more_s = Category::ALL.into_iter().map(|category| {
        let of = |plan: &PlannedLayout| plan.predicted.time_s.get(category).0;
        (category.name(), of(own) - of(found))
    });
    Ok(Tuned {
        id: row.id.clone(),
        model: row.subject.clone(),
        gpu: row.cluster.gpu.name.clone(),
        gpus: row.gpus,
        precision: row.options.precision.to_string(),
        measured_step_s: row.step_s,
        tuned: own.as_ref().into(),
        fits: matches!(priced, Priced::Fits(_)),
        found: found.into(),
        more_s: more_s.filter(|(_, more_s)| *more_s != 0.0).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::shipped_rows;

    #[test]
    fn every_tuned_row_is_in_the_tables() {
        assert_eq!(tuned_rows(shipped_rows()).len(), TUNED.len());
    }
}
