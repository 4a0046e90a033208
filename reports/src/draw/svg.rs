//! A [`Scene`] as SVG.
//!
//! Theme colours are written as attributes and as classes: a file on its own is drawn for a light
//! background, a page that inlines it overrides the classes. Numbers have at most two decimals, so
//! equal scenes are equal bytes.

use std::fmt::Write as _;

use super::color::Paint;
use super::font::Weight;
use super::scene::{Anchor, Form, Line, Mark, Rect, Scene, Shape, Text};

const FAMILY: &str = "Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif";

/// A file of its own: XML declaration, size, white background.
pub(crate) fn document(scene: &Scene) -> String {
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    open(&mut out, scene, true);
    body(&mut out, scene);
    out
}

/// An element for a page: it scales to the width it is given and shows the page's background.
pub(crate) fn inline(scene: &Scene) -> String {
    let mut out = String::new();
    open(&mut out, scene, false);
    body(&mut out, scene);
    out
}

fn open(out: &mut String, scene: &Scene, alone: bool) {
    let (width, height) = (number(scene.width), number(scene.height));
    write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" "
    )
    .expect("writing to a string does not fail");
    if alone {
        write!(out, "width=\"{width}\" height=\"{height}\" ")
            .expect("writing to a string does not fail");
    }
    writeln!(
        out,
        "role=\"img\" aria-label=\"{}\" font-family=\"{FAMILY}\">",
        escaped(&scene.title)
    )
    .expect("writing to a string does not fail");
    if alone {
        writeln!(
            out,
            "<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>"
        )
        .expect("writing to a string does not fail");
    }
}

fn body(out: &mut String, scene: &Scene) {
    for shape in &scene.shapes {
        match shape {
            Shape::Rect(rect) => self::rect(out, rect),
            Shape::Line(line) => self::line(out, line),
            Shape::Mark(mark) => self::mark(out, mark),
            Shape::Text(text) => self::text(out, text),
        }
    }
    out.push_str("</svg>\n");
}

fn rect(out: &mut String, rect: &Rect) {
    let head = format!(
        "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" {}",
        number(rect.x),
        number(rect.y),
        number(rect.width),
        number(rect.height),
        fill(rect.fill)
    );
    close(out, "rect", &head, rect.tip.as_deref());
}

fn line(out: &mut String, line: &Line) {
    let points: Vec<String> = line
        .points
        .iter()
        .map(|&(x, y)| format!("{},{}", number(x), number(y)))
        .collect();
    let dash = line.dash.map_or_else(String::new, |(dash, gap)| {
        format!(" stroke-dasharray=\"{} {}\"", number(dash), number(gap))
    });
    let class = line
        .stroke
        .class()
        .map_or_else(String::new, |class| format!(" class=\"{class}-line\""));
    writeln!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" \
         stroke-linejoin=\"round\"{dash}{class}/>",
        points.join(" "),
        hex(line.stroke),
        number(line.width),
    )
    .expect("writing to a string does not fail");
}

fn mark(out: &mut String, mark: &Mark) {
    let (tag, place) = match mark.form {
        Form::Disc | Form::Ring => (
            "circle",
            format!(
                "cx=\"{}\" cy=\"{}\" r=\"{}\"",
                number(mark.x),
                number(mark.y),
                number(mark.radius)
            ),
        ),
        Form::Diamond | Form::Star => (
            "polygon",
            format!(
                "points=\"{}\"",
                mark.corners()
                    .iter()
                    .map(|&(x, y)| format!("{},{}", number(x), number(y)))
                    .collect::<Vec<_>>()
                    .join(" ")
            ),
        ),
    };
    let style = if mark.form == Form::Ring {
        format!(
            "fill=\"{}\" class=\"paper\" stroke=\"{}\" stroke-width=\"2\"",
            hex(Paint::Paper),
            hex(mark.paint)
        )
    } else {
        fill(mark.paint)
    };
    close(
        out,
        tag,
        &format!("<{tag} {place} {style}"),
        mark.tip.as_deref(),
    );
}

