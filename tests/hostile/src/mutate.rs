//! Inputs out of others, by changes that are drawn from a seed.
//!
//! Some changes know bytes (bits, cuts, splices, repeats), some lines, some numbers in text, and some JSON: a value
//! becomes a hostile one, another one of the same file, or goes. The words that are put in are those of all inputs of a
//! reader, and some that readers of text stumble over.

use std::collections::BTreeSet;

use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

/// No input is longer.
const LONGEST: usize = 1 << 17;
/// Words that are kept of a corpus.
const WORDS: usize = 4000;

/// Numbers that readers stumble over, as text has them.
const NUMBERS: [&str; 34] = [
    "0",
    "-0",
    "1",
    "2",
    "3",
    "7",
    "-1",
    "127",
    "255",
    "256",
    "65535",
    "65537",
    "16777216",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "340282366920938463463374607431768211456",
    "0.5",
    "-0.5",
    "1e-308",
    "5e-324",
    "1e308",
    "-1e308",
    "1e999",
    "nan",
    "inf",
    "1_000",
    "0x10",
];

/// Text that readers stumble over.
const TEXTS: [&str; 40] = [
    "",
    " ",
    "\n",
    "\r\n",
    "\t",
    "\0",
    "\u{feff}",
    "é",
    "\u{202e}",
    "𝔘",
    "\u{a0}",
    "\u{2003}",
    ":",
    "::",
    ",",
    ",,",
    "|",
    "=",
    "\"",
    "'",
    "\\",
    "#",
    "$",
    "${X}",
    "$((1+1))",
    "$(",
    "`",
    "((((((((",
    "[[[[[[[[",
    "{{{{{{{{",
    "]",
    "}",
    "- ",
    "*",
    "&a",
    "!!",
    "<<: *a",
    "../../etc/passwd",
    "null",
    "true",
];

/// What a reader is fed first, and what all its other inputs are made of.
pub(crate) struct Corpus {
    seeds: Vec<Seed>,
    words: Vec<String>,
}

struct Seed {
    bytes: Vec<u8>,
    /// Of JSON, its values, one a line where there are several.
    json: Option<Vec<Value>>,
}

impl Corpus {
    /// From inputs as they are in files.
    pub(crate) fn new(seeds: Vec<Vec<u8>>) -> Self {
        assert!(!seeds.is_empty(), "a corpus has an input");
        let seeds: Vec<Seed> = seeds.into_iter().map(Seed::new).collect();
        let mut words = BTreeSet::new();
        for seed in &seeds {
            let text = String::from_utf8_lossy(&seed.bytes);
            let parts = text.split(|c: char| !(c.is_alphanumeric() || "_-.".contains(c)));
            words.extend(parts.filter(|word| word.len() < 40).map(str::to_owned));
        }
        let all = words.len().div_ceil(WORDS).max(1);
        Self {
            seeds,
            words: words.into_iter().step_by(all).collect(),
        }
    }

    /// Input number `number` of a seed: first those of the corpus as they are, then changed ones.
    pub(crate) fn input(&self, seed: u64, number: u64) -> Vec<u8> {
        if let Some(whole) = self.seeds.get(number as usize) {
            return whole.bytes.clone();
        }
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(number);
        let chosen = self.any_seed(&mut random);
        let mut input = match &chosen.json {
            Some(values) if random.random_bool(0.7) => self.changed(values, &mut random),
            _ => chosen.bytes.clone(),
        };
        let is_json = chosen.json.is_some();
        // Of JSON most inputs stay JSON, or nothing but its parser would see them.
        if !is_json || random.random_bool(0.2) {
            let changes = *[1, 1, 1, 2, 3, 8].choose(&mut random).expect("some");
            for _ in 0..changes {
                self.change_bytes(&mut input, &mut random);
            }
        }
        input.truncate(LONGEST);
        input
    }

    fn any_seed(&self, random: &mut ChaCha8Rng) -> &Seed {
        self.seeds.choose(random).expect("there is one")
    }

