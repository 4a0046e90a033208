//! [`PartialDegrees`]: the degrees a person pins, the rest left open.
//!
//! Written `tp=2,cp=1,pp=8,vpp=4,ep=8,etp=1,mbs=1`, any subset in any order; or as answers print layouts,
//! `TP2 PP8x4 DP8 | EP8 | mbs 1`, where degrees of 1 are left out. Here only the spelling is judged; whether the
//! degrees are legal is [`crate::rules::Rules`]' business.

use std::fmt;
use std::str::FromStr;

use moefold_profiles::nearest::nearest;
use serde::{Deserialize, Serialize};

use super::{Degrees, Illegal, Layout};

/// Some of the degrees of a layout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PartialDegrees {
    /// Tensor-parallel degree.
    pub tp: Option<u32>,
    /// Context-parallel degree.
    pub cp: Option<u32>,
    /// Pipeline-parallel degree.
    pub pp: Option<u32>,
    /// Virtual stages a pipeline rank.
    pub vpp: Option<u32>,
    /// Expert-parallel degree.
    pub ep: Option<u32>,
    /// Expert-tensor-parallel degree.
    pub etp: Option<u32>,
    /// Sequences a microbatch.
    pub mbs: Option<u32>,
    /// Data-parallel degree; follows from the others, so naming it only narrows a search.
    pub dp: Option<u32>,
    /// Replicas of an expert shard; follows from the others likewise.
    pub edp: Option<u32>,
}

/// Why a string is not a set of degrees.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseDegreesError {
    /// No such degree.
    #[error("unknown degree `{key}` in `{part}`; nearest: `{nearest}` (degrees are {KEYS})")]
    UnknownKey {
        /// What was found.
        key: String,
        /// The part of the text it stands in.
        part: String,
        /// The known key that is spelled most alike.
        nearest: &'static str,
    },
    /// A part without a value.
    #[error("`{part}` is not KEY=NUMBER; write for example tp=2,ep=8")]
    NoValue {
        /// The part.
        part: String,
    },
    /// A value that is no whole number in range.
    #[error(
        "`{value}` is not a value of {key}: a whole number from 1 to {}",
        u32::MAX
    )]
    NotANumber {
        /// The degree.
        key: &'static str,
        /// What was found.
        value: String,
    },
    /// The same degree twice.
    #[error("{key} is given twice, as {first} and as {second}; keep one")]
    Twice {
        /// The degree.
        key: &'static str,
        /// Its first value.
        first: u32,
        /// Its second.
        second: u32,
    },
}

const KEYS: &str = "tp, cp, pp, vpp, ep, etp, mbs, dp, edp";

impl PartialDegrees {
    /// Whether every degree that divides ranks is named: all but virtual stages, microbatches and what follows.
    pub(crate) fn names_ranks(&self) -> bool {
        [self.tp, self.cp, self.pp, self.ep, self.etp]
            .iter()
            .all(Option::is_some)
    }

    /// Pins every searched degree to those given.
    pub fn exactly(degrees: &Degrees) -> Self {
        Self {
            tp: Some(degrees.tp),
            cp: Some(degrees.cp),
            pp: Some(degrees.pp),
            vpp: Some(degrees.vpp),
            ep: Some(degrees.ep),
            etp: Some(degrees.etp),
            mbs: Some(degrees.mbs),
            dp: None,
            edp: None,
        }
    }

    /// The same degrees as these, with the values a layout has.
    pub(crate) fn values_of(&self, layout: &Layout) -> Self {
        let mut values = Self {
            dp: Some(layout.dp()),
            edp: Some(layout.edp()),
            ..Self::exactly(&layout.degrees())
        };
        let mut given = *self;
        for ((_, value), (_, pin)) in values.slots().into_iter().zip(given.slots()) {
            *value = pin.and(*value);
        }
        values
    }

    /// How far other values of the same degrees are, in doublings and halvings over all of them.
    pub(crate) fn distance(&self, other: &Self) -> f64 {
        let (mut one, mut other) = (*self, *other);
        one.slots()
            .into_iter()
            .zip(other.slots())
            .filter_map(|((_, a), (_, b))| a.zip(*b))
            .map(|(a, b)| (f64::from(a.max(1)).log2() - f64::from(b.max(1)).log2()).abs())
            .sum()
    }

    /// The degrees, where all that a layout needs are given.
    pub fn complete(&self, gpus: u32) -> Option<Degrees> {
        Some(Degrees {
            gpus,
            tp: self.tp?,
            cp: self.cp?,
            pp: self.pp?,
            vpp: self.vpp?,
            ep: self.ep?,
            etp: self.etp?,
            mbs: self.mbs?,
        })
    }

