//! Command lines and shell scripts, read as far as settings go: assignments, arrays, `export`, variables that the file
//! itself assigns, and the words of commands. Nothing is run. Of a branch both sides are read, one after the other.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;

use super::arithmetic::evaluate;
use super::branches::{Assigned, Branches, JOINS};
use super::table;
use super::text::{Setting, Settings, SettingsFileError, Value, flag, name};
use super::words::{
    MOST_NESTED, Part, Word, assignment, commands, counting, plain, reference, split, text, written,
};

/// Variables of a launcher: they place ranks, and are no settings.
const OF_LAUNCHERS: [&str; 9] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "NNODES",
    "PATH",
    "PYTHONPATH",
];

/// Reads a script; `path` names it in messages.
pub(super) fn parse(path: &str, text: &str) -> Result<Settings, SettingsFileError> {
    let mut script = Script::default();
    let (commands, unclosed) = commands(text, 0);
    if let Some(line) = unclosed {
        return Err(SettingsFileError::Line {
            path: path.to_owned(),
            line,
            found: "a quote that nothing closes".to_owned(),
            expected: "a quote for every quote",
        });
    }
    for (line, command) in commands {
        script.run(&command);
        if !script.has_room(0) {
            return Err(SettingsFileError::Line {
                path: path.to_owned(),
                line,
                found: format!("variables that stand for over {} MiB", MOST_BYTES >> 20),
                expected: "variables that end; write out what this line makes of them",
            });
        }
    }
    Ok(script.settings())
}

/// What a script has assigned and said so far.
#[derive(Debug, Default)]
struct Script {
    variables: BTreeMap<String, Vec<String>>,
    /// Names of variables that hold flags, in the order of their first assignment.
    holders: Vec<String>,
    env: Settings,
    /// Flags of each command, and whether it names a program: other lines hold flags alone.
    said: Vec<(bool, Settings)>,
    /// Bytes that variables have stood for so far.
    spent: Cell<usize>,
    /// Defaults inside of which a variable stands.
    depth: Cell<usize>,
    /// Scripts inside of which a command stands.
    nested: usize,
    branches: Branches,
}

/// Bytes that variables of a script may stand for in all: one that holds itself twice, line after line, has no end.
const MOST_BYTES: usize = 8 << 20;

/// Defaults that may stand in one another.
const MOST_DEPTH: usize = 64;

/// Commands that assign the words behind their options.
const DECLARES: [&str; 6] = ["export", "declare", "typeset", "local", "readonly", "let"];

impl Script {
    fn run(&mut self, command: &[Word]) {
        // What begins a branch or a loop is no command.
        let opens =
            |word: &&Word| matches!(plain(word), Some("then" | "else" | "do" | "{" | JOINS));
        let begun = command.iter().take_while(opens).count();
        let (begins, command) = command.split_at(begun);
        let begins: Vec<Option<&str>> = begins.iter().map(plain).collect();
        let firsts = [0, 1, 2].map(|at| command.get(at).and_then(plain));
        self.branches.command(&begins, firsts);
        let mut words = command;
        let mut prefix = Vec::new();
        let first = words.first().and_then(plain);
        match first {
            Some("unset") => {
                for name in words[1..].iter().filter_map(plain) {
                    self.variables.remove(name);
                }
                return;
            }
            Some(":") => return words[1..].iter().for_each(|word| self.fill(word)),
            _ => {}
        }
        let exports = first.is_some_and(|first| DECLARES.contains(&first));
        let (exported, counts) = (first == Some("export"), first == Some("let"));
        if exports {
            let is_option = |word: &&Word| plain(word).is_some_and(|word| word.starts_with('-'));
            let options = words[1..].iter().take_while(is_option).count();
            words = &words[1 + options..];
        }
        while let Some((variable, added, value)) = words.first().and_then(assignment) {
            words = &words[1..];
            let value = match value.parts.as_slice() {
                [Part::Array(items)] => items.iter().flat_map(|item| self.expand(item)).collect(),
                _ if counts => vec![self.counted(&self.whole(&value))],
                _ => vec![self.whole(&value)],
            };
            let mut all = match self.variables.get(&variable) {
                Some(held) if added => {
                    if !self.has_room(held.iter().map(String::len).sum()) {
                        return;
                    }
                    held.clone()
                }
                _ => Vec::new(),
            };
            let is_array = matches!(command_array(command), Some(true));
            match all.last_mut() {
                Some(last) if added && !is_array => last.push_str(&value.join(" ")),
                _ => all.extend(value.clone()),
            }
            if value.iter().any(|word| word.contains("--")) && !self.holders.contains(&variable) {
                self.holders.push(variable.clone());
            }
            prefix.push((variable.clone(), all.join(" ")));
            self.branches.assigns(&Assigned {
                variable: &variable,
                held: self.variables.get(&variable).map(Vec::as_slice),
                added: added.then_some(&value),
                all: &all,
            });
            self.variables.insert(variable, all);
        }
        if exports {
            // `export A B` of variables assigned before.
            for word in words {
                if let Some(name) = plain(word).filter(|_| exported)
                    && let Some(value) = self.variables.get(name)
                {
                    prefix.push((name.to_owned(), value.join(" ")));
                }
            }
            if exported {
                self.export(&prefix);
            }
            return;
        }
        self.start(&without_redirections(words), &prefix);
    }

