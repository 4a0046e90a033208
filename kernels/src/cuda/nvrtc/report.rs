//! What a kernel takes of a multiprocessor, read from the log of the assembler.

/// What one entry of a program takes, as `ptxas -v` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: arrays that are not in registers.
    pub stack: u32,
    /// Bytes that a thread writes because registers ran out.
    pub spill_stores: u32,
    /// Bytes that a thread reads back.
    pub spill_loads: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
}

/// The entries of a log, by name.
pub(crate) fn resources(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            found.push(Resources {
                entry: rest.split('\'').next().unwrap_or_default().to_owned(),
                registers: 0,
                stack: 0,
                spill_stores: 0,
                spill_loads: 0,
                shared: 0,
            });
            continue;
        }
        let Some(entry) = found.last_mut() else {
            continue;
        };
        let facts = line.rsplit(" : ").next().unwrap_or(line);
        for fact in facts.split(',') {
            let mut words = fact
                .split_whitespace()
                .skip_while(|word| !word.starts_with(|c: char| c.is_ascii_digit()));
            let Some(number) = words.next().and_then(|word| word.parse().ok()) else {
                continue;
            };
            match words.collect::<Vec<_>>().join(" ").as_str() {
                "registers" => entry.registers = number,
                "bytes stack frame" => entry.stack = number,
                "bytes spill stores" => entry.spill_stores = number,
                "bytes spill loads" => entry.spill_loads = number,
                "bytes smem" => entry.shared = number,
                _ => {}
            }
        }
    }
    found.sort_by(|a, b| a.entry.cmp(&b.entry));
    found
}

/// Lines of a log that say something is wrong or slow: warnings, and the assembler's advice that a
/// kernel's matrix products cannot overlap or its register hints were ignored (codes `C7...`).
#[cfg(test)]
pub(crate) fn complaints(log: &str) -> Vec<&str> {
    log.lines()
        .filter(|line| line.contains("warning") || line.contains("(C7"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As NVRTC 13.0 writes it, with a line of `ptxas` 12 for shared memory.
    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spill' for 'sm_90a'
ptxas info    : Function properties for spill
ptxas         .     256 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 80 registers, used 0 barriers, 256 bytes cumulative stack size
ptxas info    : Compile time = 70.652 ms
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 1 barriers, 1024 bytes smem, 364 bytes cmem[0]
";

    #[test]
    fn a_log_gives_the_resources_of_every_entry() {
        let expected = [
            Resources {
                entry: "forward".to_owned(),
                registers: 16,
                stack: 0,
                spill_stores: 0,
                spill_loads: 0,
                shared: 1024,
            },
            Resources {
                entry: "spill".to_owned(),
                registers: 80,
                stack: 256,
                spill_stores: 12,
                spill_loads: 8,
                shared: 0,
            },
        ];
        assert_eq!(resources(LOG), expected);
        assert!(complaints(LOG).is_empty());
        assert_eq!(resources(""), []);
    }

    #[test]
    fn warnings_and_advice_are_complaints() {
        let log = "rows.cu(3): warning #177-D: variable was declared but never referenced\n\
                   ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions \
                   are serialized due to insufficient register resources\n";
        assert_eq!(complaints(log).len(), 2);
    }
}