    /// The degrees with 1 for each that is not given.
    ///
    /// That includes etp. Megatron-Core instead lets `--expert-tensor-parallel-size` default to
    /// the tensor-parallel size, which splits every expert as soon as TP is used; whoever wants
    /// that writes `etp` here, and an export always writes it there.
    pub fn or_one(&self, gpus: u32) -> Degrees {
        Degrees {
            gpus,
            tp: self.tp.unwrap_or(1),
            cp: self.cp.unwrap_or(1),
            pp: self.pp.unwrap_or(1),
            vpp: self.vpp.unwrap_or(1),
            ep: self.ep.unwrap_or(1),
            etp: self.etp.unwrap_or(1),
            mbs: self.mbs.unwrap_or(1),
        }
    }

    /// Whether the data-parallel degree follows from what is given.
    pub(crate) fn fixes_dp(&self) -> bool {
        self.dp.or(self.tp.and(self.cp).and(self.pp)).is_some()
    }

    /// Given replicas that the other given degrees contradict, which leave at most `dp` and `edp`.
    pub(crate) fn misjudged_replicas(&self, dp: u32, edp: u32) -> Vec<Illegal> {
        let attention = self.tp.and(self.cp).and(self.pp).is_some();
        let experts = self.etp.and(self.ep).and(self.pp).is_some();
        let mut broken = Vec::new();
        for (key, given, found, fixed) in [
            ("dp", self.dp, dp, attention),
            ("edp", self.edp, edp, experts),
        ] {
            // With a degree left open the replicas can still become fewer, by a whole factor.
            let fits = |given: u32| given == found || (!fixed && given != 0 && found % given == 0);
            if let Some(given) = given.filter(|&given| !fits(given)) {
                broken.push(Illegal::Replicas { key, given, found });
            }
        }
        broken
    }

    /// Reads a layout as answers print it. Replicas follow from the other degrees, and a microbatch that is not
    /// said is open.
    fn printed(text: &str) -> Result<Self, ParseDegreesError> {
        let mut degrees = Self::default();
        let separates = |c: char| c.is_whitespace() || matches!(c, '|' | ',');
        let mut words = text.split(separates).filter(|word| !word.is_empty());
        while let Some(word) = words.next() {
            let digit = word.find(|c: char| c.is_ascii_digit());
            let (key, value) = word.split_at(digit.unwrap_or(word.len()));
            match (key, value) {
                // A job of one rank.
                ("", "1") if text.contains("rank") => {}
                ("rank", "") => {}
                (key, "") => degrees.set(key, words.next().unwrap_or_default(), word)?,
                (key, value) => match value.split_once(['x', 'X']) {
                    Some((pp, vpp)) if key.eq_ignore_ascii_case("pp") => {
                        degrees.set(key, pp, word)?;
                        degrees.set("vpp", vpp, word)?;
                    }
                    _ => degrees.set(key, value, word)?,
                },
            }
        }
        let left_out = degrees.slots().into_iter();
        let left_out = left_out.filter(|(name, _)| !matches!(*name, "mbs" | "dp" | "edp"));
        for (_, slot) in left_out {
            slot.get_or_insert(1);
        }
        Ok(degrees)
    }

    /// Sets a degree, which stands in `part`.
    fn set(&mut self, key: &str, value: &str, part: &str) -> Result<(), ParseDegreesError> {
        let mut slots = self.slots();
        let Some((name, slot)) = slots
            .iter_mut()
            .find(|(name, _)| name.eq_ignore_ascii_case(key))
        else {
            return Err(ParseDegreesError::UnknownKey {
                key: key.into(),
                part: part.into(),
                nearest: nearest_key(key, slots.map(|(name, _)| name)),
            });
        };
        let number = value.parse().map_err(|_| ParseDegreesError::NotANumber {
            key: name,
            value: value.into(),
        })?;
        match slot.replace(number) {
            Some(first) => Err(ParseDegreesError::Twice {
                key: name,
                first,
                second: number,
            }),
            None => Ok(()),
        }
    }

    fn slots(&mut self) -> [(&'static str, &mut Option<u32>); 9] {
        [
            ("tp", &mut self.tp),
            ("cp", &mut self.cp),
            ("pp", &mut self.pp),
            ("vpp", &mut self.vpp),
            ("ep", &mut self.ep),
            ("etp", &mut self.etp),
            ("mbs", &mut self.mbs),
            ("dp", &mut self.dp),
            ("edp", &mut self.edp),
        ]
    }
}

impl FromStr for PartialDegrees {
    type Err = ParseDegreesError;

