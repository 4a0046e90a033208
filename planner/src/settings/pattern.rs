//! Lists as Megatron-LM takes them on its command line: `([0]*3+[1]*58)`, a sum of repeated lists of Python.

/// No list is longer: more than the layers of any model.
const LONGEST: usize = 4096;

/// The deepest parentheses.
const DEEPEST: usize = 32;

/// The zeros and ones of a list of layers; nothing where it is none.
pub(super) fn read(text: &str) -> Option<Vec<bool>> {
    let symbols: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    let mut reader = Reader { symbols, at: 0 };
    let list = reader.sum(0)?;
    (reader.at == reader.symbols.len()).then_some(list)
}

/// A list as it is written.
pub(super) fn written(list: &[bool]) -> String {
    let runs = list.chunk_by(|a, b| a == b);
    let words: Vec<String> = runs
        .map(|run| format!("[{}]*{}", u8::from(run[0]), run.len()))
        .collect();
    format!("({})", words.join("+"))
}

struct Reader {
    symbols: Vec<char>,
    at: usize,
}

impl Reader {
    fn take(&mut self, wanted: char) -> bool {
        let found = self.symbols.get(self.at) == Some(&wanted);
        self.at += usize::from(found);
        found
    }

    fn sum(&mut self, depth: usize) -> Option<Vec<bool>> {
        let mut all = self.product(depth)?;
        while self.take('+') {
            all.extend(self.product(depth)?);
            if all.len() > LONGEST {
                return None;
            }
        }
        Some(all)
    }

    fn product(&mut self, depth: usize) -> Option<Vec<bool>> {
        let mut list = if self.take('(') {
            if depth == DEEPEST {
                return None;
            }
            let list = self.sum(depth + 1)?;
            self.take(')').then_some(list)?
        } else {
            self.list()?
        };
        while self.take('*') {
            let times = self.number()?;
            if list.len().saturating_mul(times) > LONGEST {
                return None;
            }
            list = list.repeat(times);
        }
        Some(list)
    }

    fn list(&mut self) -> Option<Vec<bool>> {
        if !self.take('[') {
            return None;
        }
        let mut list = Vec::new();
        loop {
            match self.number()? {
                0 => list.push(false),
                1 => list.push(true),
                _ => return None,
            }
            if self.take(']') {
                return Some(list);
            }
            if !self.take(',') {
                return None;
            }
        }
    }

    fn number(&mut self) -> Option<usize> {
        let rest = &self.symbols[self.at..];
        let digits: String = rest.iter().take_while(|c| c.is_ascii_digit()).collect();
        self.at += digits.len();
        digits.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_patterns() {
        let mut deepseek = vec![false; 3];
        deepseek.extend([true; 58]);
        assert_eq!(read("([0]*3+[1]*58)"), Some(deepseek.clone()));
        assert_eq!(written(&deepseek), "([0]*3+[1]*58)");
        assert_eq!(
            read("([1]*2 + [0])*2"),
            Some(vec![true, true, false, true, true, false])
        );
        assert_eq!(read("[0, 1]"), Some(vec![false, true]));
        let deep = format!("{}[1]{}", "(".repeat(5000), ")".repeat(5000));
        for text in [
            "",
            "[2]",
            "[0]*",
            "([0]",
            "[0]+",
            "[0]*9999999999999999999",
            "[1]*4097",
            "0",
            &deep,
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
