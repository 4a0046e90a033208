//! The rules that read lines, manifests and lists: each gives every offence, so that one run shows all
//! there is to mend.

use std::collections::BTreeSet;

use crate::circles::Graph;
use crate::modules::Modules;
use crate::tree::{Member, Tree};

/// A crate and the crates that it may depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Crate {
    pub(crate) name: &'static str,
    pub(crate) knows: &'static [&'static str],
    /// Besides, in its tests alone.
    pub(crate) tests_know: &'static [&'static str],
}

/// A module and the modules of its crate that it may import.
pub(crate) type Floor = (&'static str, &'static [&'static str]);

/// An import that is left, and why.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Excused {
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
    pub(crate) why: &'static str,
}

/// Dependencies on crates of the workspace that `crates` does not list.
pub(crate) fn crate_edges(tree: &Tree, crates: &[Crate]) -> Vec<String> {
    let mut offences = Vec::new();
    for member in tree.members() {
        let Some(of) = crates.iter().find(|of| of.name == member.name) else {
            offences.push(format!(
                "{}: no line says what it may depend on",
                member.name
            ));
            continue;
        };
        for table in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let for_tests = table == "dev-dependencies";
            for name in dependencies(&member, table) {
                let Some(known) = name.strip_prefix("moefold-") else {
                    continue;
                };
                let in_tests = for_tests && of.tests_know.contains(&known);
                if !in_tests && !of.knows.contains(&known) {
                    offences.push(format!("{}Cargo.toml: {table} has {name}", member.folder));
                }
            }
        }
    }
    offences
}

/// Dependencies on `libraries` outside the crate that is their `home`.
pub(crate) fn libraries_at_home(tree: &Tree, libraries: &[&str], home: &str) -> Vec<String> {
    let mut offences = Vec::new();
    for member in tree.members() {
        let names = dependencies(&member, "dependencies");
        let strays = names
            .iter()
            .filter(|name| libraries.contains(&name.as_str()));
        if member.name != home {
            offences.extend(strays.map(|name| format!("{}Cargo.toml: {name}", member.folder)));
        }
    }
    offences
}

fn dependencies(member: &Member, table: &str) -> Vec<String> {
    let found = member.manifest.get(table).and_then(toml::Value::as_table);
    found.map_or(Vec::new(), |found| found.keys().cloned().collect())
}

/// Modules of another crate that a member names and that are not `allowed`; `excused` are of this member.
pub(crate) fn foreign_modules(
    tree: &Tree,
    member: &str,
    of: &str,
    allowed: &[&str],
    excused: &[Excused],
) -> Vec<String> {
    let members = tree.members();
    let Some(member) = members.iter().find(|found| found.name == member) else {
        return Vec::new();
    };
    let found = Modules::of(tree, member).foreign(of);
    let excused: Vec<&Excused> = excused
        .iter()
        .filter(|excused| excused.from == member.name)
        .collect();
    let strays = found.iter().filter(|(module, _)| {
        let is_excused = excused.iter().any(|excused| excused.to == **module);
        !allowed.contains(&module.as_str()) && !is_excused
    });
    let strays = strays.map(|(module, by)| format!("{}: {by} names {of}::{module}", member.name));
    let stale = excused
        .iter()
        .filter(|excused| !found.contains_key(excused.to));
    let stale = stale.map(|Excused { to, why, .. }| {
        format!(
            "{}: no longer names {of}::{to} ({why}): take its line out",
            member.name
        )
    });
    strays.chain(stale).collect()
}

/// Imports between the modules at the top of a crate that `floors` does not list.
pub(crate) fn module_edges(graph: &Graph, floors: &[Floor]) -> Vec<String> {
    let mut offences = BTreeSet::new();
    for (from, to) in graph.iter().filter(|(from, _)| *from != "crate") {
        let of = top(from);
        let Some((_, allowed)) = floors.iter().find(|(name, _)| *name == of) else {
            offences.insert(format!("{of}: no line says what it may import"));
            continue;
        };
        let strays = to
            .iter()
            .filter(|to| top(to) != of && !allowed.contains(&top(to)));
        offences.extend(strays.map(|to| format!("{from} imports {to}")));
    }
    offences.into_iter().collect()
}

