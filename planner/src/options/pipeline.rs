//! [`PipelineLayout`]: Megatron's words for which stage holds what, read.
//!
//! `E` embedding, `t` a decoder layer, `m` an MTP depth, `L` the head, `|` between stages; `x*n` and
//! `(..)*n` repeat (Megatron-Core, `pipeline_parallel_layer_layout.py`). Only the words are judged
//! here; whether the stages go with a model and with degrees is [`crate::rules::Rules`]' business.

use std::str::FromStr;

use crate::model::Model;

/// The most symbols a layout is written out to: more than the layers and stages of any model.
const MAX_SYMBOLS: usize = 4096;

/// The deepest parentheses.
const MAX_DEPTH: usize = 32;

/// Which stage holds which decoder layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineLayout {
    /// Decoder layers of each stage, in order.
    stages: Vec<Vec<u32>>,
    /// MTP depths named; they stand with the head.
    depths: usize,
}

impl PipelineLayout {
    /// Stages of a model given layer by layer, the last of which has its MTP depths.
    pub fn of(model: &Model, stages: Vec<Vec<u32>>) -> Self {
        Self::from(stages).with_depths(model.mtp.len())
    }

    /// Decoder layers of each stage, in order.
    pub fn stages(&self) -> &[Vec<u32>] {
        &self.stages
    }

    /// The same stages, the last of which has so many MTP depths.
    #[must_use]
    pub fn with_depths(self, depths: usize) -> Self {
        Self { depths, ..self }
    }

    /// MTP depths it names.
    pub fn depths(&self) -> usize {
        self.depths
    }
}

impl From<Vec<Vec<u32>>> for PipelineLayout {
    /// Stages given layer by layer.
    fn from(stages: Vec<Vec<u32>>) -> Self {
        Self { stages, depths: 0 }
    }
}

/// Why words are no pipeline layout: what was expected of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseStagesError(String);

impl FromStr for PipelineLayout {
    type Err = ParseStagesError;

    fn from_str(text: &str) -> Result<Self, ParseStagesError> {
        read(text).map_err(ParseStagesError)
    }
}

/// Reads Megatron's pipeline layout, or says what was expected.
fn read(text: &str) -> Result<PipelineLayout, String> {
    let refuse = |expected: &str| Err(format!("expected {expected}"));
    let flat = match expand(text) {
        Ok(flat) => flat,
        Err(expected) => return refuse(&expected),
    };
    if let Some(unknown) = flat.chars().find(|&symbol| !"EtmL|".contains(symbol)) {
        return refuse(&format!(
            "only the symbols E, t, m, L, |, *, ( and ), and there is `{unknown}`"
        ));
    }
    let count = |symbol| flat.chars().filter(|&found| found == symbol).count();
    if count('E') != 1 || !flat.starts_with('E') {
        let found = match count('E') {
            1 => "it is elsewhere".to_owned(),
            count => format!("there are {count}"),
        };
        return refuse(&format!("E once, as the first symbol, and {found}"));
    }
    let words: Vec<&str> = flat.split('|').collect();
    let last = words.len() - 1;
    if let Some(stage) = words[..last].iter().position(|word| word.contains('m')) {
        return Err(format!(
            "not supported yet; this release supports m on the last stage with L, and stage {} of {} \
             has one; or no m, and the MTP depths stand with L",
            stage + 1,
            words.len()
        ));
    }
    if count('L') != 1 || !flat.ends_with('L') {
        let found = count('L');
        return refuse(&format!(
            "L once, as the last symbol of the last stage, and there are {found}; for example \
             Et|(tt|)*30mL"
        ));
    }
    if words[last].contains("mt") {
        return refuse("every m after the last t");
    }
    let mut next = 0;
    let stages = words
        .iter()
        .map(|word| {
            let first = next;
            next += word.chars().filter(|&symbol| symbol == 't').count() as u32;
            (first..next).collect()
        })
        .collect();
    Ok(PipelineLayout {
        stages,
        depths: count('m'),
    })
}

