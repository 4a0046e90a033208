//! [`Modules`]: which module of a crate imports which.
//!
//! A module is a file. Items for tests alone are passed over, wherever they stand in it. What a name
//! leads to is where it is defined: through the `use` of another module, and through a `pub use`,
//! which by itself imports nothing. Names that an import of everything brings in are not followed.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Arm, Attribute, Field, Ident, ImplItem, Item, ItemUse, Macro, Meta, UseTree, Variant,
    VisRestricted, Visibility,
};

use crate::circles::Graph;
use crate::tree::{Member, Tree};

/// Names from a crate to an item; the first is `crate` for the crate that is read.
type Path = Vec<String>;

/// The modules of one crate.
#[derive(Debug)]
pub(crate) struct Modules {
    of: BTreeMap<Path, Module>,
}

/// What one file says.
#[derive(Debug, Default)]
struct Module {
    uses: Vec<Use>,
    /// Paths in its code, from `crate` or from another crate.
    mentions: Vec<Path>,
    /// First names of all paths, and names in macros.
    heads: BTreeSet<String>,
    /// Modules that it declares for tests alone.
    tests: Vec<Path>,
}

/// One name of a `use`.
#[derive(Debug)]
struct Use {
    name: String,
    path: Path,
    is_public: bool,
}

impl Modules {
    /// Reads the sources of a member.
    pub(crate) fn of(tree: &Tree, member: &Member) -> Self {
        let src = format!("{}src/", member.folder);
        let files: BTreeMap<Path, (&str, &str)> = tree
            .sources(member)
            .map(|(path, text)| (module_of(&path[src.len()..]), (path, text)))
            .collect();
        let known: BTreeSet<Path> = files.keys().cloned().collect();
        let mut of = BTreeMap::new();
        for (at, (path, text)) in files {
            let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{path}: {error}"));
            let mut reader = Reader {
                known: &known,
                at: at.clone(),
                found: Module::default(),
            };
            reader.visit_file(&parsed);
            of.insert(at, reader.found);
        }
        let tests: Vec<Path> = of
            .values()
            .flat_map(|module| module.tests.clone())
            .collect();
        of.retain(|at, _| !tests.iter().any(|test| at.starts_with(test)));
        Self { of }
    }

    /// Which module imports which others.
    pub(crate) fn imports(&self) -> Graph {
        let mut graph = Graph::new();
        for (at, module) in &self.of {
            let used = module.uses.iter().filter(|used| {
                // What is passed on is imported where it is needed here as well.
                !used.is_public || module.heads.contains(&used.name)
            });
            let paths = used.map(|used| &used.path).chain(&module.mentions);
            let leads = paths.filter_map(|path| self.home(path));
            let others = leads.filter(|to| to != at).map(|to| named(&to)).collect();
            graph.insert(named(at), others);
        }
        graph
    }

    /// The modules of another crate that this one names, each with one that names it.
    pub(crate) fn foreign(&self, name: &str) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        for (at, module) in &self.of {
            let paths = module.uses.iter().map(|used| &used.path);
            for path in paths.chain(&module.mentions) {
                if path[0] == name {
                    let named_there = path.get(1).map_or("", String::as_str);
                    found.insert(named_there.to_owned(), named(at));
                }
            }
        }
        found
    }

    /// The module of this crate that defines what a path leads to.
    fn home(&self, path: &[String]) -> Option<Path> {
        let mut path = path.to_vec();
        // More names than a chain of `use`s has; two may only lead to each other.
        for _ in 0..32 {
            if path[0] != "crate" {
                return None;
            }
            let len = (1..=path.len())
                .rev()
                .find(|&len| self.of.contains_key(&path[..len]))?;
            let module = &self.of[&path[..len]];
            let next = path.get(len).and_then(|name| {
                let mut uses = module.uses.iter();
                uses.find(|used| used.name == *name && used.path != path)
            });
            match next {
                None => return Some(path[..len].to_vec()),
                Some(used) => path = [&used.path, &path[len + 1..]].concat(),
            }
        }
        None
    }
}

/// Reads one file.
struct Reader<'a> {
    known: &'a BTreeSet<Path>,
    /// The module, those inside the file among them.
    at: Path,
    found: Module,
}

