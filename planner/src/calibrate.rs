//! [`fit`]: the factors on prices that measured steps of known layouts ask for.
//!
//! Three factors, no more: on times of ops, of communication, of the host. Each is believed to be 1, as the
//! tables have it, give or take its prior; a measured step is believed to be what they say, give or take a
//! residual. The most probable logarithms of the factors given all steps are found by Gauss-Newton on
//! regularized least squares, from several starts, since a host that is hidden shows no slope. What the
//! steps leave open is the inverse of the matrix of that last iteration.

use moefold_profiles::calibration::{Calibration, Factors, Fitted, FittedStep};

/// Factors, in the order of [`Calibration::covariance`].
const FACTORS: usize = 3;

/// A vector of logarithms of factors.
type Logs = [f64; FACTORS];

/// What is known of each factor without steps, as the standard deviation of its logarithm. Ops: published
/// steps in which compute is nearly all take 1.0 to 1.5 times what the tables say (SimuMax on B200, arXiv
/// 2504.14960 on H100). Networks: NICs are used to between 0.6 and 1 of what the tables take, by fabric and
/// placement. Hosts: a launch takes 2 us out of C++ and 5 to 20 us out of eager Python.
const PRIORS: Logs = [0.25, 0.30, 0.70];

/// Standard deviation of the logarithm of a step around what three factors can say of its layout.
const RESIDUAL: f64 = 0.04;

/// Where searches begin: as the tables have it, and with hosts that are slower.
const STARTS: [Logs; 3] = [[0.0, 0.0, 0.0], [0.1, 0.0, 1.1], [0.1, 0.1, 2.3]];

/// Half of the distance over which slopes are taken.
const REACH: f64 = 0.02;

/// Iterations at most, and the step below which there are no more.
const ITERATIONS: usize = 30;
const SETTLED: f64 = 1e-5;

/// Halvings of an iteration's step that does not improve.
const HALVINGS: usize = 8;

/// A measured step.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Where plan and measurement are from.
    pub source: String,
    /// Seconds.
    pub step_s: f64,
}

/// What the most probable factors are, and how sure that is.
struct Fit {
    logs: Logs,
    covariance: [Logs; FACTORS],
}

/// Fits factors to measured steps. `predict` prices the step of an index under factors.
///
/// Where there are three steps or more, each is predicted from the others too, and the residual is at least
/// what that misses.
pub fn fit<E>(
    stack: &str,
    steps: &[Measured],
    predict: &dyn Fn(usize, Factors) -> Result<f64, E>,
) -> Result<Calibration, E> {
    assert!(!steps.is_empty(), "a fit has a step");
    let problem = Problem { steps, predict };
    let all: Vec<usize> = (0..steps.len()).collect();
    let fit = problem.solve(&all)?;
    let mut fitted = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let left_out_s = if steps.len() < 3 {
            None
        } else {
            let mut others = all.clone();
            others.remove(index);
            Some(problem.time(index, problem.solve(&others)?.logs)?)
        };
        fitted.push(FittedStep {
            source: step.source.clone(),
            measured_s: step.step_s,
            before_s: problem.time(index, [0.0; FACTORS])?,
            after_s: problem.time(index, fit.logs)?,
            left_out_s,
        });
    }
    let missed = fitted
        .iter()
        .filter_map(|step| Some((step.left_out_s? / step.measured_s).ln().powi(2)));
    let missed = (missed.sum::<f64>() / steps.len() as f64).sqrt();
    let of = |index: usize| Fitted {
        factor: fit.logs[index].exp(),
        sigma: fit.covariance[index][index].sqrt(),
        prior_sigma: PRIORS[index],
    };
    Ok(Calibration {
        stack: stack.to_owned(),
        compute: of(0),
        network: of(1),
        host: of(2),
        covariance: fit.covariance,
        residual_sigma: missed.max(RESIDUAL),
        steps: fitted,
    })
}

struct Problem<'a, E> {
    steps: &'a [Measured],
    predict: &'a dyn Fn(usize, Factors) -> Result<f64, E>,
}