    /// Runs a command that is neither an assignment nor a branch, before which some variables are assigned.
    fn start(&mut self, words: &[&Word], prefix: &[(String, String)]) {
        if words.is_empty() {
            return;
        }
        if let Some(script) = self.script_in(words) {
            let (doubts, said) = (self.branches.doubts_read(), self.said.len());
            if self.nested < MOST_NESTED && self.has_room(script.len()) {
                self.export(prefix);
                self.nested += 1;
                let (inner, _) = commands(&script, self.nested);
                for (_, command) in &inner {
                    self.run(command);
                }
                self.nested -= 1;
            }
            if self.said.len() > said {
                self.branches.say(doubts);
            }
            return;
        }
        let words: Vec<String> = words.iter().flat_map(|word| self.expand(word)).collect();
        let own = words.iter().position(|word| {
            let ending = Path::new(word).extension();
            ending.is_some_and(|ending| ending == "py")
        });
        let flags = match own {
            Some(at) => &words[at + 1..],
            None => words.as_slice(),
        };
        let begins = words.first().is_some_and(|word| word.starts_with("--"));
        if own.is_none() && !begins {
            return;
        }
        self.export(prefix);
        self.said.push((own.is_some(), said(flags)));
        let doubts = self.branches.doubts_read();
        self.branches.say(doubts);
    }

    /// The script that a command is given as a word: by `bash -c`, whatever starts that, or `eval`.
    fn script_in(&self, words: &[&Word]) -> Option<String> {
        let names: Vec<Option<&str>> = words.iter().map(|word| plain(word)).collect();
        if names[0] == Some("eval") {
            let rest: Vec<String> = words[1..].iter().map(|word| self.whole(word)).collect();
            return Some(rest.join(" "));
        }
        let is_shell = |name: Option<&str>| {
            let file = name.and_then(|name| name.rsplit('/').next());
            file.is_some_and(|file| ["bash", "sh", "zsh"].contains(&file))
        };
        let shell = names.iter().position(|name| is_shell(*name))?;
        let takes = |word: &&str| word.starts_with('-') && word.ends_with('c');
        names.get(shell + 1).copied().flatten().filter(takes)?;
        let script = self.whole(words.get(shell + 2)?);
        // Behind the name that the script is to have.
        let arguments = words
            .iter()
            .skip(shell + 4)
            .flat_map(|word| self.expand(word));
        let arguments: Vec<String> = arguments.map(|word| written(&word)).collect();
        if arguments.is_empty() {
            return Some(script);
        }
        let arguments = arguments.join(" ");
        let script = ["\"$@\"", "$@", "$*"]
            .iter()
            .fold(script, |script, own| script.replace(own, &arguments));
        Some(script)
    }

    /// Assigns a variable that has no value what `${NAME:=VALUE}` gives it.
    fn fill(&mut self, word: &Word) {
        let text = text(word);
        let inner = text
            .strip_prefix("${")
            .and_then(|text| text.strip_suffix('}'));
        let Some((name, value)) = inner.and_then(|inner| inner.split_once('=')) else {
            return;
        };
        let name = name.strip_suffix(':').unwrap_or(name);
        let is_empty = self
            .variables
            .get(name)
            .is_none_or(|held| held.concat().is_empty());
        if is_empty {
            let value = self.substitute(value.trim_matches('"'));
            self.variables.insert(name.to_owned(), vec![value]);
        }
    }

    /// What stands in `$((..))`, or in words as it is where it is no number.
    fn counted(&self, text: &str) -> String {
        let number = |name: &str| self.value(name)?.trim().parse().ok();
        let value = evaluate(&self.substitute(text), &number);
        value.map_or_else(|| format!("$(({text}))"), |value| value.to_string())
    }

    fn export(&mut self, variables: &[(String, String)]) {
        for (name, value) in variables {
            if !is_of_launcher(name) && !value.contains("$(") && !value.contains('`') {
                self.env.export(name, value);
                self.branches.say_variable(name);
            }
        }
    }

