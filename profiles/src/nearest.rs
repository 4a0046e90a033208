//! The nearest known name to one that is not known, for error messages.

/// Characters of a text that are compared with names.
const LONGEST: usize = 256;

/// The known name that `found` most likely meant: the first of [`ranked`]; nothing where the list is
/// empty.
pub fn nearest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    ranked(found, known).into_iter().next()
}

/// What `found` is no word of, for the end of a message: itself, and which of the words it most likely meant. One of them is none of several.
pub fn instead<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match nearest(found, known).filter(|_| !found.trim().is_empty()) {
        Some(nearest) if nearest == found => format!("there is `{found}`, which stands alone"),
        Some(nearest) => format!("there is `{found}`, nearest to {nearest}"),
        None => format!("there is `{found}`"),
    }
}

/// Up to three known names, the one that `found` most likely meant first.
pub fn closest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names = ranked(found, known);
    names.truncate(3);
    names
}

/// The known names, the one that `found`, ignoring case, most likely meant first.
///
/// A name of which `found` is a part between dashes comes first. Few edits and a long common beginning both speak for a name: a slip is more
/// often in a unit or an ending (`nic_gbps`) than in the first letters. Ties go to the earlier name. Of what is longer than any name
/// its beginning counts.
pub fn ranked<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let found: String = found.to_lowercase().chars().take(LONGEST).collect();
    let mut names: Vec<&str> = known.into_iter().collect();
    names.sort_by_cached_key(|name| {
        let name = name.to_lowercase();
        let within = name.split('-').any(|part| part == found);
        let common = found.chars().zip(name.chars()).take_while(|(a, b)| a == b);
        (
            !within,
            2 * edits(&found, &name) as i64 - common.count() as i64,
        )
    });
    names
}

/// A name that is a slip of a known one: a letter in six of it is wrong at most.
pub fn slip<'a>(known: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest(known, names).filter(|name| 6 * edits(known, name) <= known.chars().count())
}

/// Levenshtein distance over characters (insert, delete, replace).
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_edits() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("abc", "abc"), 0);
    }

    #[test]
    fn golden_slips() {
        let names = ["hidden_sizes", "moe_intermedate_size", "heads"];
        assert_eq!(
            slip("moe_intermediate_size", names),
            Some("moe_intermedate_size")
        );
        assert_eq!(slip("hidden_size", names), Some("hidden_sizes"));
        assert_eq!(slip("head", names), None);
    }

    #[test]
    fn a_slip_finds_its_name() {
        let known = ["dgx-h100", "dgx-h200", "mi300x"];
        assert_eq!(nearest("DGX_H100", known), Some("dgx-h100"));
        assert_eq!(nearest("mi300", known), Some("mi300x"));
        assert_eq!(nearest("h100", ["h800", "dgx-h100"]), Some("dgx-h100"));
        assert_eq!(
            nearest("nic_gbps", ["num_gpus", "nic_gb_per_s"]),
            Some("nic_gb_per_s")
        );
        // Comparing all of it would take seconds.
        let long = format!("mi300{}", "y".repeat(10_000_000));
        assert_eq!(nearest(&long, known), Some("mi300x"));
        assert_eq!(nearest("x", []), None);
        assert_eq!(ranked("mi300", known), ["mi300x", "dgx-h100", "dgx-h200"]);
    }
}