    fn word(&self, random: &mut ChaCha8Rng) -> String {
        match random.random_range(0..4) {
            0 => (*TEXTS.choose(random).expect("some")).to_owned(),
            1 => (*NUMBERS.choose(random).expect("some")).to_owned(),
            _ => self.words.choose(random).cloned().unwrap_or_default(),
        }
    }

    /// JSON with some of its values changed.
    fn changed(&self, values: &[Value], random: &mut ChaCha8Rng) -> Vec<u8> {
        let mut values = values.to_vec();
        for _ in 0..random.random_range(1..=3) {
            let at = random.random_range(0..values.len());
            let count = places(&values[at]);
            let mut place = random.random_range(0..count);
            let other = self.any_value(random);
            let is_line = values.len() > 1;
            match random.random_range(0..if is_line { 12 } else { 10 }) {
                10 => {
                    let line = values[at].clone();
                    values.insert(random.random_range(0..=at), line);
                }
                11 if values.len() > 1 => {
                    values.remove(at);
                }
                _ => self.change_value(&mut values[at], &mut place, other, random),
            }
        }
        let lines: Vec<String> = values.iter().map(Value::to_string).collect();
        lines.join("\n").into_bytes()
    }

    /// A part of any JSON of the corpus.
    fn any_value(&self, random: &mut ChaCha8Rng) -> Value {
        let seed = self.any_seed(random);
        let Some(values) = &seed.json else {
            return Value::Null;
        };
        let mut value = values.choose(random).expect("some");
        // Down some levels.
        for _ in 0..random.random_range(1..8) {
            let parts: Vec<&Value> = match value {
                Value::Object(parts) => parts.values().collect(),
                Value::Array(parts) => parts.iter().collect(),
                _ => break,
            };
            match parts.choose(random) {
                Some(part) => value = part,
                None => break,
            }
        }
        value.clone()
    }

    /// Changes the value at a place, counted as [`places`] counts.
    fn change_value(
        &self,
        value: &mut Value,
        place: &mut usize,
        other: Value,
        random: &mut ChaCha8Rng,
    ) {
        if *place == 0 {
            self.change_here(value, other, random);
            return;
        }
        *place -= 1;
        let parts: Vec<&mut Value> = match value {
            Value::Object(parts) => parts.values_mut().collect(),
            Value::Array(parts) => parts.iter_mut().collect(),
            _ => return,
        };
        for part in parts {
            let count = places(part);
            if *place < count {
                return self.change_value(part, place, other, random);
            }
            *place -= count;
        }
    }

    fn change_here(&self, value: &mut Value, other: Value, random: &mut ChaCha8Rng) {
        let choice = random.random_range(0..10);
        match (choice, &mut *value) {
            (0, Value::Object(parts)) if !parts.is_empty() => {
                let key = any_key(parts, random);
                parts.remove(&key);
            }
            (1, Value::Object(parts)) if !parts.is_empty() => {
                let key = any_key(parts, random);
                let part = parts.remove(&key).expect("it is there");
                parts.insert(self.word(random), part);
            }
            (2, Value::Object(parts)) => {
                parts.insert(self.word(random), other);
            }
            (0, Value::Array(parts)) if !parts.is_empty() => {
                parts.remove(random.random_range(0..parts.len()));
            }
            (1 | 2, Value::Array(parts)) if !parts.is_empty() => {
                let part = parts[random.random_range(0..parts.len())].clone();
                let times = 1 << random.random_range(0..8);
                parts.extend((0..times).map(|_| part.clone()));
            }
            (3, Value::Array(parts)) if parts.len() > 1 => {
                let (i, j) = (
                    random.random_range(0..parts.len()),
                    random.random_range(0..parts.len()),
                );
                parts.swap(i, j);
            }
            (0..=4, Value::Number(number)) => {
                let near = nearby(number, random);
                *value = near;
            }
            (0..=2, Value::String(text)) => *text = changed_text(text, &self.word(random), random),
            (5, _) => *value = other,
            _ => *value = hostile(random),
        }
    }

