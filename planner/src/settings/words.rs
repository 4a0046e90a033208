//! The words of a shell script, and words as one is written.

use super::branches::JOINS;

/// Scripts that may stand in one another.
pub(super) const MOST_NESTED: usize = 8;

/// A word of a command, with whether some of it was quoted: what is not is split where it holds blanks.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Word {
    pub(super) parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Part {
    /// Text as it is.
    Plain(String),
    /// Text in which variables count; whether it stands in double quotes.
    Open(String, bool),
    /// The beginning of an array.
    Array(Vec<Word>),
}

/// The word, where nothing in it is to be read.
pub(super) fn plain(word: &Word) -> Option<&str> {
    match word.parts.as_slice() {
        [Part::Open(text, false)] if !text.contains('$') => Some(text),
        _ => None,
    }
}

/// The variable of `NAME=VALUE` or `NAME+=VALUE`, whether it is added to, and the value.
pub(super) fn assignment(word: &Word) -> Option<(String, bool, Word)> {
    let Some(Part::Open(first, false)) = word.parts.first() else {
        return None;
    };
    let (name, value) = first.split_once('=')?;
    let (name, added) = match name.strip_suffix('+') {
        Some(name) => (name, true),
        None => (name, false),
    };
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || !name.chars().all(fits) || name.starts_with(|c: char| c.is_ascii_digit())
    {
        return None;
    }
    let mut parts = Vec::new();
    if !value.is_empty() {
        parts.push(Part::Open(value.to_owned(), false));
    }
    parts.extend_from_slice(&word.parts[1..]);
    Some((name.to_owned(), added, Word { parts }))
}

/// The words of a text, of which those of a command whose output stands there (`$(..)`) are one.
pub(super) fn split(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let (mut begins, mut at) = (None, 0);
    while let Some(found) = text[at..].chars().next() {
        if found.is_whitespace() {
            words.extend(begins.take().map(|begins| &text[begins..at]));
            at += found.len_utf8();
        } else {
            begins = begins.or(Some(at));
            at += output(&text[at..]).map_or(found.len_utf8(), str::len);
        }
    }
    words.extend(begins.map(|begins| &text[begins..]));
    words
}

/// The command at the beginning of a text whose output stands there: `$(..)`.
pub(super) fn output(text: &str) -> Option<&str> {
    let (_, rest) = enclosed(text.strip_prefix('$')?, ['(', ')'])?;
    Some(&text[..text.len() - rest.len()])
}

/// What stands in the two parentheses that follow a dollar, and the rest.
pub(super) fn counting(after: &str) -> Option<(&str, &str)> {
    let (inner, rest) = enclosed(after, ['(', ')'])?;
    let inner = inner.strip_prefix('(')?.strip_suffix(')')?;
    Some((inner, rest))
}

/// What stands between a mark at the beginning and the one that closes it, and the rest.
fn enclosed(text: &str, [open, close]: [char; 2]) -> Option<(&str, &str)> {
    let inner = text.strip_prefix(open)?;
    let mut depth = 1;
    for (at, found) in inner.char_indices() {
        if found == open {
            depth += 1;
        } else if found == close {
            depth -= 1;
        }
        if depth == 0 {
            return Some((&inner[..at], &inner[at + close.len_utf8()..]));
        }
    }
    None
}

/// What follows a dollar: `NAME` or what is in braces, and the rest.
pub(super) fn reference(after: &str) -> (Option<&str>, &str) {
    if after.starts_with('{') {
        let found = enclosed(after, ['{', '}']);
        return found.map_or((None, ""), |(inner, rest)| (Some(inner), rest));
    }
    let ends = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let end = after.find(ends).unwrap_or(after.len());
    if end == 0 {
        return (None, after);
    }
    (Some(&after[..end]), &after[end..])
}

