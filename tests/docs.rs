//! The documents, as tests. Commands shown do what is shown. Every key of a file or an answer is in its
//! table, and every key in a table is one of the program. Pages are listed, and no link is dead.
//!
//! A fence `console` holds commands after `$ ` and what they print. `...` stands for any lines, and in a
//! line for any text. Its commands run in a folder of the page, in order, with `book.txt` in it.
//! `console,norun` holds commands that take long or need another machine: only their flags are looked at.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Maps whose keys are names of things, told in words where the map is.
const MAPS: [&str; 4] = ["refused", "busy_s", "host_reads", "calls"];

/// Pages for people who read the repository, beside the book.
const PAGES: [&str; 4] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file with an extension below a folder, sorted.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("the folder is readable") {
        let path = entry.expect("the entry is readable").path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The pages of the book, and those beside it.
fn pages() -> Vec<PathBuf> {
    let beside = PAGES.iter().map(|page| root().join(page));
    beside.chain(files(&root().join("docs"), "md")).collect()
}

fn text(page: &Path) -> String {
    fs::read_to_string(page).unwrap_or_else(|error| panic!("{}: {error}", page.display()))
}

/// Fails with every offence, so that one run shows all there is to mend.
fn refuse(rule: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{rule}\n{}", offences.join("\n"));
}

/// A command with what it is shown to print, if anything is shown.
#[derive(Debug)]
struct Shown {
    command: String,
    output: Vec<String>,
    runs: bool,
}

/// The commands in the fences of a page.
fn shown(page: &str) -> Vec<Shown> {
    let mut found: Vec<Shown> = Vec::new();
    let mut fence = None;
    for line in page.lines() {
        if let Some(word) = line.strip_prefix("```") {
            fence = fence.is_none().then_some(word);
            continue;
        }
        let Some(runs @ ("console" | "console,norun")) = fence else {
            continue;
        };
        match (line.strip_prefix("$ "), found.last_mut()) {
            (Some(command), _) => found.push(Shown {
                command: command.to_owned(),
                output: Vec::new(),
                runs: runs == "console",
            }),
            (None, Some(last)) if last.output.is_empty() && last.command.ends_with('\\') => {
                last.command.push('\n');
                last.command.push_str(line);
            }
            (None, Some(last)) => last.output.push(line.trim_end().to_owned()),
            (None, None) => panic!("a console fence begins with a command, not `{line}`"),
        }
    }
    found
}

/// Whether text is what a pattern says, in which `...` is any text.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once("...") {
        None => pattern == text,
        Some((before, rest)) => text.strip_prefix(before).is_some_and(|text| {
            let mut starts = (0..=text.len()).filter(|&at| text.is_char_boundary(at));
            starts.any(|at| matches(rest, &text[at..]))
        }),
    }
}

/// Whether lines are what is shown, in which a line `...` is any lines.
fn lines_match(shown: &[String], lines: &[&str]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((first, rest)) if first == "..." => {
            (0..=lines.len()).any(|at| lines_match(rest, &lines[at..]))
        }
        Some((first, rest)) => lines
            .split_first()
            .is_some_and(|(line, lines)| matches(first, line) && lines_match(rest, lines)),
    }
}

/// Runs a command of a page with the program under test, and gives what it prints.
fn run(folder: &Path, command: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_moefold"));
    let path = std::env::var("PATH").unwrap_or_default();
    let program = program.parent().expect("a program is in a folder");
    let ran = Command::new("sh")
        .args(["-euc", &format!("exec 2>&1\n{command}")])
        .env("PATH", format!("{}:{path}", program.display()))
        .current_dir(folder)
        .output()
        .expect("a shell runs");
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "$ {command}\n{said}");
    said
}

/// A folder with a text to train on.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let book = fs::read(root().join("src/quickstart/text.txt")).expect("the text");
    fs::write(folder.path().join("book.txt"), &book[..1 << 16]).expect("a part of it");
    folder
}

#[test]
fn commands_print_what_the_pages_show() {
    for page in pages() {
        let folder = folder();
        for shown in shown(&text(&page)).iter().filter(|shown| shown.runs) {
            let said = run(folder.path(), &shown.command);
            // How far a search is comes by the clock.
            let told = |line: &&str| {
                !line.starts_with("note: ") || shown.output.iter().any(|own| own == line)
            };
            let lines: Vec<&str> = said.lines().map(str::trim_end).filter(told).collect();
            assert!(
                shown.output.is_empty() || lines_match(&shown.output, &lines),
                "{}: $ {}\nshown:\n{}\nprinted:\n{said}",
                page.display(),
                shown.command,
                shown.output.join("\n")
            );
        }
    }
}

