//! [`LayoutRecord`]: the degrees of a layout as files have them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Layout, PartialDegrees};

/// The degrees of a plan, derived ones included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    missing_docs,
    reason = "the field's standard abbreviations, spelled out in layout.rs"
)]
pub struct LayoutRecord {
    pub tp: u32,
    pub cp: u32,
    pub dp: u32,
    pub pp: u32,
    pub vpp: u32,
    pub ep: u32,
    pub etp: u32,
    pub edp: u32,
    pub mbs: u32,
    pub microbatches: u32,
}

impl LayoutRecord {
    /// All degrees that a layout is chosen by, pinned.
    pub fn pinned(&self) -> PartialDegrees {
        PartialDegrees {
            tp: Some(self.tp),
            cp: Some(self.cp),
            pp: Some(self.pp),
            vpp: Some(self.vpp),
            ep: Some(self.ep),
            etp: Some(self.etp),
            mbs: Some(self.mbs),
            ..PartialDegrees::default()
        }
    }
}

/// In short, degrees of one left out: `TP2 PP8x4 DP4 | EP8 EDP1 | mbs 1`. Attention's grid comes first, the experts' second;
/// the two are one where no expert axis is used.
impl fmt::Display for LayoutRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let degree = |name: &str, degree: u32| (degree > 1).then(|| format!("{name}{degree}"));
        let in_words = |degrees: &[Option<String>]| {
            let words: Vec<&str> = degrees.iter().flatten().map(String::as_str).collect();
            words.join(" ")
        };
        let stages = match self.vpp {
            1 => degree("PP", self.pp),
            chunks => Some(format!("PP{}x{chunks}", self.pp)),
        };
        let attention = in_words(&[
            degree("TP", self.tp),
            degree("CP", self.cp),
            stages,
            degree("DP", self.dp),
        ]);
        let experts = in_words(&[
            degree("ETP", self.etp),
            degree("EP", self.ep),
            degree("EDP", self.edp),
        ]);
        if attention.is_empty() {
            f.write_str("1 rank")?;
        } else {
            f.write_str(&attention)?;
        }
        if !experts.is_empty() {
            write!(f, " | {experts}")?;
        }
        write!(f, " | mbs {}", self.mbs)
    }
}

impl From<&Layout> for LayoutRecord {
    fn from(layout: &Layout) -> Self {
        Self {
            tp: layout.tp(),
            cp: layout.cp(),
            dp: layout.dp(),
            pp: layout.pp(),
            vpp: layout.vpp(),
            ep: layout.ep(),
            etp: layout.etp(),
            edp: layout.edp(),
            mbs: layout.mbs(),
            microbatches: layout.microbatches(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_layouts() {
        let folded = LayoutRecord {
            tp: 2,
            cp: 1,
            dp: 4,
            pp: 8,
            vpp: 4,
            ep: 8,
            etp: 1,
            edp: 1,
            mbs: 1,
            microbatches: 64,
        };
        assert_eq!(folded.to_string(), "TP2 PP8x4 DP4 | EP8 | mbs 1");
        let single = LayoutRecord {
            tp: 1,
            dp: 1,
            pp: 1,
            vpp: 1,
            ep: 1,
            mbs: 2,
            ..folded
        };
        assert_eq!(single.to_string(), "1 rank | mbs 2");
    }
}
