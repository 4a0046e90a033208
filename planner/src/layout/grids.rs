//! [`grids`]: whether degrees tile the ranks, twice.

use super::Degrees;
use super::illegal::{Illegal, MAX_GPUS};
use super::nearest::product;

/// Checks that both grids tile the ranks, which needs no model, and derives `(dp, edp)`.
pub(crate) fn grids(d: &Degrees, broken: &mut Vec<Illegal>) -> Option<(u32, u32)> {
    for (key, degree) in [
        ("gpus", d.gpus),
        ("tp", d.tp),
        ("cp", d.cp),
        ("pp", d.pp),
        ("vpp", d.vpp),
        ("ep", d.ep),
        ("etp", d.etp),
        ("mbs", d.mbs),
    ] {
        if degree == 0 {
            broken.push(Illegal::Zero { key });
        }
    }
    let &Degrees {
        gpus,
        tp,
        cp,
        pp,
        ep,
        etp,
        ..
    } = d;
    if gpus > MAX_GPUS {
        broken.push(Illegal::TooManyGpus { gpus });
    }
    let mut replicas = |part: u64, illegal: Illegal| {
        if gpus == 0 || part == 0 {
            None
        } else if u64::from(gpus).is_multiple_of(part) {
            Some((u64::from(gpus) / part) as u32)
        } else {
            broken.push(illegal);
            None
        }
    };
    let dp = replicas(
        product(&[tp, cp, pp]),
        Illegal::AttentionGrid { gpus, tp, cp, pp },
    );
    let edp = replicas(
        product(&[etp, ep, pp]),
        Illegal::ExpertGrid { gpus, etp, ep, pp },
    );
    dp.zip(edp)
}
