//! The page: one file that needs nothing else, with plots, tables, the figures as JSON, and where
//! they come from.

use std::fmt::Write as _;

use serde_json::json;

use crate::draw::font;
use crate::draw::svg::{self, escaped};
use crate::figures::Named;
use crate::format;
use crate::plots::Plot;
use crate::subject::{Comparison, Subject};
use crate::tables::{Align, Table};

const STYLE: &str = include_str!("../assets/report.css");
const SCRIPT: &str = include_str!("../assets/report.js");

/// The whole page.
pub(crate) fn page(
    comparison: &Comparison,
    findings: &[String],
    plots: &[Plot],
    tables: &[Named],
) -> String {
    let (title, asked) = heading(comparison);
    let mut out = String::with_capacity(1 << 19);
    push(
        &mut out,
        format_args!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title>\n<style>\n{}{}{STYLE}</style>\n</head>\n<body>\n<main>\n\
             <h1>{title}</h1>\n<p class=\"asked\">{asked}</p>\n",
            font_face(400, font::REGULAR_TTF),
            font_face(500, font::MEDIUM_TTF),
            title = escaped(&title),
            asked = escaped(&asked),
        ),
    );
    tiles(&mut out, comparison);
    out.push_str("<ul class=\"card findings\">\n");
    for finding in findings {
        push(
            &mut out,
            format_args!("<li>{}</li>\n", unbroken(&escaped(finding))),
        );
    }
    out.push_str("</ul>\n<h2>Plots</h2>\n");
    for plot in plots {
        push(
            &mut out,
            format_args!(
                "<figure id=\"{}\"><div class=\"scroll\">\n{}</div>\n<figcaption>{}</figcaption>\
                 </figure>\n",
                escaped(&plot.stem),
                svg::inline(&plot.scene),
                escaped(&plot.caption)
            ),
        );
    }
    out.push_str("<h2>Tables</h2>\n");
    for named in tables {
        push(
            &mut out,
            format_args!("<h3>{}</h3>\n", escaped(&named.title)),
        );
        table(&mut out, &named.shown);
    }
    provenance(&mut out, comparison);
    push(
        &mut out,
        format_args!(
            "<footer>Written by moefold {}. Predictions are of the planner's cost model; \
             measurements are of the runs named above.</footer>\n</main>\n\
             <script type=\"application/json\" id=\"data\">\n{}\n</script>\n\
             <script>\n{SCRIPT}</script>\n</body>\n</html>\n",
            env!("CARGO_PKG_VERSION"),
            data(comparison),
        ),
    );
    out
}

/// A text in which no line ends between a figure and what belongs to it: its next digits, its unit.
fn unbroken(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let belongs = |i: usize| {
        let after_digit = i > 0 && chars[i - 1].is_ascii_digit();
        let rest: String = chars[i + 1..].iter().take(4).collect();
        let before_unit = ["s ", "s,", "s.", "s:", "ms", "us", "GiB", "MiB"]
            .iter()
            .any(|unit| rest.starts_with(unit));
        after_digit && (rest.starts_with(|c: char| c.is_ascii_digit()) || before_unit)
    };
    let unbreak = |(i, &c): (usize, &char)| {
        if c == ' ' && belongs(i) { '\u{a0}' } else { c }
    };
    chars.iter().enumerate().map(unbreak).collect()
}

fn push(out: &mut String, text: std::fmt::Arguments) {
    out.write_fmt(text)
        .expect("writing to a string does not fail");
}