/// The module at the top of its crate that a module is in.
fn top(module: &str) -> &str {
    module.split_once("::").map_or(module, |(top, _)| top)
}

/// Rows of `floors` that list a module which has its row not above theirs, and rows of `data` that list
/// what is none.
pub(crate) fn floors_in_order(floors: &[Floor], data: &[&str], excused: &[Excused]) -> Vec<String> {
    let mut offences = Vec::new();
    for (number, (name, below)) in floors.iter().enumerate() {
        for module in *below {
            let is_below = floors[..number].iter().any(|(name, _)| name == module);
            let mut excused = excused.iter();
            let is_excused = excused.any(|one| one.from == *name && one.to == *module);
            if !is_below {
                offences.push(format!("{name} may import {module}, which is not below it"));
            } else if data.contains(name) && !data.contains(module) && !is_excused {
                offences.push(format!(
                    "{name} is data and may import {module}, which is not"
                ));
            }
        }
    }
    offences
}

/// Lines of a member, comments aside, that hold one of `words`.
pub(crate) fn lines_with(tree: &Tree, member: &str, words: &[&str]) -> Vec<String> {
    let code = |line: &str| !line.trim_start().starts_with("//");
    lines(tree, &|of| of == member, &|line| {
        code(line) && words.iter().any(|word| line.contains(word))
    })
}

/// Calls of `cudarc`, whose functions panic where a library, or a function of one, is missing.
pub(crate) fn calls_of_cudarc(tree: &Tree) -> Vec<String> {
    const CALLS: [&str; 3] = ["::result", "::safe", "culib"];
    let of = |member: &str| matches!(member, "kernels" | "emulator");
    lines(tree, &of, &|line| {
        line.contains("cudarc::") && CALLS.iter().any(|call| line.contains(call))
    })
}

/// Lines that lift the ban on unsafe code outside the crates where it lives.
pub(crate) fn unsafe_outside(tree: &Tree, homes: &[&str]) -> Vec<String> {
    lines(tree, &|of| !homes.contains(&of), &|line| {
        line.contains("(unsafe_code")
    })
}

/// Marks of unfinished work, and lints that are switched off without a reason.
pub(crate) fn half_done(tree: &Tree) -> Vec<String> {
    let marks = [
        concat!("FIX", "ME"),
        concat!("TO", "DO"),
        "dbg!(",
        "#[allow(",
        "#![allow(",
    ];
    lines(tree, &|_| true, &|line| {
        marks.iter().any(|mark| line.contains(mark))
    })
}

/// Modules that do not begin by saying what they are.
pub(crate) fn without_doc(tree: &Tree) -> Vec<String> {
    let members = tree.members();
    let all = members.iter().flat_map(|member| tree.sources(member));
    let mute = all.filter(|(_, text)| !text.starts_with("//!"));
    mute.map(|(path, _)| path.to_owned()).collect()
}

/// Dependencies that `ARCHITECTURE.md` does not explain.
pub(crate) fn unexplained_dependencies(tree: &Tree) -> Vec<String> {
    let architecture = tree.text("ARCHITECTURE.md");
    let manifest = tree.toml("Cargo.toml");
    let all = manifest["workspace"]["dependencies"].as_table();
    all.expect("a table")
        .keys()
        .filter(|name| !name.starts_with("moefold-"))
        .filter(|name| !architecture.contains(&format!("`{name}`")))
        .map(|name| format!("`{name}` is not explained"))
        .collect()
}

/// Where lines of the members of these names are `wrong`.
fn lines(tree: &Tree, of: &dyn Fn(&str) -> bool, wrong: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut offences = Vec::new();
    for member in tree.members().iter().filter(|member| of(&member.name)) {
        for (path, text) in tree.sources(member) {
            let found = text.lines().enumerate().filter(|(_, line)| wrong(line));
            offences.extend(
                found.map(|(number, line)| format!("{path}:{}: {}", number + 1, line.trim())),
            );
        }
    }
    offences
}