impl<E> Problem<'_, E> {
    fn time(&self, index: usize, logs: Logs) -> Result<f64, E> {
        let [compute, network, host] = logs.map(f64::exp);
        let factors = Factors {
            compute,
            network,
            host,
        };
        (self.predict)(index, factors)
    }

    /// What a step misses, over the residual.
    fn miss(&self, index: usize, logs: Logs) -> Result<f64, E> {
        let predicted = self.time(index, logs)?;
        Ok((self.steps[index].step_s / predicted).ln() / RESIDUAL)
    }

    /// Twice the negative logarithm of the probability, up to a constant.
    fn loss(&self, steps: &[usize], logs: Logs) -> Result<f64, E> {
        let mut loss = 0.0;
        for &step in steps {
            loss += self.miss(step, logs)?.powi(2);
        }
        for (log, prior) in logs.iter().zip(PRIORS) {
            loss += (log / prior).powi(2);
        }
        Ok(loss)
    }

    /// The most probable factors over all starts.
    fn solve(&self, steps: &[usize]) -> Result<Fit, E> {
        let mut best: Option<(f64, Logs)> = None;
        for start in STARTS {
            let logs = self.descend(steps, start)?;
            let loss = self.loss(steps, logs)?;
            if best.is_none_or(|(least, _)| loss < least) {
                best = Some((loss, logs));
            }
        }
        let (_, logs) = best.expect("there are starts");
        let (matrix, _) = self.normal(steps, logs)?;
        Ok(Fit {
            logs,
            covariance: inverse(matrix),
        })
    }

    /// Gauss-Newton from a start, with steps that are halved until they improve.
    fn descend(&self, steps: &[usize], start: Logs) -> Result<Logs, E> {
        let mut logs = start;
        let mut loss = self.loss(steps, logs)?;
        for _ in 0..ITERATIONS {
            let (matrix, slope) = self.normal(steps, logs)?;
            let inverse = inverse(matrix);
            let step = inverse.map(|row| row.iter().zip(slope).map(|(a, b)| a * b).sum::<f64>());
            let mut length = 1.0;
            let mut next = None;
            for _ in 0..HALVINGS {
                let mut there = logs;
                for (log, step) in there.iter_mut().zip(step) {
                    *log += length * step;
                }
                let found = self.loss(steps, there)?;
                if found < loss {
                    next = Some((found, there));
                    break;
                }
                length /= 2.0;
            }
            let Some((found, there)) = next else { break };
            let settled = step.iter().all(|step| (length * step).abs() < SETTLED);
            (loss, logs) = (found, there);
            if settled {
                break;
            }
        }
        Ok(logs)
    }

    /// The normal equations at a point: curvature, and the slope towards what is more probable.
    fn normal(&self, steps: &[usize], logs: Logs) -> Result<([Logs; FACTORS], Logs), E> {
        let mut matrix = [[0.0; FACTORS]; FACTORS];
        let mut slope = [0.0; FACTORS];
        for (index, prior) in PRIORS.into_iter().enumerate() {
            matrix[index][index] = prior.powi(-2);
            slope[index] = -logs[index] * prior.powi(-2);
        }
        for &step in steps {
            let miss = self.miss(step, logs)?;
            let mut gradient = [0.0; FACTORS];
            for (index, gradient) in gradient.iter_mut().enumerate() {
                let (mut below, mut above) = (logs, logs);
                below[index] -= REACH;
                above[index] += REACH;
                let rise = self.miss(step, below)? - self.miss(step, above)?;
                *gradient = rise / (2.0 * REACH);
            }
            for (row, a) in gradient.into_iter().enumerate() {
                slope[row] += a * miss;
                for (cell, b) in matrix[row].iter_mut().zip(gradient) {
                    *cell += a * b;
                }
            }
        }
        Ok((matrix, slope))
    }
}

/// The inverse of a positive definite matrix, by Gauss and Jordan.
fn inverse(mut matrix: [Logs; FACTORS]) -> [Logs; FACTORS] {
    let mut inverse = [[0.0; FACTORS]; FACTORS];
    for (index, row) in inverse.iter_mut().enumerate() {
        row[index] = 1.0;
    }
    for pivot in 0..FACTORS {
        let scale = matrix[pivot][pivot];
        assert!(scale > 0.0, "a prior makes the matrix positive definite");
        for column in 0..FACTORS {
            matrix[pivot][column] /= scale;
            inverse[pivot][column] /= scale;
        }
        for row in (0..FACTORS).filter(|&row| row != pivot) {
            let times = matrix[row][pivot];
            for column in 0..FACTORS {
                matrix[row][column] -= times * matrix[pivot][column];
                inverse[row][column] -= times * inverse[pivot][column];
            }
        }
    }
    inverse
}

#[cfg(test)]
mod tests;