    /// Flags of commands; without any, those that variables hold which no other holds.
    fn settings(mut self) -> Settings {
        let mut all = joined(self.said);
        if all.flags.is_empty() {
            let words: Vec<String> = self
                .holders
                .iter()
                .flat_map(|name| self.variables[name].clone())
                .flat_map(|words| {
                    split(&words)
                        .into_iter()
                        .map(str::to_owned)
                        .collect::<Vec<_>>()
                })
                .collect();
            all = said(&words);
            for name in &self.holders {
                self.branches.say_variable(name);
            }
        }
        all.env = self.env.env;
        let notes = self.branches.notes(|name| !is_of_launcher(name));
        all.notes.extend(notes);
        all
    }

    /// A word with its variables, split where they are not quoted.
    fn expand(&self, word: &Word) -> Vec<String> {
        if let [Part::Open(text, true)] = word.parts.as_slice()
            && let Some(all) = self.array(text)
        {
            return all;
        }
        let mut words = vec![String::new()];
        let mut any = false;
        for part in &word.parts {
            match part {
                Part::Plain(text) => {
                    any = true;
                    words.last_mut().expect("never empty").push_str(text);
                }
                Part::Open(text, true) => {
                    any = true;
                    let text = self.substitute(text);
                    words.last_mut().expect("never empty").push_str(&text);
                }
                Part::Open(text, false) => {
                    let is_held = text.contains('$');
                    let text = self.substitute(text);
                    // Commands that a variable holds are told apart where it is evaluated.
                    let goes_on = |piece: &&str| !(is_held && ends_command(piece));
                    let mut pieces = split(&text).into_iter().take_while(goes_on);
                    if let Some(first) = pieces.next() {
                        any = true;
                        if text.starts_with(char::is_whitespace)
                            && !words[words.len() - 1].is_empty()
                        {
                            words.push(String::new());
                        }
                        words.last_mut().expect("never empty").push_str(first);
                    }
                    words.extend(pieces.map(str::to_owned));
                }
                Part::Array(_) => {}
            }
        }
        if any { words } else { Vec::new() }
    }

    /// A word with its variables, as one.
    fn whole(&self, word: &Word) -> String {
        let parts = word.parts.iter().map(|part| match part {
            Part::Plain(text) => text.clone(),
            Part::Open(text, _) => self.substitute(text),
            Part::Array(_) => String::new(),
        });
        parts.collect()
    }

    /// The items of `${NAME[@]}`, where the text is just that and the file assigns it.
    fn array(&self, text: &str) -> Option<Vec<String>> {
        let inner = text.strip_prefix("${")?.strip_suffix('}')?;
        let name = inner.strip_suffix("[@]").or(inner.strip_suffix("[*]"))?;
        self.branches.reads(name);
        let words = self.variables.get(name)?;
        let bytes = words.iter().map(|word| word.len() + size_of::<String>());
        self.has_room(bytes.sum()).then(|| words.clone())
    }

    /// Whether variables may stand for so many bytes more.
    fn has_room(&self, bytes: usize) -> bool {
        self.spent.set(self.spent.get().saturating_add(bytes));
        self.spent.get() <= MOST_BYTES
    }

    /// A text with the variables that the file assigns, or for which it has a default; others stay as they are, and
    /// so do all from where they would stand for too much, which refuses the script.
    fn substitute(&self, text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find('$') {
            out.push_str(&rest[..at]);
            let after = &rest[at + 1..];
            if let Some((inner, tail)) = counting(after) {
                out.push_str(&self.counted(inner));
                rest = tail;
                continue;
            }
            let (reference, tail) = reference(after);
            match reference.and_then(|reference| self.value(reference)) {
                Some(value) => out.push_str(&value),
                None => out.push_str(&rest[at..rest.len() - tail.len()]),
            }
            rest = tail;
        }
        out.push_str(rest);
        out
    }

    fn value(&self, reference: &str) -> Option<String> {
        let ends = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        let end = reference.find(ends).unwrap_or(reference.len());
        let (name, more) = reference.split_at(end);
        let whole = more.strip_prefix("[@]").or(more.strip_prefix("[*]"));
        self.branches.reads(name);
        let words = self.variables.get(name);
        if let (None, Some((place, ""))) = (
            whole,
            more.strip_prefix('[').and_then(|more| more.split_once(']')),
        ) {
            return words?.get(place.parse::<usize>().ok()?).cloned();
        }
        let more = whole.unwrap_or(more);
        let bytes = words.into_iter().flatten().map(|word| word.len() + 1);
        if !self.has_room(bytes.sum()) {
            return None;
        }
        let own = words.map(|words| words.join(" "));
        let default = more
            .strip_prefix(":-")
            .or(more.strip_prefix(":="))
            .or(more.strip_prefix('-'));
        let other = more.strip_prefix(":+").or(more.strip_prefix('+'));
        if let Some(other) = other {
            let is_empty = own.is_none_or(|own| own.is_empty());
            return Some(if is_empty {
                String::new()
            } else {
                self.substitute(other.trim_matches('"'))
            });
        }
        match (own, default) {
            // What is cut or replaced in it is not known.
            (_, None) if !more.is_empty() => None,
            (Some(own), _) if !own.is_empty() => Some(own),
            (_, Some(_)) if self.depth.get() >= MOST_DEPTH => None,
            (_, Some(default)) => {
                self.depth.set(self.depth.get() + 1);
                let found = self.substitute(default.trim_matches('"'));
                self.depth.set(self.depth.get() - 1);
                Some(found)
            }
            (own, None) => own,
        }
    }
}

