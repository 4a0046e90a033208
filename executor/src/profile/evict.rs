//! [`Evict`]: puts operands out of a core's own caches.

use std::hint::black_box;

/// Where the system does not say: the largest level-two cache of today's server cores.
const ASSUMED_L2: usize = 2 << 20;

/// Memory that is read and written instead of operands.
pub(super) struct Evict {
    words: Vec<u64>,
}

impl Evict {
    /// Twice the level-two cache: what lies beyond is shared with other ranks and holds more than a layer.
    pub(super) fn new() -> Self {
        let said = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size");
        let bytes = said.ok().and_then(|text| cache_size(&text));
        Self {
            words: vec![1; 2 * bytes.unwrap_or(ASSUMED_L2) / 8],
        }
    }

    pub(super) fn run(&mut self) {
        for word in &mut self.words {
            *word = word.wrapping_add(1);
        }
        black_box(&self.words);
    }
}

/// Bytes of a size as Linux writes it, `1024K`.
fn cache_size(text: &str) -> Option<usize> {
    let kib: usize = text.trim().strip_suffix('K')?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_linux_writes_them() {
        assert_eq!(cache_size("1024K\n"), Some(1 << 20));
        assert_eq!(cache_size("2M"), None);
        assert!(Evict::new().words.len() * 8 >= 1 << 10);
    }

    #[test]
    fn all_of_it_is_read_and_written_each_time() {
        let mut evict = Evict::new();
        for times in 2..4 {
            evict.run();
            assert!(evict.words.iter().all(|word| *word == times));
        }
    }
}
