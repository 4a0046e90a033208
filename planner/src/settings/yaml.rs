//! YAML of the kind that recipes of Megatron-LM are: two maps of scalars and lists, `ENV_VARS` and `ARGS`
//! (or `MODEL_ARGS`, whose keys may keep their dashes), or keys of flags alone. Read here, and written.

use super::text::{Settings, SettingsFileError, Value, name};

/// Which map the lines are in.
#[derive(Clone, Copy, PartialEq)]
enum Section {
    Env,
    Args,
    Other,
}

/// What YAML 1.1 reads as true where it is not quoted.
const ON: [&str; 9] = [
    "true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON",
];

/// The same of false.
const OFF: [&str; 9] = [
    "false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF",
];

/// Whether a text is of this form: its first line that says anything is a key.
pub(super) fn begins(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#') && *line != "---");
    first.is_some_and(|line| {
        line.split_once(':').is_some_and(|(key, rest)| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
            !key.is_empty() && key.chars().all(plain) && (rest.is_empty() || rest.starts_with(' '))
        })
    })
}

pub(super) fn parse(path: &str, text: &str) -> Result<Settings, SettingsFileError> {
    let mut settings = Settings::default();
    let mut section = Section::Args;
    let mut list: Option<String> = None;
    for (index, line) in text.lines().enumerate() {
        let refuse = |expected| SettingsFileError::Line {
            path: path.to_owned(),
            line: index + 1,
            found: line.trim().to_owned(),
            expected,
        };
        let bare = without_comment(line);
        let trimmed = bare.trim();
        if trimmed.is_empty() || trimmed == "---" {
            continue;
        }
        if let Some(item) = trimmed
            .strip_prefix("- ")
            .filter(|_| !trimmed.starts_with("--"))
        {
            let Some(list) = &list else {
                return Err(refuse("a key before the items of a list"));
            };
            let item = scalar(item).ok_or_else(|| refuse("a quote for every quote"))?;
            let mut words = match settings.get(list) {
                Some(Value::Words(words)) => words.clone(),
                _ => Vec::new(),
            };
            words.push(item);
            settings.set(list, Value::Words(words));
            continue;
        }
        let Some((key, rest)) = trimmed.split_once(':') else {
            return Err(refuse("KEY: VALUE, or - ITEM of a list"));
        };
        let (key, rest) = (key.trim().trim_matches(['"', '\'']), rest.trim());
        list = None;
        if !bare.starts_with([' ', '\t']) {
            section = match (key, rest.is_empty()) {
                ("ENV_VARS", true) => Section::Env,
                ("ARGS" | "MODEL_ARGS", true) => Section::Args,
                (_, true) if key.chars().all(|c| c.is_ascii_uppercase() || c == '_') => {
                    Section::Other
                }
                (_, false) if key.chars().all(|c| c.is_ascii_uppercase() || c == '_') => continue,
                _ => Section::Args,
            };
            if rest.is_empty() && key.chars().all(|c| c.is_ascii_uppercase() || c == '_') {
                continue;
            }
        }
        match section {
            Section::Other => {}
            Section::Env => {
                let value = scalar(rest).ok_or_else(|| refuse("a quote for every quote"))?;
                settings.export(key, &value);
            }
            Section::Args => {
                let key = name(key);
                let value = match rest {
                    "null" | "Null" | "NULL" | "~" => continue,
                    word if ON.contains(&word) => Value::On,
                    word if OFF.contains(&word) => Value::Off,
                    "" => {
                        list = Some(key.clone());
                        Value::Words(Vec::new())
                    }
                    _ => match flow(rest) {
                        Some(items) => {
                            let items: Option<Vec<String>> =
                                items.iter().map(|item| scalar(item)).collect();
                            Value::Words(items.ok_or_else(|| refuse("a quote for every quote"))?)
                        }
                        None => Value::Words(vec![
                            scalar(rest).ok_or_else(|| refuse("a quote for every quote"))?,
                        ]),
                    },
                };
                settings.set(&key, value);
            }
        }
    }
    // A key with neither value nor items says nothing.
    let empty = Value::Words(Vec::new());
    settings.flags.retain(|setting| setting.value != empty);
    Ok(settings)
}

/// The items of `[a, b]`. A list of YAML alone: Python's, as `[0]*3`, is a text.
fn flow(text: &str) -> Option<Vec<&str>> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?;
    if inner.contains(['[', ']']) {
        return None;
    }
    Some(inner.split(',').map(str::trim).collect())
}