#[test]
fn the_picture_is_of_the_readme_example() {
    let readme = text(&root().join("README.md"));
    let picture = text(&root().join("docs/step-time.svg"));
    let shown = shown(&readme);
    let example = shown.iter().find(|shown| shown.runs).expect("an example");
    let answer = run(folder().path(), &format!("{} -q --json", example.command));
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    for plan in answer["plans"].as_array().expect("plans") {
        let step = plan["predicted"]["step_s"].as_f64().expect("seconds");
        assert!(picture.contains(&format!(">{step:.2} s<")), "{step} s");
    }
}

#[test]
fn law_flags_that_pages_show_exist() {
    let folder = folder();
    let mut offences = Vec::new();
    for page in pages() {
        for Shown { command, .. } in shown(&text(&page)) {
            let words: Vec<&str> = command.split_whitespace().collect();
            let Some(at) = words.iter().position(|&word| word == "moefold") else {
                continue;
            };
            let own = words[at + 1..].split(|&word| word == "|" || word == ">");
            let own = own.into_iter().next().expect("a split has a part");
            let verb = match own {
                ["data", verb, ..] => format!("data {verb}"),
                [verb, ..] => (*verb).to_owned(),
                [] => panic!("a verb follows the program"),
            };
            let help = run(folder.path(), &format!("moefold {verb} --help"));
            let known: BTreeSet<&str> = help.split([' ', '\n', ',', '=']).collect();
            let flags = own.iter().filter(|word| word.starts_with("--"));
            offences.extend(
                flags
                    .filter(|&flag| !known.contains(flag))
                    .map(|flag| format!("{}: moefold {verb} {flag}", page.display())),
            );
        }
    }
    refuse("a command shows a flag that it does not have:", &offences);
}

/// The words in backticks of a page.
fn ticked(page: &str) -> BTreeSet<&str> {
    page.lines()
        .filter(|line| !line.starts_with("```"))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .collect()
}

/// Every key in a document, those of [`MAPS`] left out.
fn keys<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                found.insert(key);
                if !MAPS.contains(&key.as_str()) {
                    keys(value, found);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| keys(value, found)),
        _ => {}
    }
}

/// Adds every key of a document that none of the pages names.
fn undocumented(what: &str, pages: &[&str], json: &str, offences: &mut Vec<String>) {
    let value: Value =
        serde_json::from_str(json).unwrap_or_else(|error| panic!("{what}: {error}: {json}"));
    let page = |name: &&str| text(&root().join("docs/formats").join(name));
    let pages: Vec<String> = pages.iter().map(page).collect();
    let known: BTreeSet<&str> = pages.iter().flat_map(|page| ticked(page)).collect();
    let mut found = BTreeSet::new();
    keys(&value, &mut found);
    assert!(!found.is_empty(), "{what} has keys");
    offences.extend(
        found
            .difference(&known)
            .map(|key| format!("{what}: `{key}`")),
    );
}

