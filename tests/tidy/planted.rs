//! Trees that break the rules: each rule finds what is planted, and nothing in a sound tree.

use crate::circles::{self, Graph, Left};
use crate::laws::{self, Crate, Excused, Floor};
use crate::modules::Modules;
use crate::tree::Tree;

const ROOT: &str = r#"
    [workspace]
    members = ["low", "high"]
    [workspace.dependencies]
    moefold-low = { path = "low" }
    serde = "1"
    [package]
    name = "moefold"
    [dependencies]
    moefold-high.workspace = true
"#;

const LOW: &str = r#"
    [package]
    name = "moefold-low"
    [dependencies]
    gemm = "1"
"#;

const HIGH: &str = r#"
    [package]
    name = "moefold-high"
    [dependencies]
    moefold-low.workspace = true
"#;

const CRATES: &[Crate] = &[
    Crate {
        name: "low",
        knows: &[],
        tests_know: &["high"],
    },
    Crate {
        name: "high",
        knows: &["low"],
        tests_know: &[],
    },
    Crate {
        name: "moefold",
        knows: &["low", "high"],
        tests_know: &[],
    },
];

/// A workspace that breaks no rule.
fn sound() -> Tree {
    Tree::of(&[
        ("Cargo.toml", ROOT),
        ("low/Cargo.toml", LOW),
        ("high/Cargo.toml", HIGH),
        ("ARCHITECTURE.md", "`serde` is explained"),
        ("src/main.rs", "//! The command line.\nfn main() {}\n"),
        ("low/src/lib.rs", "//! Low.\npub mod data;\n"),
        ("low/src/data.rs", "//! Data.\n"),
        ("high/src/lib.rs", "//! High.\npub mod first;\n"),
        ("high/src/first.rs", "//! First.\nuse moefold_low::data;\n"),
    ])
}

/// A tree whose member `high` has these modules.
fn high(modules: &[(&str, &str)]) -> Tree {
    modules.iter().fold(sound(), |tree, (path, text)| {
        tree.with(&format!("high/src/{path}"), text)
    })
}

/// Who imports whom in `high`.
fn imports(modules: &[(&str, &str)]) -> Graph {
    let tree = high(modules);
    let members = tree.members();
    let member = members.iter().find(|member| member.name == "high");
    Modules::of(&tree, member.expect("a member")).imports()
}

/// The imports of one module of `high`, which has `left`, `right` and `right::leaf` besides.
fn imports_of(text: &str) -> Vec<String> {
    let leaf = "pub struct Leaf; pub struct Other;";
    let graph = imports(&[
        ("first.rs", text),
        ("left.rs", "pub use crate::right::Leaf as Passed;"),
        (
            "right.rs",
            "mod leaf; pub use leaf::{Leaf, Other}; pub fn grow() {}",
        ),
        ("right/leaf.rs", leaf),
    ]);
    graph["first"].iter().cloned().collect()
}

#[test]
fn law_a_sound_tree_breaks_no_rule() {
    let tree = sound();
    let none: [String; 0] = [];
    assert_eq!(laws::crate_edges(&tree, CRATES), none);
    assert_eq!(laws::libraries_at_home(&tree, &["gemm"], "low"), none);
    let foreign = laws::foreign_modules(&tree, "high", "moefold_low", &["data"], &[]);
    assert_eq!(foreign, none);
    assert_eq!(laws::lines_with(&tree, "high", &["unsafe "]), none);
    assert_eq!(laws::calls_of_cudarc(&tree), none);
    assert_eq!(laws::unsafe_outside(&tree, &["low"]), none);
    assert_eq!(laws::half_done(&tree), none);
    assert_eq!(laws::without_doc(&tree), none);
    assert_eq!(laws::unexplained_dependencies(&tree), none);
    assert_eq!(circles::offences("high", &imports(&[]), &[]), none);
}

