//! How figures are written: few digits, one unit a column, units always spelled.
//!
//! Not for machine-readable files, which keep every digit.

use moefold_planner::answer::Candidate;
use moefold_planner::choice::{CpComm, RecomputePlan};
use moefold_planner::layout::Order;
use moefold_planner::plan::{LayoutRecord, PlannedLayout, Predicted};

/// Digits before the point, or behind it, that a number is written with at most.
pub(crate) const MOST_DIGITS: i32 = 9;

/// A number with about three significant digits: `1234`, `123`, `12.3`, `1.23`, `0.0123`; with an exponent where it would have
/// ten digits or more.
pub fn three_digits(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let magnitude = value.abs().log10().floor() as i32;
    if magnitude.abs() > MOST_DIGITS {
        return format!("{value:.2e}");
    }
    let decimals = (2 - magnitude).clamp(0, 9) as usize;
    format!("{value:.decimals$}")
}

/// A number in a column whose largest is `largest`: as many decimals as give that one four digits.
pub fn in_column(value: f64, largest: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    let magnitude = if largest > 0.0 {
        largest.log10().floor() as i32
    } else {
        0
    };
    if magnitude.abs() > MOST_DIGITS {
        return format!("{value:.3e}");
    }
    let decimals = (3 - magnitude).clamp(0, 9) as usize;
    format!("{value:.decimals$}")
}

/// A count with thin groups of three: `1 234 567`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// A count in short: `950`, `12.3k`, `4.5M`, `671B`.
pub fn short_count(value: f64) -> String {
    let magnitude = value.abs();
    if !value.is_finite() {
        "-".to_owned()
    } else if magnitude >= 999.5e9 {
        format!("{}T", three_digits(value / 1e12))
    } else if magnitude >= 999.5e6 {
        format!("{}B", three_digits(value / 1e9))
    } else if magnitude >= 999.5e3 {
        format!("{}M", three_digits(value / 1e6))
    } else if magnitude >= 9999.5 {
        format!("{}k", three_digits(value / 1e3))
    } else {
        three_digits(value)
    }
}

/// A duration in the unit that suits it: `412 us`, `3.21 ms`, `1.05 s`, `2.1 min`.
pub fn seconds(value: f64) -> String {
    let unit = TimeUnit::for_longest(value);
    format!(
        "{} {}",
        three_digits(value * unit.per_second()),
        unit.name()
    )
}

/// A difference of durations: `+3.21 ms`, `-412 us`.
pub fn signed_seconds(value: f64) -> String {
    let sign = if value < 0.0 { '-' } else { '+' };
    format!("{sign}{}", seconds(value.abs()))
}

/// The interval of a predicted step, in the unit that suits it; nothing where a plan has none.
pub fn interval(predicted: &Predicted) -> Option<String> {
    let (low, high) = predicted.step_s_low.zip(predicted.step_s_high)?;
    let unit = TimeUnit::for_longest(high);
    let figure = |seconds: f64| three_digits(seconds * unit.per_second());
    Some(format!(
        "{} to {} {}",
        figure(low),
        figure(high),
        unit.name()
    ))
}

/// A size given in GiB in the unit that suits it.
pub fn gib(value: f64) -> String {
    let unit = MemoryUnit::for_largest(value);
    format!("{} {}", three_digits(value * unit.per_gib()), unit.name())
}

/// How often something is called a step: whole where it is, else with a decimal.
pub fn calls(count: f64) -> String {
    let whole = (count - count.round()).abs() < 0.05;
    let decimals = usize::from(!whole);
    format!("{count:.decimals$}")
}

/// A share of one in percent: `12.3%`, below a tenth of a percent `<0.1%`.
pub fn percent(share: f64) -> String {
    if share > 0.0 && share < 0.001 {
        "<0.1%".to_owned()
    } else {
        // Adding zero makes minus zero plain.
        let percent = (share * 1000.0).round() / 10.0 + 0.0;
        format!("{percent:.1}%")
    }
}

/// How far off something is, which is so much more than another, in the words for more and less: `5.6% too fast`, `exact`.
pub fn off(error: f64, more: &str, less: &str) -> String {
    if error.abs() < 0.0005 {
        return "exact".to_owned();
    }
    let word = if error > 0.0 { more } else { less };
    format!("{} {word}", percent(error.abs()))
}

/// The same of a predicted step, over the measured one less one.
pub fn step_off(error: f64) -> String {
    off(error, "too slow", "too fast")
}

/// A signed relative difference in percent: `+12%`, `-3.4%`.
pub fn signed_percent(difference: f64) -> String {
    let percent = difference * 100.0;
    if !percent.is_finite() {
        "-".to_owned()
    } else if percent.abs() >= 9.95 {
        format!("{percent:+.0}%")
    } else {
        // Adding zero makes minus zero plain.
        let percent = (percent * 10.0).round() / 10.0 + 0.0;
        format!("{percent:+.1}%")
    }
}

/// The unit that a set of durations is shown in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeUnit {
    /// Microseconds.
    Microseconds,
    /// Milliseconds.
    Milliseconds,
    /// Seconds.
    Seconds,
}