/// Writes repeats out, or says what was expected.
fn expand(text: &str) -> Result<String, String> {
    let symbols: Vec<char> = text
        .chars()
        .filter(|symbol| !symbol.is_whitespace())
        .collect();
    // What is written out so far at each open parenthesis.
    let mut open = vec![String::new()];
    let mut at = 0;
    while at < symbols.len() {
        let symbol = symbols[at];
        at += 1;
        let item = match symbol {
            '(' => {
                open.push(String::new());
                if open.len() - 1 > MAX_DEPTH {
                    return Err(format!("at most {MAX_DEPTH} parentheses within each other"));
                }
                continue;
            }
            ')' if open.len() == 1 => return Err("a ( for every )".to_owned()),
            ')' => open.pop().unwrap_or_default(),
            '*' => return Err("a symbol or a parenthesis before every *".to_owned()),
            symbol => symbol.to_string(),
        };
        let mut times = 1;
        if symbols.get(at) == Some(&'*') {
            at += 1;
            let digits: String = symbols[at..]
                .iter()
                .take_while(|symbol| symbol.is_ascii_digit())
                .collect();
            at += digits.len();
            if digits.is_empty() {
                return Err("a number after every *, as in t*3".to_owned());
            }
            // A number too large to hold is too large in any case.
            times = digits.parse().unwrap_or(usize::MAX);
        }
        let Some(out) = open.last_mut() else {
            return Err("a ( for every )".to_owned());
        };
        if item.len().saturating_mul(times).saturating_add(out.len()) > MAX_SYMBOLS {
            return Err(format!(
                "at most {MAX_SYMBOLS} symbols once repeats are written out"
            ));
        }
        if !item.is_empty() {
            out.push_str(&item.repeat(times));
        }
    }
    match open.as_slice() {
        [flat] => Ok(flat.clone()),
        _ => Err("a ) for every (".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        text.parse::<PipelineLayout>().expect_err(text).to_string()
    }

    #[test]
    fn golden_pipeline_layouts_expand() {
        let layout: PipelineLayout = "Et|(tt|)*30mL".parse().expect("parses");
        let stages = layout.stages();
        assert_eq!(stages.len(), 32);
        assert_eq!(stages[0], [0]);
        assert_eq!(stages[30], [59, 60]);
        assert!(stages[31].is_empty());
        let nested: PipelineLayout = "E((t*2)*2|)*3 L".parse().expect("parses");
        assert_eq!(nested.stages()[2], [8, 9, 10, 11]);
    }

    #[test]
    fn what_is_no_layout_is_refused_with_what_is_wrong() {
        let deep = format!("E{}t{}L", "(".repeat(100_000), ")".repeat(100_000));
        for (text, expected) in [
            ("E(t|L", "a ) for every ("),
            ("Et)L", "a ( for every )"),
            ("E*L", "a number after every *"),
            ("*3", "before every *"),
            ("Ex|tL", "`x`"),
            ("", "E once"),
            ("tEL", "E once"),
            ("Et|EtL", "there are 2"),
            ("Et", "L once"),
            ("EtL|t", "L once"),
            ("EtLL", "there are 2"),
            ("EmtL", "every m after the last t"),
            ("E((t*4096)*4096)*4096L", "at most 4096 symbols"),
            ("Et*99999999999999999999999L", "at most 4096 symbols"),
            ("E()*18446744073709551615t*5000L", "at most 4096 symbols"),
            (deep.as_str(), "at most 32 parentheses"),
        ] {
            let message = refusal(text);
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    #[test]
    fn an_mtp_depth_before_the_last_stage_is_not_supported_yet() {
        let message = refusal("Et*3|(tt|)*29m|L");
        for expected in [
            "not supported yet",
            "m on the last stage with L",
            "31 of 32",
        ] {
            assert!(message.contains(expected), "{message}");
        }
    }
}