/// What was compared: the title, and what was asked.
fn heading(comparison: &Comparison) -> (String, String) {
    let distinct = |of: &dyn Fn(&Subject) -> Option<String>| {
        let mut names: Vec<String> = comparison.subjects.iter().filter_map(of).collect();
        names.sort();
        names.dedup();
        names
    };
    let models = distinct(&|s| s.setting.model.as_ref().map(|m| m.name.clone()));
    let clusters = distinct(&|s| {
        let cluster = s.setting.cluster.as_ref()?;
        let word = if cluster.gpu.is_cpu() {
            "CPU ranks"
        } else {
            "GPUs"
        };
        Some(format!("{} {word} ({})", s.ranks(), cluster.name))
    });
    let requests = distinct(&|s| {
        let batch = s.setting.request.as_ref()?.batch;
        Some(format!(
            "sequence {}, global batch {}",
            batch.seq_len, batch.global_batch
        ))
    });
    let mut title = if models.is_empty() {
        "Layouts compared".to_owned()
    } else {
        models.join(", ")
    };
    if !clusters.is_empty() {
        title = format!("{title} on {}", clusters.join(", "));
    }
    let runs = comparison.runs().count();
    let count = comparison.subjects.len();
    let mut asked = format!("{count} layout{}", if count == 1 { "" } else { "s" });
    match runs {
        0 => {
            asked.push_str(", predicted");
            let elsewhere = comparison.subjects.iter().filter(|s| s.logged.is_some());
            match elsewhere.count() {
                0 => {}
                1 if count == 1 => asked.push_str(", and its steps measured elsewhere"),
                some => write!(asked, ", and the steps of {some} measured elsewhere")
                    .expect("a string takes any text"),
            }
        }
        1 => asked.push_str(", one of them run and measured"),
        _ => asked = format!("{asked}, {runs} of them run and measured"),
    }
    if count == 1 && runs == 1 {
        "1 layout, run and measured".clone_into(&mut asked);
    }
    if !requests.is_empty() {
        asked = format!("{}. {asked}.", sentence(&requests.join("; ")));
    }
    (title, asked)
}

fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars).collect(),
        None => String::new(),
    }
}

/// The figures that are looked for first, of the leading layout.
fn tiles(out: &mut String, comparison: &Comparison) {
    let Some(best) = comparison
        .ranking()
        .first()
        .map(|&i| &comparison.subjects[i])
    else {
        return;
    };
    let predicted = &best.planned.predicted;
    let origin = |is_measured| {
        if is_measured { "measured" } else { "predicted" }
    };
    let of_peak = origin(best.measured_peak_gib().is_some());
    let origin = origin(best.measured_step_s().is_some());
    let mut tiles = vec![
        (
            format::seconds(best.step_s()),
            format!("step, {origin}: {}", best.name),
        ),
        (
            format::short_count(best.tokens_per_s_per_gpu()),
            format!("tokens/s/{}, {origin}", comparison.rank_word()),
        ),
        (format::percent(best.mfu()), format!("MFU, {origin}")),
        (
            format::gib(best.measured_peak_gib().unwrap_or(predicted.peak_gib)),
            format!("peak memory, {of_peak}"),
        ),
    ];
    if let Some(error) = best.step_error() {
        let label = "prediction against measured step";
        tiles.push((format::signed_percent(error), label.to_owned()));
    }
    out.push_str("<div class=\"tiles\">\n");
    for (figure, label) in tiles {
        push(
            out,
            format_args!(
                "<div class=\"tile\"><b>{}</b><span>{}</span></div>\n",
                escaped(&figure),
                escaped(&label)
            ),
        );
    }
    out.push_str("</div>\n");
}

