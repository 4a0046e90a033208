//! [`Asked`]: what is asked of a search.

use moefold_profiles::Cluster;
use moefold_profiles::pricing::Costs;

use super::watch::{Watch, unwatched};
use crate::model::Model;
use crate::options::SearchOptions;
use crate::runtime::Runtime;

/// What is asked of a search.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// What is trained.
    pub model: &'a Model,
    /// Where.
    pub cluster: &'a Cluster,
    /// Ranks.
    pub gpus: u32,
    /// What the search may vary and what is fixed.
    pub options: &'a SearchOptions,
    /// Prices of the cluster.
    pub costs: &'a Costs,
    /// What is to run the plan.
    pub runtime: &'a dyn Runtime,
    /// Who is told how far a search is, and may stop it.
    pub watch: &'a Watch<'a>,
}

impl<'a> Asked<'a> {
    /// A question that nobody watches.
    pub fn new(
        model: &'a Model,
        cluster: &'a Cluster,
        gpus: u32,
        options: &'a SearchOptions,
        costs: &'a Costs,
        runtime: &'a dyn Runtime,
    ) -> Self {
        Self {
            model,
            cluster,
            gpus,
            options,
            costs,
            runtime,
            watch: &unwatched,
        }
    }
}