    /// One change that knows no JSON.
    fn change_bytes(&self, input: &mut Vec<u8>, random: &mut ChaCha8Rng) {
        if input.is_empty() {
            input.extend(self.word(random).bytes());
            return;
        }
        let at = random.random_range(0..input.len());
        let length = (1 << random.random_range(0..12)).min(input.len() - at);
        let length = random.random_range(1..=length);
        match random.random_range(0..15) {
            0 => input[at] ^= 1 << random.random_range(0..8),
            1 => {
                input[at] = *[0, 1, 0x7f, 0x80, 0xff, b'0', b'9', b' ']
                    .choose(random)
                    .expect("some");
            }
            2 => drop(input.drain(at..at + length)),
            3 => input.truncate(at),
            4 => {
                let part = input[at..at + length].to_vec();
                let times = (1_usize << random.random_range(0..12)).min(LONGEST / length);
                let to = random.random_range(0..=input.len());
                input.splice(to..to, part.repeat(times.max(1)));
            }
            5 => {
                let other = &self.any_seed(random).bytes;
                let from = random.random_range(0..=other.len());
                let to = random.random_range(from..=other.len());
                input.splice(at..at + length, other[from..to].iter().copied());
            }
            6 => {
                let word = self.word(random);
                input.splice(at..at, word.bytes());
            }
            7 => {
                let word = self.word(random);
                input.splice(at..at + length.min(8), word.bytes());
            }
            8 => {
                // A word of the machine, as formats of bytes have lengths and places.
                let words = [
                    0,
                    1,
                    2,
                    255,
                    1 << 16,
                    (1 << 31) - 1,
                    1 << 31,
                    1 << 32,
                    1 << 62,
                    (1 << 63) - 1,
                    u64::MAX,
                ];
                let word = words.choose(random).expect("some").to_le_bytes();
                let width = *[1, 2, 4, 8].choose(random).expect("some");
                for (byte, new) in input[at..].iter_mut().zip(&word[..width]) {
                    *byte = *new;
                }
            }
            9 => {
                let end = (at + 8).min(input.len());
                let added = random.random_range(-16_i64..=16);
                if let Ok(word) = input[at..end].try_into() {
                    let sum = i64::from_le_bytes(word).wrapping_add(added);
                    input[at..end].copy_from_slice(&sum.to_le_bytes());
                }
            }
            10..=12 => change_number(input, at, random),
            _ => change_lines(input, random),
        }
    }
}

impl Seed {
    fn new(bytes: Vec<u8>) -> Self {
        let nested = |text: &[u8]| {
            let value: Option<Value> = serde_json::from_slice(text).ok();
            value.filter(|value| value.is_object() || value.is_array())
        };
        let json = nested(&bytes).map(|value| vec![value]).or_else(|| {
            let text = std::str::from_utf8(&bytes).unwrap_or_default();
            let lines = text.lines().map(|line| nested(line.as_bytes()));
            let all: Option<Vec<Value>> = lines.collect();
            all.filter(|all| !all.is_empty())
        });
        Self { bytes, json }
    }
}

/// Values in a value, itself included.
fn places(value: &Value) -> usize {
    1 + match value {
        Value::Object(parts) => parts.values().map(places).sum(),
        Value::Array(parts) => parts.iter().map(places).sum(),
        _ => 0,
    }
}

fn any_key(parts: &Map<String, Value>, random: &mut ChaCha8Rng) -> String {
    let at = random.random_range(0..parts.len());
    let key = parts.keys().nth(at).expect("one of them");
    key.clone()
}