fn table(out: &mut String, table: &Table) {
    let class = |align: Align| match align {
        Align::Left => "",
        Align::Right => " class=\"number\"",
    };
    out.push_str("<div class=\"card scroll\"><table class=\"sortable\">\n<thead><tr>");
    for (heading, align) in table.columns() {
        push(
            out,
            format_args!(
                "<th scope=\"col\"{}>{}</th>",
                class(*align),
                escaped(heading)
            ),
        );
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in table.rows() {
        out.push_str("<tr>");
        for (cell, (_, align)) in row.iter().zip(table.columns()) {
            push(
                out,
                format_args!("<td{}>{}</td>", class(*align), escaped(cell)),
            );
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n");
}

/// Where every figure comes from, by subject.
fn provenance(out: &mut String, comparison: &Comparison) {
    out.push_str("<h2>Where the figures come from</h2>\n");
    for subject in &comparison.subjects {
        push(
            out,
            format_args!(
                "<details class=\"card\"><summary>{}: {}</summary>\n<dl>\n",
                escaped(&subject.name),
                escaped(&subject.described())
            ),
        );
        for (term, text) in facts(subject) {
            push(
                out,
                format_args!("<dt>{}</dt><dd>{}</dd>\n", escaped(&term), escaped(&text)),
            );
        }
        out.push_str("</dl>\n</details>\n");
    }
}

fn facts(subject: &Subject) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut fact = |term: &str, text: String| facts.push((term.to_owned(), text));
    if let Some(model) = &subject.setting.model {
        fact(
            "model",
            format!("{} ({} layers)", model.name, model.layers.len()),
        );
    }
    if let Some(cluster) = &subject.setting.cluster {
        fact(
            "cluster",
            format!(
                "{}: {} with {} each, {} a node",
                cluster.name,
                cluster.gpu.name,
                format::gib(cluster.gpu.memory_gib),
                cluster.gpus_per_node
            ),
        );
    }
    let c = &subject.planned.predicted.confidence;
    fact(
        "predicted busy time rests on",
        format!(
            "measured costs {}, interpolated {}, extrapolated {}",
            format::percent(c.measured),
            format::percent(c.interpolated),
            format::percent(c.extrapolated)
        ),
    );
    for profile in &subject.profiles {
        fact("profile", format!("{}, {}", profile.name, profile.hash));
    }
    if let Some(measured) = &subject.measured {
        let summary = &measured.summary;
        fact(
            "run",
            format!(
                "{} steps, the first {} left out of the figures",
                summary.steps, summary.warmup_steps
            ),
        );
        for (key, value) in &measured.env {
            // A command is typed with spaces.
            let separator = if key == "command" { " " } else { ", " };
            fact(key, words(value, separator));
        }
    }
    facts
}

/// A value as a person reads it: lists and objects without their brackets.
fn words(value: &serde_json::Value, separator: &str) -> String {
    use serde_json::Value;
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let items = items.iter().map(|item| words(item, ", "));
            items.collect::<Vec<_>>().join(separator)
        }
        Value::Object(fields) => {
            let field = |(key, value): (&String, &Value)| format!("{key}: {}", words(value, ", "));
            fields.iter().map(field).collect::<Vec<_>>().join("; ")
        }
        other => other.to_string(),
    }
}

/// Plans and measurements for other programs; `<` is written so that no text ends the element.
fn data(comparison: &Comparison) -> String {
    let subjects: Vec<serde_json::Value> = comparison
        .subjects
        .iter()
        .map(|s| {
            json!({
                "name": s.name,
                "layout": s.described(),
                "model": s.setting.model.as_ref().map(|m| &m.name),
                "cluster": s.setting.cluster.as_ref().map(|c| &c.name),
                "request": s.setting.request,
                "plan": s.planned,
                "measured": s.measured.as_ref().map(|m| &m.summary),
                "losses": s.measured.as_ref().map(|m| {
                    m.steps.iter().map(|step| step.loss).collect::<Vec<_>>()
                }),
            })
        })
        .collect();
    json!({ "version": 1, "subjects": subjects })
        .to_string()
        .replace('<', "\\u003c")
}

fn font_face(weight: u32, ttf: &[u8]) -> String {
    format!(
        "@font-face {{ font-family: Roboto; font-weight: {weight}; \
         src: url(data:font/ttf;base64,{}); }}\n",
        base64(ttf)
    )
}

/// RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let mut three = [0_u8; 3];
        three[..chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes([0, three[0], three[1], three[2]]);
        for i in 0..4 {
            if i <= chunk.len() {
                let index = (bits >> (18 - 6 * i)) & 0x3f;
                out.push(char::from(ALPHABET[index as usize]));
            } else {
                out.push('=');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stay_with_their_units() {
        assert_eq!(
            unbroken("1 234 layouts in 3.5 s, 2 GiB of 4 sorts"),
            "1\u{a0}234 layouts in 3.5\u{a0}s, 2\u{a0}GiB of 4 sorts"
        );
    }

    #[test]
    fn golden_base64() {
        // RFC 4648, section 10.
        for (plain, encoded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }
}
