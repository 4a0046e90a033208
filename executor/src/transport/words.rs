//! Words of other processes, for a person to read.

use serde::{Deserialize as _, Deserializer};

/// What another process says, for a person to read: without what would steer a terminal, and not too long.
pub(crate) fn printable(said: &str) -> String {
    const LONGEST: usize = 4096;
    let mut shown = String::new();
    for character in said.chars().take(LONGEST) {
        if character.is_control() && character != '\n' && character != '\t' {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Reads words of another process as they may be shown.
pub(super) fn heard<'a, D: Deserializer<'a>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(|said| printable(&said))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::TransportError;
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_spelled_out() {
        assert_eq!(printable("rank 1:\n\tno file"), "rank 1:\n\tno file");
        assert_eq!(printable("a\x1b[2Jb\r\u{9b}c"), "a\\u{1b}[2Jb\\r\\u{9b}c");
        assert_eq!(printable(&"x".repeat(10_000)).len(), 4096);

        let clear = "\x1b[2J";
        let place = json!({"op": clear, "group": clear, "sequence": 0});
        let stopped = json!({"Stopped": {
            "rank": 0, "place": place, "failed_rank": 1, "failure": clear, "is_silent": false,
        }});
        let heard = serde_json::from_value::<TransportError>(stopped);
        let heard = heard.expect("an error of a rank").to_string();
        assert_eq!(heard.matches("\\u{1b}[2J").count(), 3, "{heard}");
        assert!(!heard.contains(char::is_control), "{heard:?}");
    }
}
