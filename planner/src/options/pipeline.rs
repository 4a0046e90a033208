//! Reads Megatron's words for a pipeline layout.

use super::PlanError;

/// Reads Megatron's pipeline layout: `E` embedding, `t` a decoder layer, `m` an MTP depth, `L` the
/// head, `|` between stages, `x*n` and `(..)*n` repeat (`pipeline_parallel_layer_layout.py`).
pub fn pipeline_layout(text: &str) -> Result<Vec<Vec<u32>>, PlanError> {
    let refuse = |expected: &str| PlanError::value("--pipeline-layout", text, expected);
    let flat = expand(text).ok_or_else(|| refuse("balanced parentheses and repeats like t*3"))?;
    let stages: Vec<&str> = flat.split('|').collect();
    let mut layers = Vec::with_capacity(stages.len());
    let mut next = 0;
    for (index, stage) in stages.iter().enumerate() {
        let mut held = Vec::new();
        for symbol in stage.chars() {
            match symbol {
                't' => {
                    held.push(next);
                    next += 1;
                }
                'E' if index == 0 => {}
                'E' => return Err(refuse("E on the first stage")),
                'L' | 'm' if index + 1 == stages.len() => {}
                'L' | 'm' => {
                    return Err(refuse("m and L on the last stage, as in Et|(tt|)*30mL"));
                }
                _ => return Err(refuse("only the symbols E, t, m, L, |, *, ( and )")),
            }
        }
        layers.push(held);
    }
    Ok(layers)
}

/// Writes repeats out.
fn expand(text: &str) -> Option<String> {
    fn items(symbols: &[char], at: &mut usize, depth: u32) -> Option<String> {
        let mut out = String::new();
        while *at < symbols.len() {
            let item = match symbols[*at] {
                '(' => {
                    *at += 1;
                    let inner = items(symbols, at, depth + 1)?;
                    if symbols.get(*at) != Some(&')') {
                        return None;
                    }
                    *at += 1;
                    inner
                }
                ')' => return (depth > 0).then_some(out),
                symbol => {
                    *at += 1;
                    symbol.to_string()
                }
            };
            let mut times = 1;
            if symbols.get(*at) == Some(&'*') {
                *at += 1;
                let digits: String = symbols[*at..]
                    .iter()
                    .take_while(|symbol| symbol.is_ascii_digit())
                    .collect();
                *at += digits.len();
                times = digits.parse().ok().filter(|&n: &usize| n <= 4096)?;
            }
            out.push_str(&item.repeat(times));
        }
        (depth == 0).then_some(out)
    }
    let symbols: Vec<char> = text
        .chars()
        .filter(|symbol| !symbol.is_whitespace())
        .collect();
    items(&symbols, &mut 0, 0)
}
