//! Which layers each stage holds.
//!
//! Stage costs are what counts, so splits balance seconds: the embedding comes with the first stage,
//! head and multi-token prediction with the last. For plain pipelines the split with the least
//! largest stage is found exactly; for interleaved ones the same over virtual stages, and beside it
//! the split into equal numbers of layers where there is one.

/// Layers `[start, end)` of each stage, as boundaries: stage `s` holds `cuts[s]..cuts[s + 1]`.
pub(crate) type Cuts = Vec<u32>;

/// Candidate splits of layers with the given costs over `stages`; `first` and `last` are the costs
/// of the ends.
pub(crate) fn candidates(costs: &[f64], first: f64, last: f64, stages: usize) -> Vec<Cuts> {
    let mut found = Vec::with_capacity(2);
    let layers = costs.len();
    if layers % stages == 0 {
        let each = (layers / stages) as u32;
        found.push((0..=stages as u32).map(|s| s * each).collect());
    }
    let balanced = balanced(costs, first, last, stages);
    if !found.contains(&balanced) {
        found.push(balanced);
    }
    found
}

/// The split with the least largest stage, filled greedily at the smallest bottleneck that works.
fn balanced(costs: &[f64], first: f64, last: f64, stages: usize) -> Cuts {
    if stages == 1 {
        return vec![0, costs.len() as u32];
    }
    let total: f64 = costs.iter().sum::<f64>() + first + last;
    let (mut low, mut high) = (total / stages as f64, total);
    // 40 halvings: far below the resolution of any cost.
    for _ in 0..40 {
        let middle = 0.5 * (low + high);
        if fill(costs, first, last, stages, middle).is_some() {
            high = middle;
        } else {
            low = middle;
        }
    }
    fill(costs, first, last, stages, high)
        .unwrap_or_else(|| unreachable!("everything fits a stage as large as the whole"))
}

/// Fills stages front to back up to `limit`; the last must hold what is left and `last`.
fn fill(costs: &[f64], first: f64, last: f64, stages: usize, limit: f64) -> Option<Cuts> {
    let mut cuts = Vec::with_capacity(stages + 1);
    cuts.push(0);
    let mut next = 0;
    for stage in 0..stages {
        let mut room = limit;
        if stage == 0 {
            room -= first;
        }
        if stage + 1 == stages {
            room -= last;
        }
        if room < 0.0 {
            return None;
        }
        while next < costs.len() && costs[next] <= room {
            room -= costs[next];
            next += 1;
        }
        cuts.push(next as u32);
    }
    (next == costs.len()).then_some(cuts)
}