/// Commands of a script inside of so many, word by word, each with its line, from 1, and the line of a quote that nothing closes.
pub(super) fn commands(text: &str, nested: usize) -> (Vec<(usize, Vec<Word>)>, Option<usize>) {
    let mut reader = Reader {
        rest: text.chars().collect(),
        at: 0,
        in_array: false,
        unclosed: None,
        marks: Vec::new(),
        joins: false,
    };
    let mut all = Vec::new();
    let mut line = 1;
    while reader.at < reader.rest.len() {
        let begins = reader.at;
        let command = reader.command();
        if !command.is_empty() {
            all.push((line, command));
        }
        // A backslash at the very end is read with what it would quote.
        let read = reader.rest[begins..].iter().take(reader.at - begins);
        line += read.filter(|&&found| found == '\n').count();
        let ends_line = reader.at.checked_sub(1).and_then(|at| reader.rest.get(at)) == Some(&'\n');
        let marks = if ends_line {
            std::mem::take(&mut reader.marks)
        } else {
            Vec::new()
        };
        for mark in marks {
            // What a program reads may be a script too; its quotes are its own.
            let body = reader.body(&mark);
            let inner = if nested < MOST_NESTED {
                commands(&body, nested + 1).0
            } else {
                Vec::new()
            };
            all.extend(
                inner
                    .into_iter()
                    .map(|(at, command)| (line + at - 1, command)),
            );
            line += 1 + body.matches('\n').count();
        }
    }
    let before = |at: usize| reader.rest[..at].iter().filter(|&&found| found == '\n');
    let unclosed = reader.unclosed.map(|at| 1 + before(at).count());
    (all, unclosed)
}

struct Reader {
    rest: Vec<char>,
    at: usize,
    /// Whether words of an array are read: none of them is an array.
    in_array: bool,
    /// Where a quote begins that nothing closes.
    unclosed: Option<usize>,
    /// What ends each text that follows the line (`<<EOF`).
    marks: Vec<String>,
    /// Whether `&&` or `||` stands before the next command.
    joins: bool,
}

impl Reader {
    fn peek(&self) -> Option<char> {
        self.rest.get(self.at).copied()
    }

    /// Words up to the end of a command.
    fn command(&mut self) -> Vec<Word> {
        let mut words = Vec::new();
        if std::mem::take(&mut self.joins) {
            let parts = vec![Part::Open(JOINS.to_owned(), false)];
            words.push(Word { parts });
        }
        while let Some(found) = self.peek() {
            match found {
                '\n' if self.marks.is_empty()
                    && matches!(&words[..], [word] if plain(word) == Some(JOINS)) =>
                {
                    self.at += 1;
                }
                // In a test they join its parts.
                '&' | '|' if is_in_test(&words) => self.at += 1,
                '&' | '|' if self.rest.get(self.at + 1) == Some(&found) => {
                    (self.at, self.joins) = (self.at + 2, true);
                    break;
                }
                '\n' | ';' | '&' | '|' => {
                    self.at += 1;
                    break;
                }
                '(' => self.at += 1,
                ')' => {
                    self.at += 1;
                    match words.first().and_then(plain) {
                        // Its first pattern.
                        Some("case") => break,
                        Some("fi" | "esac" | "done") => {}
                        // Another, or the name of a function.
                        _ if matches!(&words[..], [pattern] if assignment(pattern).is_none()) => {
                            words.clear();
                        }
                        _ => {}
                    }
                }
                '#' => self.skip_line(),
                _ if found.is_whitespace() => self.at += 1,
                '\\' if self.rest.get(self.at + 1) == Some(&'\n') => self.at += 2,
                _ => {
                    let word = self.word();
                    let before = words.last().and_then(mark);
                    // The mark stands behind `<<`, in the same word or in the next.
                    let own = match before.as_deref() {
                        Some("") => Some(text(&word)),
                        _ => mark(&word),
                    };
                    self.marks.extend(own.filter(|own| !own.is_empty()));
                    words.push(word);
                }
            }
        }
        words
    }