fn is_of_launcher(variable: &str) -> bool {
    OF_LAUNCHERS.contains(&variable) || variable.starts_with("SLURM_")
}

/// The words of a command but those that say where it reads and writes: `> log`, `2>log`, `< data`.
fn without_redirections(command: &[Word]) -> Vec<&Word> {
    let mut kept = Vec::new();
    let mut words = command.iter();
    while let Some(word) = words.next() {
        let begins = match word.parts.first() {
            Some(Part::Open(text, false)) => text.trim_start_matches(|c: char| c.is_ascii_digit()),
            _ => "",
        };
        let target = begins.trim_start_matches(['<', '>']);
        if target.len() == begins.len() {
            kept.push(word);
        } else if target.is_empty() && word.parts.len() == 1 {
            words.next();
        }
    }
    kept
}

/// Whether a word is no more of a command: one that joins it to another, or says where it writes.
fn ends_command(word: &str) -> bool {
    let begins = word.trim_start_matches(|c: char| c.is_ascii_digit());
    ["|", "||", "&", "&&", ";"].contains(&word) || begins.starts_with('>')
}

/// Whether a word stands for the arguments of the script.
fn is_of_caller(word: &str) -> bool {
    let name = word.strip_prefix('$').unwrap_or_default();
    let name = name.strip_prefix('{').unwrap_or(name);
    name.starts_with(['@', '*'])
}

/// Whether the first word of a command assigns an array.
fn command_array(command: &[Word]) -> Option<bool> {
    let assigned = command.iter().find_map(assignment)?;
    Some(matches!(assigned.2.parts.as_slice(), [Part::Array(_)]))
}

/// The flags among words, each with the words up to the next.
fn said(words: &[String]) -> Settings {
    let mut settings = Settings::default();
    let mut at = 0;
    while at < words.len() {
        let Some(word) = words[at].strip_prefix("--").filter(|word| !word.is_empty()) else {
            if words[at].contains('$') {
                settings.elsewhere.push(words[at].clone());
            }
            at += 1;
            continue;
        };
        at += 1;
        let (own, joined) = match word.split_once('=') {
            Some((own, value)) => (own, Some(value.to_owned())),
            None => (word, None),
        };
        let mut values: Vec<String> = joined.into_iter().collect();
        let takes_none = table::is_switch(&name(own));
        while let Some(value) = words.get(at).filter(|word| !word.starts_with("--")) {
            if is_of_caller(value) || (takes_none && value.contains('$')) {
                settings.elsewhere.push(value.clone());
            } else {
                values.push(value.clone());
            }
            at += 1;
        }
        let value = if values.is_empty() {
            Value::On
        } else {
            Value::Words(values)
        };
        let name = name(own);
        if own.contains('_') && table::find(&name).is_some() {
            let flag = flag(&name);
            let note = format!("--{own} is read as {flag}, which alone Megatron-LM takes");
            settings.notes.push(note);
        }
        settings.say(&name, value);
    }
    settings
}