/// A line without what follows ` #`, outside of quotes.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, found) in line.char_indices() {
        match (quote, found) {
            (None, '\'' | '"') if before.is_whitespace() || ",[".contains(before) => {
                quote = Some(found);
            }
            (Some(open), _) if open == found => quote = None,
            (None, '#') if before.is_whitespace() => return &line[..at],
            _ => {}
        }
        before = found;
    }
    line
}

/// What a scalar means; nothing where a quote is left open.
fn scalar(text: &str) -> Option<String> {
    let text = text.trim();
    if let Some(inner) = text.strip_prefix('\'') {
        return Some(inner.strip_suffix('\'')?.replace("''", "'"));
    }
    if let Some(inner) = text.strip_prefix('"') {
        let inner = inner.strip_suffix('"')?;
        return Some(inner.replace("\\\"", "\"").replace("\\\\", "\\"));
    }
    Some(text.to_owned())
}

/// A scalar as it is written, in quotes where YAML would read something else.
pub(super) fn written(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:+$(){}*,".contains(c);
    let word_like = word
        .chars()
        .next()
        .is_some_and(|c| c.is_ascii_alphanumeric() || "_/.$(".contains(c));
    let keyword =
        ["true", "false", "null", "yes", "no", "on", "off"].contains(&word.to_lowercase().as_str());
    let safe = word_like
        && word.chars().all(|c| plain(c) || "[]|".contains(c))
        && !word.ends_with(':')
        && !keyword;
    if safe {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_what_is_read() {
        let text = "# a recipe\nENV_VARS:\n  A: '1'\n  B: x:y # why\nARGS:\n  num_layers: 61\n  swiglu: true\n  \
                    finetune: false\n  moe_layer_freq: ([0]*3+[1]*58)\n  recompute_modules:\n  - mla_up_proj\n  - mlp\n  \
                    scope: [attn, 'moe_router']\n  load: ${LOAD_PATH}\n  nothing:\n  also: null\nTEST_TYPE: regular\n";
        let read = parse("a.yaml", text).expect("reads");
        assert_eq!(read.variable("A"), Some("1"));
        assert_eq!(read.variable("B"), Some("x:y"));
        assert_eq!(read.get("num_layers"), Some(&Value::word(&61)));
        assert!(read.is_on("swiglu"));
        assert_eq!(read.get("finetune"), Some(&Value::Off));
        assert_eq!(
            read.get("moe_layer_freq"),
            Some(&Value::word("([0]*3+[1]*58)"))
        );
        let words = |words: &[&str]| Value::Words(words.iter().map(ToString::to_string).collect());
        assert_eq!(
            read.get("recompute_modules"),
            Some(&words(&["mla_up_proj", "mlp"]))
        );
        assert_eq!(read.get("scope"), Some(&words(&["attn", "moe_router"])));
        assert_eq!(read.get("load"), Some(&Value::word("${LOAD_PATH}")));
        assert_eq!(read.get("nothing"), None);
        assert_eq!(read.get("also"), None);
        assert_eq!(read.flags.len(), 7);
        for (word, value) in [
            ("yes", Value::On),
            ("TRUE", Value::On),
            ("on", Value::On),
            ("No", Value::Off),
            ("OFF", Value::Off),
            ("'true'", Value::word("true")),
            ("1", Value::word("1")),
        ] {
            let read = parse("a.yaml", &format!("ARGS:\n  bf16: {word}\n")).expect(word);
            assert_eq!(read.get("bf16"), Some(&value), "{word}");
        }
        let dashes = parse("b.yaml", "MODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n");
        let dashes = dashes.expect("reads");
        assert!(dashes.is_on("bf16") && dashes.get("num_layers").is_some());
    }

    #[test]
    fn what_is_no_yaml_is_refused_with_its_line() {
        for (text, expected) in [
            (
                "ARGS:\n  num_layers 61\n",
                "c.yaml:2: found `num_layers 61`",
            ),
            ("ARGS:\n- a\n", "a key before the items"),
            ("ARGS:\n  load: 'x\n", "a quote for every quote"),
        ] {
            let error = parse("c.yaml", text).expect_err(text).to_string();
            assert!(error.contains(expected), "{error} lacks {expected}");
        }
    }

    #[test]
    fn law_words_are_read_as_they_are_written() {
        for word in [
            "1e-5",
            "a b",
            "it's",
            "true",
            "x: y",
            "# no",
            "([0]*3+[1]*58)",
            "Et*3|(tt|)*29mL",
            "-1",
            "[0]*2",
            "${OUT}/t",
            "",
            "a #b",
            "key:",
            "*x",
            "'q'",
        ] {
            let line = format!("ARGS:\n  a: {}\n", written(word));
            let read = parse("d.yaml", &line).expect(word);
            assert_eq!(read.get("a"), Some(&Value::word(&word)), "{line}");
        }
    }
}