    /// The lines up to one that is a mark, which is left behind.
    fn body(&mut self, mark: &str) -> String {
        let mut body = String::new();
        while self.at < self.rest.len() {
            let rest = &self.rest[self.at..];
            let line: String = rest.iter().take_while(|&&found| found != '\n').collect();
            self.at = self.rest.len().min(self.at + line.chars().count() + 1);
            if line.trim() == mark {
                break;
            }
            body.extend([&line, "\n"]);
        }
        body
    }

    fn skip_line(&mut self) {
        while self.peek().is_some_and(|found| found != '\n') {
            self.at += 1;
        }
    }

    fn word(&mut self) -> Word {
        let mut word = Word::default();
        let mut open = String::new();
        while let Some(found) = self.peek() {
            match found {
                '\'' => {
                    close(&mut open, &mut word);
                    self.at += 1;
                    let text = self.until('\'');
                    word.parts.push(Part::Plain(text));
                }
                '"' => {
                    close(&mut open, &mut word);
                    self.at += 1;
                    let text = self.up_to('"');
                    word.parts.push(Part::Open(text, true));
                }
                '\\' => {
                    let next = self.rest.get(self.at + 1).copied();
                    self.at += 2;
                    match next {
                        Some('\n') | None => {}
                        Some(next) => {
                            close(&mut open, &mut word);
                            word.parts.push(Part::Plain(next.to_string()));
                        }
                    }
                }
                '$' if self.rest.get(self.at + 1) == Some(&'(') => {
                    let text = self.bracketed('(', ')');
                    open.push_str(&text);
                }
                '`' => open.push_str(&self.in_backticks()),
                '$' if self.rest.get(self.at + 1) == Some(&'\'') => {
                    close(&mut open, &mut word);
                    self.at += 2;
                    let text = self.up_to('\'');
                    word.parts.push(Part::Plain(text));
                }
                '$' if self.rest.get(self.at + 1) == Some(&'{') => {
                    let text = self.bracketed('{', '}');
                    open.push_str(&text);
                }
                '(' if !self.in_array && open.ends_with('=') && word.parts.is_empty() => {
                    self.at += 1;
                    let items = self.array();
                    close(&mut open, &mut word);
                    word.parts.push(Part::Array(items));
                    break;
                }
                '\n' | ';' | '&' | '|' | '(' | ')' => break,
                _ if found.is_whitespace() => break,
                _ => {
                    open.push(found);
                    self.at += 1;
                }
            }
        }
        close(&mut open, &mut word);
        word
    }

    /// The words of an array, to its parenthesis.
    fn array(&mut self) -> Vec<Word> {
        self.in_array = true;
        let mut words = Vec::new();
        while let Some(found) = self.peek() {
            match found {
                ')' => {
                    self.at += 1;
                    break;
                }
                '#' => self.skip_line(),
                '\\' if self.rest.get(self.at + 1) == Some(&'\n') => self.at += 2,
                _ if found.is_whitespace() || ";&|(".contains(found) => self.at += 1,
                _ => words.push(self.word()),
            }
        }
        self.in_array = false;
        words
    }

    /// The text up to a mark, which is left behind.
    fn until(&mut self, mark: char) -> String {
        let begins = self.at - 1;
        let mut text = String::new();
        while let Some(found) = self.peek() {
            self.at += 1;
            if found == mark {
                return text;
            }
            text.push(found);
        }
        self.unclosed = Some(begins);
        text
    }

    /// The text up to a quote, which is left behind, where a backslash takes a quote's meaning away.
    fn up_to(&mut self, quote: char) -> String {
        let begins = self.at - 1;
        let mut text = String::new();
        while let Some(found) = self.peek() {
            // In `$'..'` nothing is filled in.
            if quote == '"' && found == '$' && self.rest.get(self.at + 1) == Some(&'(') {
                text.push_str(&self.bracketed('(', ')'));
                continue;
            }
            if quote == '"' && found == '`' {
                text.push_str(&self.in_backticks());
                continue;
            }
            self.at += 1;
            match found {
                _ if found == quote => return text,
                '\\' => {
                    let next = self.peek();
                    self.at += 1;
                    match next {
                        Some('\n') | None => {}
                        Some(next) => text.push(next),
                    }
                }
                _ => text.push(found),
            }
        }
        self.unclosed = Some(begins);
        text
    }