#[test]
fn a_crate_that_depends_upwards_is_found_and_its_tests_may() {
    let up = LOW.replace("gemm", "moefold-high");
    let found = laws::crate_edges(&sound().with("low/Cargo.toml", &up), CRATES);
    assert_eq!(found, ["low/Cargo.toml: dependencies has moefold-high"]);
    let in_tests = up.replace("[dependencies]", "[dev-dependencies]");
    let found = laws::crate_edges(&sound().with("low/Cargo.toml", &in_tests), CRATES);
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_crate_without_a_line_is_found() {
    let found = laws::crate_edges(&sound(), &CRATES[1..]);
    assert_eq!(found, ["low: no line says what it may depend on"]);
}

#[test]
fn a_library_away_from_home_is_found() {
    let found = laws::libraries_at_home(&sound(), &["gemm"], "high");
    assert_eq!(found, ["low/Cargo.toml: gemm"]);
}

#[test]
fn a_module_of_another_crate_is_found_however_it_is_named() {
    let found = |text| {
        let tree = high(&[("first.rs", text)]);
        laws::foreign_modules(&tree, "high", "moefold_low", &["data"], &[])
    };
    let offence = ["high: first names moefold_low::search"];
    for text in [
        "use moefold_low::search;",
        "use moefold_low::{data, search::{Search, self}};",
        "use moefold_low::search as other;",
        "#[cfg(test)] fn before() {} fn f() { moefold_low::search::run() }",
        "fn f() { println!(\"{}\", moefold_low::search::COUNT) }",
    ] {
        assert_eq!(found(text), offence, "{text}");
    }
    let whole = found("use moefold_low as low;");
    assert_eq!(whole, ["high: first names moefold_low::"]);
    let in_tests = found("#[cfg(test)] mod tests { use moefold_low::search; }");
    assert!(in_tests.is_empty(), "{in_tests:?}");
}

#[test]
fn an_excuse_that_is_not_needed_is_found() {
    let excused = [Excused {
        from: "high",
        to: "search",
        why: "it was so",
    }];
    let found = laws::foreign_modules(&sound(), "high", "moefold_low", &["data"], &excused);
    let stale = "high: no longer names moefold_low::search (it was so): take its line out";
    assert_eq!(found, [stale]);
}

#[test]
fn imports_are_seen_in_every_form() {
    for (text, expected) in [
        ("use crate::right::grow;", ["right"]),
        ("use crate::{left::nothing};", ["left"]),
        ("use super::right;", ["right"]),
        ("use super::{right::{grow, self}};", ["right"]),
        ("use crate::right::Leaf;", ["right::leaf"]),
        ("use crate::right::{Other as One};", ["right::leaf"]),
        ("use crate::left::Passed;", ["right::leaf"]),
        ("fn f() { crate::right::grow() }", ["right"]),
        (
            "fn f() -> Option<super::right::Leaf> { None }",
            ["right::leaf"],
        ),
        ("fn f() { assert!(crate::right::grow() == ()) }", ["right"]),
        ("mod inner { use super::super::right::grow; }", ["right"]),
        (
            "#[cfg(test)] fn before() {} use crate::right::grow;",
            ["right"],
        ),
        (
            "pub use crate::right::Leaf; fn f(_: Leaf) {}",
            ["right::leaf"],
        ),
        ("use crate::right::*;", ["right"]),
    ] {
        assert_eq!(imports_of(text), expected, "{text}");
    }
}

#[test]
fn what_is_passed_on_and_what_is_for_tests_is_no_import() {
    for text in [
        "pub use crate::right::Leaf;",
        "#[cfg(test)] use crate::right::grow;",
        "#[cfg(test)] mod tests { use crate::right::grow; }",
        "#[cfg(all(test, unix))] fn f() { crate::right::grow() }",
        "pub(in crate::right) fn f() {}",
        "//! See [`crate::right`].\n/// And crate::right::grow().\nfn f() {}",
        "fn f() { g(\"crate::right::grow\") }",
    ] {
        let found = imports_of(text);
        assert!(found.is_empty(), "{text}: {found:?}");
    }
}

#[test]
fn modules_for_tests_alone_are_not_read() {
    let graph = imports(&[
        ("first.rs", "#[cfg(test)] mod tests;"),
        ("first/tests.rs", "use crate::first;"),
    ]);
    assert!(!graph.contains_key("first::tests"), "{graph:?}");
}

const CIRCLE: &[(&str, &str)] = &[
    ("first.rs", "use crate::left::A;"),
    ("left.rs", "use crate::right::B;"),
    ("right.rs", "use super::first::C; mod leaf;"),
    ("right/leaf.rs", "use super::B;"),
];

/// What is said of [`CIRCLE`] where circles of these modules and sizes are left.
fn said(left: &[(&'static str, usize)]) -> Vec<String> {
    let row = |&(module, size): &(&'static str, usize)| Left {
        member: "high",
        module,
        size,
        why: "so it is",
    };
    let left: Vec<Left> = left.iter().map(row).collect();
    circles::offences("high", &imports(CIRCLE), &left)
}

#[test]
fn circles_are_found_and_held_to_their_sizes() {
    let names = "first, left, right";
    assert_eq!(said(&[("left", 3)]), [""; 0]);
    assert_eq!(said(&[]), [format!("high: a new circle of 3: {names}")]);
    let grown = "the circle of left (so it is) has grown from 2 to 3";
    assert_eq!(said(&[("left", 2)]), [format!("high: {grown}: {names}")]);
    let shrunk = "the circle of left has shrunk: write 3 for it";
    assert_eq!(said(&[("left", 4)]), [format!("high: {shrunk}: {names}")]);
    let merged = "the circles of first and left have become one of 3";
    let found = said(&[("first", 2), ("left", 2)]);
    assert_eq!(found, [format!("high: {merged}: {names}")]);
    let open = "high: the circle of right::leaf is open: take its line out";
    assert_eq!(said(&[("left", 3), ("right::leaf", 2)]), [open]);
    let sizes = circles::sizes("high", &imports(CIRCLE));
    assert_eq!(sizes, "high: 5 modules, circles of [3]");
}

#[test]
fn a_module_and_one_part_of_it_may_know_each_other() {
    let of = |part, whole| {
        let graph = imports(&[
            ("first.rs", whole),
            ("first/part.rs", part),
            ("second.rs", "use crate::first::part::A;"),
        ]);
        circles::offences("high", &graph, &[])
    };
    assert_eq!(
        of("use super::B;", "mod part; fn f() { part::f() }"),
        [""; 0]
    );
    let others = of("use crate::second::B;", "mod part;");
    assert_eq!(others, ["high: a new circle of 2: first::part, second"]);
    let three = of(
        "use crate::{first::B, second::C};",
        "mod part; use part::A;",
    );
    assert_eq!(
        three,
        ["high: a new circle of 3: first, first::part, second"]
    );
}

#[test]
fn an_import_that_no_row_lists_is_found() {
    let graph = imports(CIRCLE);
    let floors: &[Floor] = &[("right", &[]), ("left", &["right"]), ("first", &["left"])];
    let up = "right imports first";
    assert_eq!(laws::module_edges(&graph, floors), [up]);
    let unlisted = "first: no line says what it may import";
    assert_eq!(laws::module_edges(&graph, &floors[..2]), [unlisted, up]);
}

#[test]
fn a_table_out_of_order_is_found() {
    let floors: &[Floor] = &[("low", &["high"]), ("high", &[]), ("data", &["low"])];
    let upwards = "low may import high, which is not below it";
    let found = laws::floors_in_order(floors, &[], &[]);
    assert_eq!(found, [upwards]);
    let excused = [Excused {
        from: "data",
        to: "low",
        why: "so it is",
    }];
    let found = laws::floors_in_order(floors, &["data"], &[]);
    assert_eq!(
        found,
        [upwards, "data is data and may import low, which is not"]
    );
    assert_eq!(
        laws::floors_in_order(floors, &["data"], &excused),
        [upwards]
    );
}

#[test]
fn banned_words_are_found_past_the_tests_of_a_file() {
    let text = "//! First.\n#[cfg(test)]\nmod tests {}\n// unsafe word\nunsafe fn f() {}\n";
    let tree = high(&[("first.rs", text)]);
    let found = laws::lines_with(&tree, "high", &["unsafe "]);
    assert_eq!(found, ["high/src/first.rs:5: unsafe fn f() {}"]);
    assert!(laws::lines_with(&tree, "low", &["unsafe "]).is_empty());
}

#[test]
fn a_call_of_cudarc_is_found() {
    let manifest = HIGH.replace("moefold-high", "moefold-kernels");
    let text = "//! First.\nuse cudarc::driver::sys;\nuse cudarc::driver::result;\n";
    let tree = high(&[("first.rs", text)]).with("high/Cargo.toml", &manifest);
    let found = laws::calls_of_cudarc(&tree);
    assert_eq!(found, ["high/src/first.rs:3: use cudarc::driver::result;"]);
}

#[test]
fn a_lifted_ban_is_found() {
    let lifted = "//! First.\n#![expect(unsafe_code, reason = \"speed\")]\n";
    let tree = high(&[("first.rs", lifted)]);
    let offence = "high/src/first.rs:2: #![expect(unsafe_code, reason = \"speed\")]";
    assert_eq!(laws::unsafe_outside(&tree, &["low"]), [offence]);
    assert!(laws::unsafe_outside(&tree, &["high"]).is_empty());
}

#[test]
fn marks_of_unfinished_work_are_found() {
    for mark in [
        concat!("// FIX", "ME later"),
        concat!("// TO", "DO later"),
        concat!("dbg", "!(x);"),
        concat!("#[al", "low(dead_code)]"),
        concat!("#![al", "low(dead_code)]"),
    ] {
        let tree = high(&[("first.rs", mark)]);
        assert_eq!(
            laws::half_done(&tree),
            [format!("high/src/first.rs:1: {mark}")]
        );
    }
}

#[test]
fn a_module_without_a_doc_is_found() {
    let tree = high(&[("first.rs", "use std::fs;\n//! Late.\n")]);
    assert_eq!(laws::without_doc(&tree), ["high/src/first.rs"]);
}

#[test]
fn a_dependency_that_is_not_explained_is_found() {
    let tree = sound().with("ARCHITECTURE.md", "`serde_json` is explained");
    let found = laws::unexplained_dependencies(&tree);
    assert_eq!(found, ["`serde` is not explained"]);
}
