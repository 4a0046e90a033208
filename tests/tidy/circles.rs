//! Circles of imports: modules each of which leads to every other.

use std::collections::{BTreeMap, BTreeSet};

/// Which module imports which others, by name.
pub(crate) type Graph = BTreeMap<String, BTreeSet<String>>;

/// A circle that is left, of this many modules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left {
    /// The member.
    pub(crate) member: &'static str,
    /// One module of it.
    pub(crate) module: &'static str,
    pub(crate) size: usize,
    /// What holds it together.
    pub(crate) why: &'static str,
}

/// The circles of a graph, the greatest first.
pub(crate) fn circles(graph: &Graph) -> Vec<BTreeSet<&str>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> = graph
        .keys()
        .map(|from| (from.as_str(), reached(graph, from)))
        .collect();
    let mut found = BTreeSet::new();
    for (from, to) in &reach {
        let back = to.iter().copied().filter(|to| reach[to].contains(from));
        found.insert(back.collect::<BTreeSet<&str>>());
    }
    let mut found: Vec<_> = found
        .into_iter()
        .filter(|circle| circle.len() > 1)
        .collect();
    found.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    found
}

/// The modules that a module leads to.
fn reached<'a>(graph: &'a Graph, from: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&str> = graph[from].iter().map(String::as_str).collect();
    while let Some(to) = next.pop() {
        if found.insert(to) {
            next.extend(graph[to].iter().map(String::as_str));
        }
    }
    found
}

/// The circles of a member in words: modules, and sizes of circles.
pub(crate) fn sizes(member: &str, graph: &Graph) -> String {
    let sizes: Vec<usize> = circles(graph).iter().map(BTreeSet::len).collect();
    format!("{member}: {} modules, circles of {sizes:?}", graph.len())
}

/// Whether a circle is a module and one part of it: a file that was cut in two.
fn is_pair(circle: &BTreeSet<&str>) -> bool {
    let mut modules = circle.iter();
    match (modules.next(), modules.next(), modules.next()) {
        // A module is in order before its parts.
        (Some(one), Some(two), None) => two.rsplit_once("::").is_some_and(|(of, _)| of == *one),
        _ => false,
    }
}

/// Where the circles of a member are others than those that are `left`, which may only shrink. A module
/// and one part of it are passed over.
pub(crate) fn offences(member: &str, graph: &Graph, left: &[Left]) -> Vec<String> {
    let mut rest: Vec<&Left> = left.iter().filter(|left| left.member == member).collect();
    let mut offences = Vec::new();
    for circle in circles(graph).into_iter().filter(|circle| !is_pair(circle)) {
        let modules = circle.iter().copied().collect::<Vec<_>>().join(", ");
        let (own, others) = rest
            .into_iter()
            .partition(|left| circle.contains(left.module));
        rest = others;
        let own: Vec<&Left> = own;
        let offence = match (own.as_slice(), circle.len()) {
            ([], size) => format!("a new circle of {size}"),
            ([left], size) if size == left.size => continue,
            ([left], size) if size < left.size => {
                format!(
                    "the circle of {} has shrunk: write {size} for it",
                    left.module
                )
            }
            ([left], size) => format!(
                "the circle of {} ({}) has grown from {} to {size}",
                left.module, left.why, left.size
            ),
            ([one, two, ..], size) => format!(
                "the circles of {} and {} have become one of {size}",
                one.module, two.module
            ),
        };
        offences.push(format!("{member}: {offence}: {modules}"));
    }
    let open = rest.iter().map(|left| {
        let module = left.module;
        format!("{member}: the circle of {module} is open: take its line out")
    });
    offences.extend(open);
    offences
}