    fn from_str(text: &str) -> Result<Self, ParseDegreesError> {
        if !text.contains('=') && text.contains(|c: char| c.is_ascii_digit()) {
            return Self::printed(text);
        }
        let mut degrees = Self::default();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (key, value) = part
                .split_once('=')
                .map(|(key, value)| (key.trim(), value.trim()))
                .filter(|(_, value)| !value.is_empty())
                .ok_or_else(|| ParseDegreesError::NoValue { part: part.into() })?;
            degrees.set(key, value, part)?;
        }
        Ok(degrees)
    }
}

impl fmt::Display for PartialDegrees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut copy = *self;
        let given: Vec<String> = copy
            .slots()
            .iter()
            .filter_map(|(name, slot)| slot.map(|value| format!("{name}={value}")))
            .collect();
        f.write_str(&given.join(","))
    }
}

/// The known key that was most likely meant: by its long name, or by its spelling.
fn nearest_key(key: &str, known: [&'static str; 9]) -> &'static str {
    let key = key.to_ascii_lowercase();
    let long_names = [
        ("tensor", "tp"),
        ("context", "cp"),
        ("virtual", "vpp"),
        ("pipeline", "pp"),
        ("expert-tensor", "etp"),
        ("expert-data", "edp"),
        ("expert", "ep"),
        ("micro", "mbs"),
        ("data", "dp"),
    ];
    let long = long_names.iter().find(|(long, _)| key.starts_with(long));
    let spelled = || nearest(&key, known).expect("there are known keys");
    long.map_or_else(spelled, |&(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_any_subset_in_any_order() {
        let degrees: PartialDegrees = "ep=8, tp=2,mbs=1,".parse().expect("parses");
        assert_eq!(
            (degrees.tp, degrees.ep, degrees.mbs, degrees.pp),
            (Some(2), Some(8), Some(1), None)
        );
        assert_eq!(degrees.to_string(), "tp=2,ep=8,mbs=1");
        assert_eq!(degrees.or_one(16).etp, 1);
        assert_eq!(degrees.complete(16), None);
        let degrees = "tp=2,cp=1,pp=8,vpp=4,ep=8,etp=1,mbs=1".parse::<PartialDegrees>();
        let complete = degrees.expect("parses").complete(64).expect("is complete");
        assert_eq!(
            PartialDegrees::exactly(&complete).complete(64),
            Some(complete)
        );
    }

    #[test]
    fn layouts_are_read_as_they_are_printed() {
        for (printed, expected) in [
            (
                "TP2 PP8x7 DP8 | EP8 EDP2 | mbs 1",
                "tp=2,cp=1,pp=8,vpp=7,ep=8,etp=1,mbs=1,dp=8,edp=2",
            ),
            (
                "TP2 PP8x7 DP8 | EP8",
                "tp=2,cp=1,pp=8,vpp=7,ep=8,etp=1,dp=8",
            ),
            ("1 rank | mbs 4", "tp=1,cp=1,pp=1,vpp=1,ep=1,etp=1,mbs=4"),
            ("CP2 | ETP2 EP4", "tp=1,cp=2,pp=1,vpp=1,ep=4,etp=2"),
            (
                "TP1 PP8 VPP4 EP64 MBS1",
                "tp=1,cp=1,pp=8,vpp=4,ep=64,etp=1,mbs=1",
            ),
        ] {
            let read: PartialDegrees = printed.parse().expect("parses");
            let expected: PartialDegrees = expected.parse().expect("parses");
            assert_eq!(read, expected, "{printed}");
        }
        let message = |text: &str| text.parse::<PartialDegrees>().unwrap_err().to_string();
        assert!(message("TPP2 EP8").contains("unknown degree `TPP` in `TPP2`; nearest: `tp`"));
        assert!(message("TP2 TP4").contains("tp is given twice, as 2 and as 4"));
        assert!(message("PP8xx").contains("`x` is not a value of vpp"));
        assert!(message("TP2 mbs").contains("`` is not a value of mbs"));
        assert!(message("2 EP8").contains("unknown degree ``"));
    }

    #[test]
    fn errors_name_the_key_and_the_nearest() {
        let message = |text: &str| text.parse::<PartialDegrees>().unwrap_err().to_string();
        assert!(message("tpp=2").contains("unknown degree `tpp` in `tpp=2`; nearest: `tp`"));
        assert!(message("pipeline=2").contains("nearest: `pp`"));
        assert!(message("expert-tensor=2").contains("nearest: `etp`"));
        assert!(message("tp=two").contains("`two` is not a value of tp"));
        assert!(message("tp=-1").contains("`-1` is not a value of tp"));
        assert!(message("tp").contains("`tp` is not KEY=NUMBER"));
        assert!(message("tp=").contains("`tp=` is not KEY=NUMBER"));
        assert!(message("tp=2,tp=4").contains("tp is given twice, as 2 and as 4"));
    }
}
