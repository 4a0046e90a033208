//! Words: why a plan lost to the best.

use moefold_profiles::trace::Category;

use super::predict::Priced;
use crate::choice::Objective;
use crate::plan::Alternative;

/// A runner-up and the costs it has more of than the winner, on average over pipeline ranks: the
/// critical ranks of two layouts may be different stages.
pub(crate) fn alternative(winner: &Priced, priced: &Priced, objective: Objective) -> Alternative {
    let plan = &priced.plan;
    let (best, own) = (&winner.plan.predicted, &plan.predicted);
    let why = if objective == Objective::Memory {
        format!("{:.1} GiB more at its peak", own.peak_gib - best.peak_gib)
    } else {
        let mut more: Vec<(f64, Category)> = Category::ALL
            .iter()
            .map(|&category| {
                let difference = priced.mean_s.get(category).0 - winner.mean_s.get(category).0;
                (difference, category)
            })
            .filter(|(difference, _)| *difference > 0.0)
            .collect();
        more.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let slower = own.step_s - best.step_s;
        let named: Vec<String> = more
            .iter()
            .take(3)
            .filter(|(difference, _)| *difference > 0.05 * slower)
            .map(|(difference, category)| format!("{} +{}", category.name(), seconds(*difference)))
            .collect();
        let percent = 100.0 * slower / best.step_s;
        if named.is_empty() {
            format!("{percent:.1} % slower, a tie within the model's precision")
        } else {
            format!("{percent:.1} % slower: {}", named.join(", "))
        }
    };
    Alternative {
        layout: plan.layout,
        recompute: plan.recompute.clone(),
        schedule: plan.pipeline.schedule.chosen(),
        rank_order: plan.rank_order,
        cp_comm_type: plan
            .cp_comm_type
            .filter(|way| *way != winner.plan.cp_comm()),
        cuda_graph: plan.cuda_graph,
        step_s: own.step_s,
        peak_gib: own.peak_gib,
        why,
    }
}

fn seconds(time: f64) -> String {
    if time < 0.1 {
        format!("{:.1} ms", time * 1e3)
    } else {
        format!("{time:.2} s")
    }
}