#[test]
fn law_every_key_is_in_the_formats() {
    const MODEL: &str = "model-and-cluster.md";
    let folder = folder();
    let run = |command: &str| run(folder.path(), command);
    let read = |path: &str| text(&folder.path().join(path));
    let mut offences = Vec::new();
    let mut check = |what: &str, pages: &[&str], json: &str| {
        undocumented(what, pages, json, &mut offences);
    };

    let plan = "moefold plan --model tiny-mixtral --cluster local --gpus 2 --seq-len 32 \
                --global-batch 4 --expert-capacity-factor 1";
    let answer = run(&format!("{plan} --layout tp=2,ep=2 --out plan.json --json"));
    check("plan --json", &["answer.md", "plan.md", MODEL], &answer);
    check("plan.json", &["plan.md", MODEL], &read("plan.json"));
    let wide = run(
        "moefold plan --model qwen3-30b-a3b --cluster dgx-h100 --gpus 16 --seq-len 4096 \
         --global-batch 16 --layout tp=1,cp=1,pp=1,ep=16,etp=1,mbs=1 \
         --why tp=1,cp=1,pp=1,ep=8,etp=1,mbs=1 --json",
    );
    assert!(
        wide.contains("more_s"),
        "it says what another takes more of"
    );
    assert!(wide.contains("inside_domain"), "experts leave their domain");
    check("plan --json", &["answer.md", "plan.md", MODEL], &wide);

    let execute = "moefold execute plan.json --text book.txt --device cpu --json";
    let ran = run(&format!("{execute} --steps 2 --save-every 2 --out one"));
    check("execute", &["answers.md", "run.md", "plan.md"], &ran);
    run(&format!("{execute} --steps 3 --resume one --out two"));
    check("env.json", &["run.md"], &read("two/env.json"));
    let trace_pages = ["run.md", "profile.md", "plan.md"];
    check("trace.json", &trace_pages[..2], &read("two/trace.json"));
    let run_pages = ["run.md", "plan.md"];
    check("summary.json", &run_pages, &read("two/summary.json"));
    for step in read("two/steps.jsonl").lines() {
        check("steps.jsonl", &["run.md"], step);
    }
    let dry = run("moefold execute plan.json --dry-run --rank 1 --out dry --json");
    check("execute --dry-run", &["answers.md", "plan.md"], &dry);
    let dry = read("dry/trace.json");
    assert!(dry.contains("memory_bytes"), "it counts memory");
    check("trace.json of --dry-run", &trace_pages, &dry);
    let index = read("one/checkpoints/step-2/checkpoint.json");
    check("checkpoint.json", &["checkpoint.md", MODEL], &index);

    let profile = "moefold profile --plan plan.json --ranks 1 --budget-s 0.1 --device cpu";
    let measured = run(&format!("{profile} --out profile --json"));
    check("profile", &["answers.md"], &measured);
    check(
        "profile.json",
        &["profile.md"],
        &read("profile/profile.json"),
    );

    let prepared = run("moefold data prepare book.txt --out book --json");
    check("data prepare", &["answers.md"], &prepared);
    let held = "--data book --valid-data book --eval-iters 1 --steps 1 --out held";
    run(&format!(
        "moefold execute plan.json {held} --device cpu --json"
    ));
    check("steps.jsonl", &["run.md"], &read("held/steps.jsonl"));
    check("summary.json", &run_pages, &read("held/summary.json"));
    let converted = run("moefold convert one --out weights --json");
    check("convert", &["answers.md"], &converted);
    let groups = run("moefold groups --gpus 8 --layout tp=2,ep=4 --json");
    check("groups", &["answers.md"], &groups);
    check("doctor", &["answers.md"], &run("moefold doctor --json"));
    for (verb, pages) in [
        ("models", ["answers.md", MODEL]),
        ("clusters", ["answers.md", MODEL]),
    ] {
        let list = run(&format!("moefold {verb} --json"));
        check(verb, &pages, &list);
        let rows: Vec<Value> = serde_json::from_str(&list).expect("a list");
        for name in rows.iter().map(|row| row["name"].as_str().expect("a name")) {
            let one = run(&format!("moefold {verb} {name} --json"));
            check(&format!("{verb} {name}"), &pages, &one);
        }
    }
    refuse("keys that docs/formats does not name:", &offences);
}

#[test]
fn law_every_key_of_answers_about_others_is_in_the_formats() {
    let folder = folder();
    let run = |command: &str| run(folder.path(), command);
    let read = |path: &str| text(&folder.path().join(path));
    let mut offences = Vec::new();
    let mut check = |what: &str, pages: &[&str], json: &str| {
        undocumented(what, pages, json, &mut offences);
    };

    check("validate", &["answers.md"], &run("moefold validate --json"));
    let own = "id,model,cluster,gpus,precision,seq_len,global_batch,tp,ep,mbs,step_ms\n\
               one,mixtral-8x7b,dgx-h100,64,bf16,4096,256,1,8,1,4000\n\
               two,mixtral-8x7b,dgx-h100,64,bf16,4096,256,3,8,1,4000\n";
    fs::write(folder.path().join("own.csv"), own).expect("written");
    let tuned = run("moefold validate own.csv --tuned --json");
    check("validate --tuned", &["answers.md", "plan.md"], &tuned);
    run(
        "moefold plan --model mixtral-8x7b --cluster dgx-h100 --gpus 64 --seq-len 4096 --global-batch 64 --out gpu.json",
    );
    let step = "--plan gpu.json --measured 1.5";
    let fitted = run(&format!(
        "moefold calibrate {step} {step} {step} --out fitted --json"
    ));
    check("calibrate", &["answers.md", "profile.md"], &fitted);
    let fitted = read("fitted/profile.json");
    check("profile.json of calibrate", &["profile.md"], &fitted);

    let exported = run("moefold export gpu.json --to megatron-yaml --json");
    check("export", &["answers.md"], &exported);
    let tiny = "--cluster dgx-h100 --gpus 8";
    run(&format!(
        "moefold plan --model tiny-mixtral {tiny} --seq-len 64 --global-batch 64 --layout tp=2,pp=1 --recompute full --out tiny.json"
    ));
    run("moefold export tiny.json --to megatron-lm --out tiny.sh");
    run("echo 'MORE=(--cuda-graph-warmup-steps 3 --nothing-such)' >> tiny.sh");
    let checked = run(&format!(
        "moefold check tiny.sh {tiny} --json 2>/dev/null || [ $? = 2 ]"
    ));
    check("check", &["answers.md", "plan.md"], &checked);
    refuse("keys that docs/formats does not name:", &offences);
}

