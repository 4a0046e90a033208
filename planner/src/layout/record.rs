//! [`LayoutRecord`]: the degrees of a layout as files have them.

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

    /// `TP2 CP1 PP8 VPP4 EP64 ETP1 MBS1`, degrees of one left out but for TP.
    pub fn in_short(&self) -> String {
        let mut words = vec![format!("TP{}", self.tp)];
        for (name, degree) in [
            ("CP", self.cp),
            ("PP", self.pp),
            ("VPP", self.vpp),
            ("EP", self.ep),
            ("ETP", self.etp),
            ("MBS", self.mbs),
        ] {
            if degree > 1 {
                words.push(format!("{name}{degree}"));
            }
        }
        words.join(" ")
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