impl TimeUnit {
    /// The unit in which the longest of the durations reads well.
    pub fn for_longest(seconds: f64) -> Self {
        match seconds.abs() {
            s if s >= 1.0 || s == 0.0 => Self::Seconds,
            s if s >= 1e-3 => Self::Milliseconds,
            _ => Self::Microseconds,
        }
    }

    /// Its symbol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Microseconds => "us",
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
        }
    }

    /// How many make a second.
    pub fn per_second(self) -> f64 {
        match self {
            Self::Microseconds => 1e6,
            Self::Milliseconds => 1e3,
            Self::Seconds => 1.0,
        }
    }
}

/// The unit that a set of sizes is shown in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryUnit {
    /// 2^20 bytes.
    Mib,
    /// 2^30 bytes.
    Gib,
}

impl MemoryUnit {
    /// The unit in which the largest of the sizes, given in GiB, reads well.
    pub fn for_largest(gib: f64) -> Self {
        if gib >= 1.0 || gib == 0.0 {
            Self::Gib
        } else {
            Self::Mib
        }
    }

    /// Its symbol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mib => "MiB",
            Self::Gib => "GiB",
        }
    }

    /// How many make a GiB.
    pub fn per_gib(self) -> f64 {
        match self {
            Self::Mib => 1024.0,
            Self::Gib => 1.0,
        }
    }
}

/// A layout in short, with what else places its ranks where that is not the usual: how attention reaches the keys of
/// others, and how ranks are numbered.
pub fn planned(plan: &PlannedLayout) -> String {
    placed(&plan.layout, plan.cp_comm_type, plan.rank_order)
}

/// [`planned`] of a candidate.
pub fn candidate(candidate: &Candidate) -> String {
    placed(
        &candidate.layout,
        candidate.cp_comm_type,
        candidate.rank_order,
    )
}

fn placed(layout: &LayoutRecord, way: Option<CpComm>, order: Option<Order>) -> String {
    let mut parts = vec![layout.to_string()];
    let way = way.filter(|way| *way != CpComm::default());
    parts.extend(way.map(|way| format!("cp {}", way.name())));
    parts.extend(order.map(|order| order.to_string()));
    parts.join(" | ")
}

/// What is recomputed in short: `none`, `full`, `moe_act+layernorm`, `full in 12, moe_act in 3 layers`, `full in the first
/// 2 layers of each stage`.
pub fn recompute(plan: &RecomputePlan) -> String {
    if let Some(set) = plan.alike() {
        return set.to_string();
    }
    if let Some(layers) = plan.block() {
        let layers = match layers.get() {
            1 => "layer".to_owned(),
            several => format!("{several} layers"),
        };
        return format!("full in the first {layers} of each stage");
    }
    let groups = plan.groups().into_iter();
    let words = groups.map(|(set, layers)| format!("{set} in {}", layers.len()));
    format!("{} layers", words.collect::<Vec<_>>().join(", "))
}

/// Text cut to a number of characters, the middle replaced by an ellipsis.
pub fn shortened(text: &str, max_chars: usize) -> String {
    let chars: Vec<char> = text.chars().collect();
    if chars.len() <= max_chars {
        return text.to_owned();
    }
    let keep = max_chars.saturating_sub(1);
    let head = keep.div_ceil(2);
    let tail = keep - head;
    let mut out: String = chars[..head].iter().collect();
    out.push('…');
    out.extend(&chars[chars.len() - tail..]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_figures() {
        assert_eq!(three_digits(1234.4), "1234");
        assert_eq!(three_digits(12.345), "12.3");
        assert_eq!(three_digits(0.012_345), "0.0123");
        assert_eq!(three_digits(f64::NAN), "-");
        assert_eq!(in_column(0.0964, 18.76), "0.10");
        assert_eq!(in_column(3.0, 120.0), "3.0");
        assert_eq!(grouped(1_234_567), "1 234 567");
        assert_eq!(grouped(12), "12");
        assert_eq!(short_count(671e9), "671B");
        assert_eq!(short_count(12_345.0), "12.3k");
        assert_eq!(seconds(0.003_214), "3.21 ms");
        assert_eq!(seconds(4.2e-4), "420 us");
        assert_eq!(signed_seconds(0.003_214), "+3.21 ms");
        assert_eq!(signed_seconds(-4.2e-4), "-420 us");
        assert_eq!(calls(32.0), "32");
        assert_eq!(calls(1.5), "1.5");
        assert_eq!(gib(0.5), "512 MiB");
        assert_eq!(percent(0.1234), "12.3%");
        assert_eq!(percent(0.0004), "<0.1%");
        assert_eq!(percent(-1e-17), "0.0%");
        assert_eq!(signed_percent(-0.034), "-3.4%");
        assert_eq!(signed_percent(0.5), "+50%");
    }

    #[test]
    fn long_names_lose_their_middle() {
        assert_eq!(shortened("abcdefghij", 10), "abcdefghij");
        assert_eq!(shortened("abcdefghijk", 5), "ab…jk");
        assert_eq!(shortened("ab", 0), "…");
    }
}