#[test]
fn law_every_key_in_the_formats_is_one_of_the_program() {
    let mut sources = String::new();
    for member in ["src", "profiles", "planner", "executor"] {
        let here = files(&root().join(member), "rs");
        sources.extend(here.iter().map(|path| text(path)));
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let words: BTreeSet<&str> = sources.split(|c| !is_part(c)).collect();
    let mut offences = Vec::new();
    for page in files(&root().join("docs/formats"), "md") {
        let text = text(&page);
        for row in text.lines().filter_map(|line| line.strip_prefix("| `")) {
            let first = row.split('|').next().expect("a row has a cell");
            let first = format!("`{first}");
            for key in ticked(&first) {
                let name = key.trim_end_matches('/');
                // Serde makes dashes of some, and commands look for files by their names.
                let spelled = [name.to_owned(), name.replace('-', "_")];
                let file = name.contains('.');
                if !file && !spelled.iter().any(|name| words.contains(name.as_str())) {
                    offences.push(format!("{}: `{key}`", page.display()));
                }
            }
        }
    }
    refuse("keys that the program does not have:", &offences);
}

/// The targets of the links and pictures of a page, those of code left out.
fn links(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut code = false;
    for line in page.lines() {
        code ^= line.starts_with("```");
        if code {
            continue;
        }
        let targets = line.split("](").skip(1);
        found.extend(targets.filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())));
    }
    found
}

/// The anchors of a page: its headings, spelled as mdBook and code hosts do.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let words = line.trim_start_matches('#').trim().to_lowercase();
            let kept = words.chars().filter_map(|c| match c {
                ' ' => Some('-'),
                c if c.is_alphanumeric() || matches!(c, '-' | '_') => Some(c),
                _ => None,
            });
            kept.collect()
        })
        .collect()
}

#[test]
fn law_no_link_is_dead() {
    let book = root().join("docs");
    let mut offences = Vec::new();
    for page in pages() {
        let own = text(&page);
        for link in links(&own).iter().filter(|link| !link.contains("://")) {
            let mut dead = |why: &str| {
                offences.push(format!("{}: {link}: {why}", page.display()));
            };
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() {
                page.clone()
            } else {
                page.parent().expect("a page is in a folder").join(path)
            };
            let Ok(target) = target.canonicalize() else {
                dead("there is no such file");
                continue;
            };
            if page.starts_with(&book) && !target.starts_with(&book) {
                dead("leaves the book");
            }
            if !anchor.is_empty() && !anchors(&text(&target)).contains(anchor) {
                dead("the page has no such heading");
            }
        }
    }
    refuse("dead links:", &offences);
}

#[test]
fn law_the_summary_lists_every_page() {
    let book = root().join("docs");
    let summary = text(&book.join("SUMMARY.md"));
    let listed: Vec<PathBuf> = links(&summary).iter().map(|link| book.join(link)).collect();
    let mut once = listed.clone();
    once.sort();
    let mut there = files(&book, "md");
    there.retain(|page| !page.ends_with("SUMMARY.md"));
    assert_eq!(once, there);
}

#[test]
fn a_pattern_stands_for_any_text_and_any_lines() {
    assert!(matches("a ... b", "a 1 2 b") && !matches("a ... b", "a 1 c"));
    let shown = |lines: &[&str]| {
        lines
            .iter()
            .map(|&line| line.to_owned())
            .collect::<Vec<_>>()
    };
    assert!(lines_match(
        &shown(&["a", "...", "c"]),
        &["a", "b", "b", "c"]
    ));
    assert!(lines_match(&shown(&["a", "...", "c"]), &["a", "c"]));
    assert!(!lines_match(&shown(&["a", "c"]), &["a", "b", "c"]));
}