impl Reader<'_> {
    /// A path as written here, from its crate; none where its first name says nothing of that.
    fn absolute(&self, path: &[String]) -> Option<Path> {
        let child = || [&self.at[..], &path[..1]].concat();
        let supers = path.iter().take_while(|name| *name == "super").count();
        match path[0].as_str() {
            "crate" => Some(path.to_vec()),
            "self" => Some([&self.at, &path[1..]].concat()),
            "super" => {
                let above = self.at.len().checked_sub(supers)?;
                Some([&self.at[..above], &path[supers..]].concat())
            }
            name if name.starts_with("moefold_") => Some(path.to_vec()),
            _ if self.known.contains(&child()) => Some([&self.at, path].concat()),
            _ => None,
        }
    }

    fn mention(&mut self, path: &[String]) {
        self.found.heads.insert(path[0].clone());
        if path.len() > 1 {
            self.found.mentions.extend(self.absolute(path));
        }
    }

    /// Mentions the paths in what a macro is given.
    fn scan(&mut self, tokens: TokenStream) {
        let mut path = Path::new();
        let mut colons = 0;
        for token in tokens {
            if let TokenTree::Punct(punct) = &token
                && punct.as_char() == ':'
            {
                colons += 1;
                continue;
            }
            let goes_on = colons == 2 && matches!(token, TokenTree::Ident(_));
            if !goes_on && !path.is_empty() {
                self.mention(&std::mem::take(&mut path));
            }
            match token {
                TokenTree::Ident(name) => path.push(name.to_string()),
                TokenTree::Group(group) => self.scan(group.stream()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => (),
            }
            colons = 0;
        }
        if !path.is_empty() {
            self.mention(&path);
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Mod(module) if is_of_tests(&module.attrs) => {
                let name = module.ident.to_string();
                self.found.tests.push([&self.at[..], &[name]].concat());
            }
            item if is_of_tests(attributes(item)) => (),
            Item::Mod(module) => {
                self.at.push(module.ident.to_string());
                visit::visit_item_mod(self, module);
                self.at.pop();
            }
            item => visit::visit_item(self, item),
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let is_public = !matches!(item.vis, Visibility::Inherited);
        for (name, path) in names(&item.tree, &[]) {
            if let Some(path) = self.absolute(&path) {
                self.found.uses.push(Use {
                    name,
                    path,
                    is_public,
                });
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path.segments.iter().map(|name| name.ident.to_string());
        self.mention(&names.collect::<Path>());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        self.scan(called.tokens.clone());
    }

    // Who may see an item is no import.
    fn visit_vis_restricted(&mut self, _: &'ast VisRestricted) {}

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Fn(item) => &item.attrs[..],
            ImplItem::Const(item) => &item.attrs,
            _ => &[],
        };
        if !is_of_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_arm(&mut self, arm: &'ast Arm) {
        if !is_of_tests(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_field(&mut self, field: &'ast Field) {
        if !is_of_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast Variant) {
        if !is_of_tests(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }
}

/// The names that a `use` brings in, with their paths as written; an import of everything brings in `*`.
fn names(tree: &UseTree, before: &[String]) -> Vec<(String, Path)> {
    let then = |name: &Ident| match name.to_string() {
        name if name == "self" && !before.is_empty() => before.to_vec(),
        name => [before, &[name]].concat(),
    };
    let last = |path: &Path| path.last().cloned().unwrap_or_default();
    match tree {
        UseTree::Path(path) => names(&path.tree, &[before, &[path.ident.to_string()]].concat()),
        UseTree::Group(group) => {
            let items = group.items.iter();
            items.flat_map(|item| names(item, before)).collect()
        }
        UseTree::Name(name) => vec![(last(&then(&name.ident)), then(&name.ident))],
        UseTree::Rename(to) => vec![(to.rename.to_string(), then(&to.ident))],
        UseTree::Glob(_) => vec![("*".to_owned(), before.to_vec())],
    }
}

/// Whether an item is there for tests alone.
fn is_of_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let condition = match &attribute.meta {
            Meta::List(list) if list.path.is_ident("cfg") => list.tokens.to_string(),
            _ => return false,
        };
        let words: String = condition.split_whitespace().collect();
        words == "test" || words.starts_with("all(test,")
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The module of a file below `src/`: `a/b.rs` is `crate::a::b`.
fn module_of(file: &str) -> Path {
    let stem = file.strip_suffix(".rs").unwrap_or(file);
    let stem = stem.strip_suffix("/mod").unwrap_or(stem);
    let names = stem.split('/').filter(|_| !matches!(stem, "lib" | "main"));
    std::iter::once("crate")
        .chain(names)
        .map(str::to_owned)
        .collect()
}

/// A module in words; the crate itself is `crate`.
fn named(at: &[String]) -> String {
    at[usize::from(at.len() > 1)..].join("::")
}