/// A number near another: one off, double, half, its negative, or another power of two.
fn nearby(number: &serde_json::Number, random: &mut ChaCha8Rng) -> Value {
    if let Some(whole) = number.as_u64() {
        return match random.random_range(0..7) {
            0 => json!(whole.wrapping_add(1)),
            1 => json!(whole.wrapping_sub(1)),
            2 => json!(whole.wrapping_mul(2)),
            3 => json!(whole / 2),
            4 => json!(-(whole as i64 as f64)),
            5 => json!(1_u64 << random.random_range(0..64)),
            _ => json!(random.random_range(0..40)),
        };
    }
    let real = number.as_f64().unwrap_or(0.0);
    match random.random_range(0..4) {
        0 => json!(-real),
        1 => json!(real * 1e300),
        2 => json!(real / 1e300),
        _ => json!(real + 1.0),
    }
}

/// Values that nobody should write.
fn hostile(random: &mut ChaCha8Rng) -> Value {
    let number = || json!(null);
    match random.random_range(0..10) {
        0 => Value::Null,
        1 => json!(random.random_bool(0.5)),
        2 => json!([]),
        3 => json!({}),
        4 => json!([[[[]]]]),
        5 => json!(*TEXTS.choose(random).expect("some")),
        6 => json!("x".repeat(1 << random.random_range(0..14))),
        _ => {
            let text = *NUMBERS.choose(random).expect("some");
            serde_json::from_str(text).unwrap_or_else(|_| number())
        }
    }
}

fn changed_text(text: &str, word: &str, random: &mut ChaCha8Rng) -> String {
    let mut characters: Vec<char> = text.chars().collect();
    let at = random.random_range(0..=characters.len());
    match random.random_range(0..4) {
        0 => word.to_owned(),
        1 => {
            characters.splice(at..at, word.chars());
            characters.into_iter().collect()
        }
        2 => characters[..at].iter().collect(),
        _ => text.repeat(random.random_range(2..20)),
    }
}

/// Puts another number where one is, the first from a place on.
fn change_number(input: &mut Vec<u8>, at: usize, random: &mut ChaCha8Rng) {
    let Some(first) = input[at..].iter().position(u8::is_ascii_digit) else {
        return;
    };
    let first = at + first;
    let digits = input[first..].iter();
    let length = digits.take_while(|byte| byte.is_ascii_digit()).count();
    let number = *NUMBERS.choose(random).expect("some");
    input.splice(first..first + length, number.bytes());
}

/// Leaves out, doubles or swaps lines.
fn change_lines(input: &mut Vec<u8>, random: &mut ChaCha8Rng) {
    let mut lines: Vec<&[u8]> = input.split_inclusive(|byte| *byte == b'\n').collect();
    let (i, j) = (
        random.random_range(0..lines.len()),
        random.random_range(0..lines.len()),
    );
    match random.random_range(0..3) {
        0 => drop(lines.remove(i)),
        1 => lines.insert(j, lines[i]),
        _ => lines.swap(i, j),
    }
    *input = lines.concat();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_inputs_are_those_of_their_seed_and_most_json_stays_json() {
        let corpus = Corpus::new(vec![
            br#"{"layers": [{"heads": 8}, {"heads": 4}], "name": "a", "rate": 0.5}"#.to_vec(),
        ]);
        let inputs = |seed| (0..500).map(move |number| (seed, number));
        let all = |seed| -> Vec<Vec<u8>> {
            let each = inputs(seed).map(|(seed, number)| corpus.input(seed, number));
            each.collect()
        };
        let (one, other) = (all(1), all(2));
        assert_eq!(one, all(1));
        assert_eq!(one[0], other[0], "the first is the corpus");
        let differ = one.iter().zip(&other).filter(|(a, b)| a != b).count();
        assert!(differ > 400, "{differ} of 500 differ");
        let is_json = |input: &&Vec<u8>| serde_json::from_slice::<Value>(input).is_ok();
        let json = one.iter().filter(is_json).count();
        assert!((350..490).contains(&json), "{json} of 500 are JSON");
        let different: BTreeSet<&Vec<u8>> = one.iter().collect();
        assert!(different.len() > 300, "{} differ", different.len());
    }
}