/// Flags of all commands that are mostly of Megatron-LM; of all where none is: a script may run other programs too. Flags alone are
/// of no command where one names its program.
fn joined(commands: Vec<(bool, Settings)>) -> Settings {
    let is_mostly_known = |command: &Settings| {
        let is_known = |setting: &&Setting| table::find(&setting.name).is_some();
        2 * command.flags.iter().filter(is_known).count() > command.flags.len()
    };
    let known: Vec<bool> = commands
        .iter()
        .map(|(_, own)| is_mostly_known(own))
        .collect();
    let any = known.contains(&true);
    let trains = commands.iter().zip(&known);
    let trains = trains
        .filter(|((runs, _), is_known)| *runs && **is_known)
        .count();
    let mut all = Settings::default();
    for ((runs, command), is_known) in commands.into_iter().zip(known) {
        if any && !is_known {
            continue;
        }
        if trains > 0 && !runs {
            // A pattern of a script that reads flags itself says no more than one.
            let first = command
                .flags
                .first()
                .filter(|first| command.flags.len() > 1 || matches!(first.value, Value::Words(_)));
            all.notes.extend(first.map(|first| {
                let first = flag(&first.name);
                format!("a line of flags alone, {first} first, is left out: it is of no command, as behind a comment or a blank line")
            }));
            continue;
        }
        for Setting { name, value } in command.flags {
            all.say(&name, value);
        }
        all.notes.extend(command.notes);
        all.elsewhere.extend(command.elsewhere);
    }
    if trains > 1 {
        let note = "commands train: their flags are read as those of one, and of a flag that several have the last counts";
        all.notes.insert(0, format!("{trains} {note}"));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::words::without_unset;
    use super::*;

    fn words(value: &[&str]) -> Value {
        Value::Words(value.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn golden_scripts() {
        let script = r#"#!/bin/bash
#SBATCH --nodes=4
export CUDA_DEVICE_MAX_CONNECTIONS=1  # for overlap
export NCCL_NVLS_ENABLE=0 OTHER="a b"
export MASTER_ADDR=$(hostname)
TP=2
EP=${EP:-8}
LAYERS="$((4))"
MODEL_ARGS=(
    --num-layers 32   # all of them
    --moe-layer-freq '([0]*3+[1]*29)'
    --swiglu
)
MODEL_ARGS+=(--hidden-size 4096)
MOE="--num-experts 8 --moe-router-topk 2"
MOE="$MOE --expert-model-parallel-size $EP"
if [ "$X" = 1 ]; then MOE+=" --bf16"; fi
NVTE_FUSED_ATTN=1 torchrun --nproc-per-node 8 --nnodes $NODES \
    pretrain_gpt.py "${MODEL_ARGS[@]}" $MOE ${MORE_ARGS:-} \
    --tensor-model-parallel-size ${TP} --load "${LOAD}/x" --lr=1e-4 \
    --recompute-modules mlp "moe_act" > log 2>&1
"#;
        let tail = |tail: &str| {
            let read = parse(&script.replace("> log 2>&1", tail));
            (read.get("recompute_modules").cloned(), read.elsewhere)
        };
        for (said, elsewhere) in [
            ("> log 2>&1", &[][..]),
            ("2>&1 | tee log", &[]),
            ("2>> errors.txt >log < data", &[]),
            ("\"$@\"", &["$@"]),
            ("${@:2} >\"$LOG\"", &["${@:2}"]),
        ] {
            let (modules, found) = tail(said);
            assert_eq!(modules, Some(words(&["mlp", "moe_act"])), "{said}");
            assert_eq!(found, elsewhere, "{said}");
        }
        let held = parse("CMD=\"torchrun a.py --bf16 --lr 1 2>&1 | tee log\"\neval $CMD\n");
        assert!(held.is_on("bf16") && held.get("lr") == Some(&words(&["1"])));
        let before = parse("torchrun a.py \"$@\" $GPT --bf16\n");
        assert_eq!(before.elsewhere, ["$@", "$GPT"]);
        let read = parse("--lr 1 --bf16 $MORE --swiglu 2>&1 | tee log\n");
        assert!(read.is_on("bf16") && read.is_on("swiglu"));
        assert_eq!(read.elsewhere, ["$MORE"]);
        let read = parse(script);
        assert_eq!(read.variable("CUDA_DEVICE_MAX_CONNECTIONS"), Some("1"));
        assert_eq!(read.variable("OTHER"), Some("a b"));
        assert_eq!(read.variable("NVTE_FUSED_ATTN"), Some("1"));
        assert_eq!(read.variable("MASTER_ADDR"), None);
        for (name, value) in [
            ("num_layers", words(&["32"])),
            ("moe_layer_freq", words(&["([0]*3+[1]*29)"])),
            ("swiglu", Value::On),
            ("hidden_size", words(&["4096"])),
            ("num_experts", words(&["8"])),
            ("expert_model_parallel_size", words(&["8"])),
            ("bf16", Value::On),
            ("tensor_model_parallel_size", words(&["2"])),
            ("load", words(&["${LOAD}/x"])),
            ("lr", words(&["1e-4"])),
        ] {
            assert_eq!(read.get(name), Some(&value), "{name}");
        }
        assert_eq!(read.get("nproc_per_node"), None);
    }

    fn parse(text: &str) -> Settings {
        super::parse("script.sh", text).expect("a script reads")
    }

    #[test]
    fn golden_texts_that_programs_read_have_quotes_of_their_own() {
        for (begins, ends) in [
            ("<<EOF", "EOF"),
            ("<<-'EOF' > log", "\tEOF"),
            ("<< EOF", "EOF"),
        ] {
            let script = format!("cat {begins}\nDon't wait.\n{ends}\n--lr 1 --bf16\n");
            assert_eq!(parse(&script).get("lr"), Some(&words(&["1"])), "{begins}");
        }
        let sbatch =
            parse("sbatch <<EOF\n#SBATCH --nodes=2\npretrain_gpt.py --lr 1\nEOF\necho done\n");
        assert_eq!(sbatch.get("lr"), Some(&words(&["1"])));
        let name = parse("NAME=\"$(echo \"it's\")\"\necho $'it\\'s'\ncat <<< \"it's\"\n--lr 1\n");
        assert_eq!(name.get("lr"), Some(&words(&["1"])));
    }

    #[test]
    fn golden_what_commands_print_is_one_word() {
        let script = r#"
DIR="$( cd "$( dirname "${BASH_SOURCE[0]}" )" && pwd )"
OUT=/exp/$(date +%s)
AT=`date +%s`
torchrun a.py --bf16 --load $DIR/a --save $OUT/b --data-path 1 "/x/$AT" --tokenizer-model ~/t
"#;
        let read = parse(script);
        let load = r#"$( cd "$( dirname "${BASH_SOURCE[0]}" )" && pwd )/a"#;
        for (name, values, as_written) in [
            ("load", &[load][..], format!("\"{load}\"")),
            (
                "save",
                &["/exp/$(date +%s)/b"],
                "\"/exp/$(date +%s)/b\"".to_owned(),
            ),
            (
                "data_path",
                &["1", "/x/$(date +%s)"],
                "\"/x/$(date +%s)\"".to_owned(),
            ),
            ("tokenizer_model", &["~/t"], "~/t".to_owned()),
        ] {
            assert_eq!(read.get(name), Some(&words(values)), "{name}");
            assert_eq!(written(values[values.len() - 1]), as_written);
        }
        assert_eq!(
            without_unset("/a:$B${C}:${D:-x}$(e)"),
            "/a:${B:-}${C:-}:${D:-x}$(e)"
        );
    }

    #[test]
    fn golden_backticks_in_quotes_that_keep_them_are_text() {
        for (said, value) in [
            (r"'use `touch x` now'", "use `touch x` now"),
            (r#""a\`id\`""#, "a`id`"),
            (r"$'it`s'", "it`s"),
        ] {
            let read = parse(&format!("torchrun a.py --bf16 --save {said}\n"));
            assert_eq!(read.get("save"), Some(&words(&[value])), "{said}");
            assert_eq!(written(value), format!("'{value}'"));
        }
        let held = parse("A=\"--bf16 --load $( cd x && pwd )/a --data-path `cat y`\"\n");
        assert_eq!(held.get("load"), Some(&words(&["$( cd x && pwd )/a"])));
        assert_eq!(held.get("data_path"), Some(&words(&["$(cat y)"])));
        assert_eq!(written("$(cat y)"), "$(cat y)");
        let read = parse("A=`dirname \\`readlink -f $0\\``\ntorchrun a.py --bf16 --load $A/b\n");
        assert_eq!(
            read.get("load"),
            Some(&words(&["$(dirname `readlink -f $0`)/b"]))
        );
    }

    #[test]
    fn golden_which_of_several_commands_flags_are_of_is_said() {
        let read = parse("torchrun a.py --bf16 \\\n  # --swiglu \\\n  --fp8-format hybrid\n");
        assert!(read.is_on("bf16") && read.get("fp8_format").is_none());
        let [note] = &read.notes[..] else {
            panic!("{:?}", read.notes)
        };
        assert!(note.contains("--fp8-format first"), "{note}");
        let read = parse("torchrun a.py --bf16 --lr 1\ntorchrun a.py --bf16 --lr 2\n");
        assert_eq!(read.get("lr"), Some(&words(&["2"])));
        assert!(
            read.notes[0].starts_with("2 commands train"),
            "{:?}",
            read.notes
        );
        let read = parse("if [ $X ]; then L=1; M=1; else M=2; fi\nmkdir $M\n--lr $L");
        assert_eq!(read.notes, ["a branch alone makes $L `1`, which counts"]);
        for condition in [
            "if [ $F = 1 ]; then A=\"--fp8-format hybrid\"; fi",
            "[[ ${F:-0} == 1 ]] && A=\"--fp8-format hybrid\"",
            "[ -z \"$F\" ] ||\n A=\"--fp8-format hybrid\"",
            "[[ $F == 1 && $G == 2 ]] && A=\"--fp8-format hybrid\"",
            "[ $F ] || { B=1; A=\"--fp8-format hybrid\"; }",
        ] {
            let read = parse(&format!("{condition}\ntorchrun a.py --bf16 $A\n"));
            assert!(read.get("fp8_format").is_some(), "{condition}");
            let expected = "a branch alone makes $A `--fp8-format hybrid`, which counts";
            assert_eq!(read.notes, [expected], "{condition}");
        }
        for script in [
            "cd x && A=--bf16\ntorchrun a.py --lr 1 $A\n",
            "if [ $X ]; then A=--bf16; torchrun a.py --lr 1 $A; fi\n",
            "case $1 in\n --lr|--bf16) shift;;\nesac\ntorchrun a.py --bf16\n",
        ] {
            let read = parse(script);
            assert!(read.is_on("bf16") && read.notes.is_empty(), "{script}");
        }
    }

    #[test]
    fn golden_which_of_several_things_counts_is_said() {
        for (script, said) in [
            (
                "--lr 1 --bf16 --lr 2",
                "--lr is given twice: of `1` and `2` the last counts",
            ),
            (
                "x.py --num_layers=4 --bf16 --my_own 1",
                "--num_layers is read as --num-layers, which alone Megatron-LM takes",
            ),
            (
                "L=1\nif [ \"$X\" = a ]; then L=2; elif [ \"$X\" = b ]; then\nL=3\nfi\n--lr $L",
                "a branch decides what $L is: of `1`, `2` and `3` the last counts",
            ),
            (
                "L=1\ncase $X in a) L=2;; *) L=3;; esac\nARGS=\"--lr $L\"\n",
                "a branch decides what $L is: of `1`, `2` and `3` the last counts",
            ),
            (
                "M=--bf16\nif [ $X ]; then M+=\" --lr 2\"; fi\npretrain_gpt.py $M",
                "a branch adds `--lr 2` to $M, which counts",
            ),
            (
                "if [ $X ]; then export A=1; else export A=2; fi\n--lr 1",
                "a branch decides what $A is: of `1` and `2` the last counts",
            ),
            (
                "(if [ $X ]; then L=1; else L=2; fi)\nA=\"--lr $L\"; A=\"$A --bf16\"\nsh -c \"x.py $A\"",
                "a branch decides what $L is: of `1` and `2` the last counts",
            ),
        ] {
            assert_eq!(parse(script).notes, [said], "{script}");
        }
        for script in [
            "--lr 1 --bf16 --lr 1",
            "if [ $X ]; then L=1; else L=1; fi\n--lr $L",
            "L=1\nif [ $X ]; then M=1; else M=2; fi\nmkdir $M\n--lr $L",
            "L=1\nL=2\n--lr $L",
            "if [ $X ]; then L=1; else L=2; fi\nL=4\n--lr $L",
            "L=1\npretrain_gpt.py --lr $L\nif [ $X ]; then L=2; fi",
            "python - <<EOF\nif x:\n  pass\nEOF\nA=\"--lr 1\"\nA=\"$A --bf16\"\nx.py $A",
            "if [ $X ]; then NODE_RANK=0; else NODE_RANK=1; fi\nx.py --lr 1 --node-rank $NODE_RANK",
        ] {
            assert_eq!(parse(script).notes, [""; 0], "{script}");
        }
    }

    #[test]
    fn golden_scripts_in_words_and_what_assigns() {
        let lr = |script: &str| match parse(script).get("lr") {
            Some(Value::Words(words)) => words.join(" "),
            other => panic!("{script}: {other:?}"),
        };
        for script in [
            "srun bash -c \"python pretrain_gpt.py --lr 3\"",
            "srun --mpi=none /bin/bash -lc 'cd /x; python pretrain_gpt.py --lr 3'",
            "ARGS=(--bf16 --lr 2)\nsrun bash -c \"python pretrain_gpt.py ${ARGS[*]} --lr 3\"",
            "sh -c 'export A=1; python pretrain_gpt.py \"$@\"' _ --lr 3 --bf16",
            "eval \"torchrun pretrain_gpt.py --lr 3\"",
            "readonly L=3\n--lr $L",
            "declare -r L=3\n--lr $L",
            "declare -a ARGS=(--lr 3)\npretrain_gpt.py ${ARGS[@]}",
            "let L=1+2\n--lr $L",
            ": ${L:=3}\n--lr $L",
            "L=2\nunset L\n--lr ${L:-3}",
            "case $X in\n a) L=2;;\n *) L=3;;\nesac\n--lr $L",
            "A=4 B=2\n--lr $((A / B + 1))",
            "A=(1 3)\n--lr ${A[1]}",
            "A=1\n--lr ${A:+3}",
            "(cd /x; python pretrain_gpt.py --lr 3)",
            "run() { python pretrain_gpt.py --lr 3; }",
        ] {
            assert_eq!(lr(script), "3", "{script}");
        }
        // What is cut out of a variable is not known.
        for script in [
            "A=30\n--lr ${A%0}",
            "A=32\n--lr ${A/2/}",
            "A=23\n--lr ${A:1}",
            "--lr $((A * 2))",
        ] {
            assert!(lr(script).contains('$'), "{script}");
        }
        for again in ["eval ", "cat <<A\n"] {
            let nested = format!("{}--lr 3", again.repeat(100_000));
            parse(&nested);
        }
    }

    #[test]
    fn flags_of_other_programs_are_not_those_of_training() {
        let script = "python tools/preprocess_data.py --input a --workers 8 --output-prefix b\n\
                      torchrun --nproc-per-node 8 pretrain_gpt.py --lr 1 --bf16 --nothing-such\n";
        let read = parse(script);
        assert_eq!(read.get("lr"), Some(&words(&["1"])));
        assert_eq!(read.get("workers"), None);
        assert_eq!(read.get("nothing_such"), Some(&Value::On));
        // Nothing else is there to be read.
        assert_eq!(
            parse("train.py --workers 8").get("workers"),
            Some(&words(&["8"]))
        );
    }

    #[test]
    fn a_quote_that_nothing_closes_is_refused_with_its_line() {
        for (quote, rest) in [("'", ""), ("\"", ""), ("'", " # it is \"open\"\n")] {
            let script = format!("A='--bf16\n--swiglu'\n$A --lr {quote}1\n--num-layers 4{rest}");
            let error = super::parse("script.sh", &script).expect_err(quote);
            let said = error.to_string();
            let begins = "script.sh:3: found `a quote that nothing closes`";
            assert!(said.starts_with(begins), "{said}");
        }
    }

    #[test]
    fn variables_that_hold_themselves_twice_are_refused() {
        for (repeated, refused) in [
            ("A=\"$A $A\"\n", 21),
            ("A+=\" $A\"\n", 21),
            ("A=(\"${A[@]}\" \"${A[@]}\")\n", 19),
            ("B=\"$A$A$A\"\nA=\"$B$B\"\n", 17),
        ] {
            let script = format!("A=--bf16\n{}$A --lr 1\n", repeated.repeat(60));
            let error = super::parse("script.sh", &script).expect_err(repeated);
            let said = error.to_string();
            let begins =
                format!("script.sh:{refused}: found `variables that stand for over 8 MiB`");
            assert!(said.starts_with(&begins), "{said}");
        }
        // A thousand lines that each add a word are a script as others.
        let added = format!("A=--bf16\n{}$A\n", "A+=\" --lr 1\"\n".repeat(1000));
        assert_eq!(parse(&added).get("lr"), Some(&words(&["1"])));
        assert_eq!(parse("--lr 1\\").get("lr"), Some(&words(&["1"])));
        // An array holds no arrays.
        let nested = parse(&format!("{}\n--lr 1\n", "A=(".repeat(100_000)));
        assert_eq!(nested.get("lr"), Some(&words(&["1"])));
        let deep = format!(
            "A={}1{}\n--lr $A\n",
            "${B:-".repeat(20_000),
            "}".repeat(20_000)
        );
        assert!(parse(&deep).get("lr").is_some());
        let some = "A=${B:-${C:-${D:-1e-4}}}\n--lr $A\n";
        assert_eq!(parse(some).get("lr"), Some(&words(&["1e-4"])));
    }

    #[test]
    fn bare_flags_and_arrays_without_a_command_are_settings() {
        let read = parse("--num-layers 4 \\\n  --bf16 --lr -1\n");
        assert_eq!(read.get("num_layers"), Some(&words(&["4"])));
        assert_eq!(read.get("lr"), Some(&words(&["-1"])));
        assert!(read.is_on("bf16"));
        let read = parse("export A=1\nARGS=(\n  # why\n  --num-layers 4\n  --load \"$X\"\n)\n");
        assert_eq!(read.get("num_layers"), Some(&words(&["4"])));
        assert_eq!(read.get("load"), Some(&words(&["$X"])));
        assert_eq!(read.variable("A"), Some("1"));
    }

    #[test]
    fn law_words_are_read_as_they_are_written() {
        for word in [
            "1e-5",
            "a b",
            "it's",
            "([0]*3+[1]*58)",
            "Et*3|(tt|)*29mL",
            "-1",
            "${OUT}/t",
            "x;y",
            "a#b",
            "\\",
        ] {
            let read = parse(&format!("--a {} --b", written(word)));
            assert_eq!(read.get("a"), Some(&words(&[word])), "{word}");
            assert!(read.is_on("b"), "{word}");
        }
    }
}