fn text(out: &mut String, text: &Text) {
    let anchor = match text.anchor {
        Anchor::Start => "",
        Anchor::Middle => " text-anchor=\"middle\"",
        Anchor::End => " text-anchor=\"end\"",
    };
    let weight = match text.weight {
        Weight::Regular => "",
        Weight::Medium => " font-weight=\"500\"",
    };
    let (x, y) = (number(text.x), number(text.y));
    let turn = if text.upwards {
        format!(" transform=\"rotate(-90 {x} {y})\"")
    } else {
        String::new()
    };
    writeln!(
        out,
        "<text x=\"{x}\" y=\"{y}\" font-size=\"{}\"{weight}{anchor}{turn} {}>{}</text>",
        number(text.size),
        fill(text.paint),
        escaped(&text.words)
    )
    .expect("writing to a string does not fail");
}

fn close(out: &mut String, tag: &str, head: &str, tip: Option<&str>) {
    match tip {
        Some(tip) => writeln!(out, "{head}><title>{}</title></{tag}>", escaped(tip)),
        None => writeln!(out, "{head}/>"),
    }
    .expect("writing to a string does not fail");
}

fn fill(paint: Paint) -> String {
    match paint.class() {
        Some(class) => format!("fill=\"{}\" class=\"{class}\"", hex(paint)),
        None => format!("fill=\"{}\"", hex(paint)),
    }
}

fn hex(paint: Paint) -> String {
    let (r, g, b) = paint.rgb();
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// At most two decimals, no trailing zeros, no negative zero.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0" } else { text }.to_owned()
}

/// Text for an element or an attribute of XML or HTML.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML 1.0 has no way to write other control characters.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_document() {
        let mut scene = Scene::new(100.0, "a <b>");
        scene.height = 40.0;
        scene.rect(
            (1.0, 2.0),
            (3.456, 4.0),
            Paint::Rgb(0x12_34_56),
            Some("1 & 2".to_owned()),
        );
        scene.rect((1.0, 2.0), (0.0, 4.0), Paint::Ink, None);
        scene.dashed(vec![(0.0, 0.5), (10.0, 0.5)], Paint::Grid, 1.0, (4.0, 3.0));
        scene.mark((5.0, 5.0), 2.0, Form::Ring, Paint::Limit, None);
        scene
            .text((50.0, 20.0), "x", 12.0, Anchor::Middle)
            .medium()
            .paint(Paint::Muted);
        assert_eq!(
            document(&scene),
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
             <svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 100 40\" width=\"100\" \
             height=\"40\" role=\"img\" aria-label=\"a &lt;b&gt;\" font-family=\"Roboto, \
             'Helvetica Neue', Arial, 'Liberation Sans', sans-serif\">\n\
             <rect width=\"100\" height=\"40\" fill=\"#ffffff\"/>\n\
             <rect x=\"1\" y=\"2\" width=\"3.46\" height=\"4\" fill=\"#123456\">\
             <title>1 &amp; 2</title></rect>\n\
             <polyline points=\"0,0.5 10,0.5\" fill=\"none\" stroke=\"#e2e6ec\" \
             stroke-width=\"1\" stroke-linejoin=\"round\" stroke-dasharray=\"4 3\" \
             class=\"grid-line\"/>\n\
             <circle cx=\"5\" cy=\"5\" r=\"2\" fill=\"#ffffff\" class=\"paper\" \
             stroke=\"#b31d28\" stroke-width=\"2\"/>\n\
             <text x=\"50\" y=\"20\" font-size=\"12\" font-weight=\"500\" \
             text-anchor=\"middle\" fill=\"#5b6575\" class=\"muted\">x</text>\n\
             </svg>\n"
        );
    }

    #[test]
    fn names_cannot_break_out() {
        assert_eq!(
            escaped("</text><script>'\"&\u{1}"),
            "&lt;/text&gt;&lt;script&gt;&#39;&quot;&amp;\u{fffd}"
        );
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(number(-0.001), "0");
        assert_eq!(number(12.0), "12");
        assert_eq!(number(12.345), "12.35");
    }
}
