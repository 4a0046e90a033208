//! [`evaluate`]: what stands in `$((..))` of a shell script.

/// The value of sums, products, quotients and remainders of whole numbers and names, in parentheses or not; none where there is
/// something else, or no such number.
pub(super) fn evaluate(text: &str, value: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let mut reader = Reader {
        rest: text,
        value,
        depth: 0,
    };
    let sum = reader.sum()?;
    reader.skip();
    reader.rest.is_empty().then_some(sum)
}

/// Parentheses that may stand in one another.
const MOST_DEPTH: usize = 64;

struct Reader<'t> {
    rest: &'t str,
    value: &'t dyn Fn(&str) -> Option<i64>,
    depth: usize,
}

impl Reader<'_> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// One of some signs, where it is next.
    fn sign(&mut self, signs: &[char]) -> Option<char> {
        self.skip();
        let sign = self
            .rest
            .chars()
            .next()
            .filter(|next| signs.contains(next))?;
        self.rest = &self.rest[sign.len_utf8()..];
        Some(sign)
    }

    fn sum(&mut self) -> Option<i64> {
        let mut sum = self.product()?;
        while let Some(sign) = self.sign(&['+', '-']) {
            let next = self.product()?;
            sum = match sign {
                '+' => sum.checked_add(next)?,
                _ => sum.checked_sub(next)?,
            };
        }
        Some(sum)
    }

    fn product(&mut self) -> Option<i64> {
        let mut product = self.one()?;
        while let Some(sign) = self.sign(&['*', '/', '%']) {
            let next = self.one()?;
            product = match sign {
                '*' => product.checked_mul(next)?,
                '/' => product.checked_div(next)?,
                _ => product.checked_rem(next)?,
            };
        }
        Some(product)
    }

    fn one(&mut self) -> Option<i64> {
        if self.depth == MOST_DEPTH {
            return None;
        }
        if let Some(sign) = self.sign(&['(', '-']) {
            self.depth += 1;
            let inner = match sign {
                '(' => self.sum().filter(|_| self.sign(&[')']).is_some()),
                _ => self.one().and_then(i64::checked_neg),
            };
            self.depth -= 1;
            return inner;
        }
        let ends = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        let end = self.rest.find(ends).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            // With a zero in front a shell reads another base.
            let is_decimal = word == "0" || !word.starts_with('0');
            return word.parse().ok().filter(|_| is_decimal);
        }
        (self.value)(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_arithmetic() {
        let value = |name: &str| (name == "DP").then_some(16);
        for (text, expected) in [
            (" 64 * 4 ", Some(256)),
            ("2+3*(DP-1)", Some(47)),
            ("-7 % 4 - -1", Some(-2)),
            ("DP/3", Some(5)),
            ("9223372036854775807 + 1", None),
            ("1 / 0", None),
            ("GPUS * 2", None),
            ("1 << 3", None),
            ("010", None),
            ("(1", None),
            ("", None),
        ] {
            assert_eq!(evaluate(text, &value), expected, "{text}");
        }
        assert_eq!(evaluate(&"(".repeat(100_000), &value), None);
    }
}
