//! Whose tables hold for a GPU that was not measured itself: one table of siblings.

/// GPUs that are the same silicon as another, with other links or another board.
const SAME_SILICON: [(&str, &str); 4] = [
    ("a800", "a100"),
    ("a100-pcie", "a100"),
    ("h800", "h100"),
    ("h100-pcie", "h100"),
];

/// Who stands for an architecture.
struct Architecture {
    name: &'static str,
    /// Whose attention kernels it runs.
    kernels: &'static str,
    /// Whose collectives it runs, where one GPU's links speak for the others'.
    links: Option<&'static str>,
}

const ARCHITECTURES: [Architecture; 4] = [
    Architecture {
        name: "sm_80",
        kernels: "a100",
        links: None,
    },
    Architecture {
        name: "sm_90",
        kernels: "h100",
        links: Some("h100"),
    },
    Architecture {
        name: "sm_100",
        kernels: "b200",
        links: None,
    },
    Architecture {
        name: "sm_103",
        kernels: "b300",
        links: None,
    },
];

/// The GPU whose matrix products stand for those of a GPU: the same silicon.
pub(super) fn of_products(name: &str) -> Option<&'static str> {
    let found = SAME_SILICON.iter().find(|(sibling, _)| *sibling == name);
    found.map(|(_, lender)| *lender)
}

/// The GPU whose attention kernels stand for those of a GPU; the H100 where nothing is known.
pub(super) fn of_kernels(name: &str, arch: &str) -> &'static str {
    let kernels = || architecture(arch).map(|known| known.kernels);
    of_products(name).or_else(kernels).unwrap_or("h100")
}

/// The GPU whose collectives stand for those of a GPU, where there is one.
pub(super) fn of_links(name: &str, arch: &str) -> Option<&'static str> {
    of_products(name).or_else(|| architecture(arch)?.links)
}

fn architecture(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|known| known.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn law_every_gpu_of_the_table_is_a_preset() {
        let pairs = SAME_SILICON.iter().flat_map(|&(a, b)| [a, b]);
        let lenders = ARCHITECTURES
            .iter()
            .flat_map(|known| [Some(known.kernels), known.links]);
        for name in pairs.chain(lenders.flatten()) {
            assert!(presets::gpu(name).is_ok(), "{name}");
        }
        for known in &ARCHITECTURES {
            let lender = presets::gpu(known.kernels).expect("a preset");
            assert_eq!(lender.arch, known.name);
        }
    }
}