    /// A command in backticks, as `$(..)`.
    fn in_backticks(&mut self) -> String {
        let begins = self.at;
        self.at += 1;
        let mut text = String::from("$(");
        while let Some(found) = self.peek() {
            self.at += 1;
            match found {
                '`' => return text + ")",
                '\\' if matches!(self.peek(), Some('`' | '\\')) => {
                    text.extend(self.peek());
                    self.at += 1;
                }
                _ => text.push(found),
            }
        }
        self.unclosed = Some(begins);
        text
    }

    /// `$(..)` or `${..}`, with all that is in it.
    fn bracketed(&mut self, open: char, close: char) -> String {
        let mut text = String::from("$");
        self.at += 1;
        let mut depth = 0;
        while let Some(found) = self.peek() {
            self.at += 1;
            text.push(found);
            if found == open {
                depth += 1;
            } else if found == close {
                depth -= 1;
            }
            if depth == 0 {
                break;
            }
        }
        text
    }
}

/// Whether words end inside of `[[ .. ]]`.
fn is_in_test(words: &[Word]) -> bool {
    let place = |mark| words.iter().rposition(|word| plain(word) == Some(mark));
    place("[[") > place("]]")
}

/// What ends the text that follows a line, where a word says that one does: `<<EOF`, `<<-'EOF'`; empty where the next word does.
fn mark(word: &Word) -> Option<String> {
    let Some(Part::Open(begins, false)) = word.parts.first() else {
        return None;
    };
    let text = begins.starts_with("<<").then(|| text(word))?;
    let mark = text
        .strip_prefix("<<")
        .filter(|mark| !mark.starts_with('<'))?;
    Some(mark.strip_prefix('-').unwrap_or(mark).to_owned())
}

/// A word as it stands, without its quotes.
pub(super) fn text(word: &Word) -> String {
    let parts = word.parts.iter().map(|part| match part {
        Part::Plain(text) | Part::Open(text, _) => text.as_str(),
        Part::Array(_) => "",
    });
    parts.collect()
}

fn close(open: &mut String, word: &mut Word) {
    if !open.is_empty() {
        word.parts.push(Part::Open(std::mem::take(open), false));
    }
}

/// A text in which variables that have no value stand for nothing, also where a shell refuses these (`set -u`).
pub(super) fn without_unset(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..=at]);
        let (reference, tail) = reference(&rest[at + 1..]);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        match reference.filter(|own| own.chars().all(is_name)) {
            Some(name) => out.extend(["{", name, ":-}"]),
            None => out.push_str(&rest[at + 1..rest.len() - tail.len()]),
        }
        rest = tail;
    }
    out.push_str(rest);
    out
}

/// A word as it is written, in quotes where a shell would read something else.
pub(super) fn written(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:+,=%@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    // In quotes it would be no home.
    if let Some(at_home) = word.strip_prefix("~/").filter(|path| !path.is_empty()) {
        return format!("~/{}", written(at_home));
    }
    // A variable is the shell's to fill in, and so is what a command prints, which may be several words.
    if output(word).is_some_and(|all| all.len() == word.len()) {
        return word.to_owned();
    }
    let mut beside = String::new();
    let mut at = 0;
    while let Some(found) = word[at..].chars().next() {
        let output = output(&word[at..]);
        if output.is_none() {
            beside.push(found);
        }
        at += output.map_or(found.len_utf8(), str::len);
    }
    let fills = beside.contains('$') || beside.len() < word.len();
    if fills && !beside.contains(['"', '`', '\\']) {
        return format!("\"{word}\"");
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}
