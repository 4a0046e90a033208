//! [`GroupListing`]: every process group of some degrees, for people and for programs.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::{Axis, Grid, GroupKind, Mesh, Order, digit};
use crate::layout::{Illegal, PartialDegrees};

/// Groups a line of [`describe`] shows before it stops.
const GROUPS_SHOWN: usize = 16;

/// Ranks or runs of ranks of a group that are written out.
const PARTS_SHOWN: usize = 8;

/// All groups of all kinds; every kind lists each rank exactly once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[expect(missing_docs, reason = "named and explained in GroupKind")]
pub struct GroupListing {
    pub tp: Vec<Vec<u32>>,
    pub cp: Vec<Vec<u32>>,
    pub dp: Vec<Vec<u32>>,
    pub dp_cp: Vec<Vec<u32>>,
    pub tp_cp: Vec<Vec<u32>>,
    pub tp_dp_cp: Vec<Vec<u32>>,
    pub pp: Vec<Vec<u32>>,
    pub ep: Vec<Vec<u32>>,
    pub etp: Vec<Vec<u32>>,
    pub tp_ep: Vec<Vec<u32>>,
    pub edp: Vec<Vec<u32>>,
    pub tp_ep_pp: Vec<Vec<u32>>,
}

impl GroupListing {
    /// Lists a mesh.
    pub fn of(mesh: &Mesh) -> Self {
        let groups = |kind| mesh.groups(kind);
        Self {
            tp: groups(GroupKind::Tp),
            cp: groups(GroupKind::Cp),
            dp: groups(GroupKind::Dp),
            dp_cp: groups(GroupKind::DpCp),
            tp_cp: groups(GroupKind::TpCp),
            tp_dp_cp: groups(GroupKind::TpDpCp),
            pp: groups(GroupKind::Pp),
            ep: groups(GroupKind::Ep),
            etp: groups(GroupKind::Etp),
            tp_ep: groups(GroupKind::TpEp),
            edp: groups(GroupKind::Edp),
            tp_ep_pp: groups(GroupKind::TpEpPp),
        }
    }
}

/// The mesh of some degrees without a model, 1 for each that is not given; etp too, where Megatron
/// would take tp (see [`PartialDegrees::or_one`]).
pub fn mesh(gpus: u32, pins: &PartialDegrees, order: Order) -> Result<Mesh, Vec<Illegal>> {
    let mesh = Mesh::new(&pins.or_one(gpus), order)?;
    let given = [
        ("dp", pins.dp, mesh.group_size(GroupKind::Dp)),
        ("edp", pins.edp, mesh.group_size(GroupKind::Edp)),
    ];
    let broken: Vec<Illegal> = given
        .into_iter()
        .filter_map(|(key, given, found)| match given {
            Some(given) if given != found => Some(Illegal::Replicas { key, given, found }),
            _ => None,
        })
        .collect();
    if broken.is_empty() {
        Ok(mesh)
    } else {
        Err(broken)
    }
}

/// Every group of some degrees without a model, in the default order.
pub fn listing(gpus: u32, pins: &PartialDegrees) -> Result<GroupListing, Vec<Illegal>> {
    mesh(gpus, pins, Order::default()).map(|mesh| GroupListing::of(&mesh))
}

/// Both grids and all groups as text: how a rank number is made up, then a line for each kind.
pub fn describe(mesh: &Mesh) -> String {
    let mut text = String::new();
    let mut line = |args: std::fmt::Arguments| {
        text.write_fmt(args).expect("a string takes any text");
        text.push('\n');
    };
    for (name, grid, names) in [
        ("attention", &mesh.attention, ["tp", "cp", "ep", "dp", "pp"]),
        ("experts", &mesh.expert, ["etp", "cp", "ep", "edp", "pp"]),
    ] {
        line(format_args!("{name:<9}  {}", equation(grid, names)));
    }
    line(format_args!(""));
    line(format_args!(
        "{:<9} {:>5} {:>7}  ranks",
        "group", "size", "groups"
    ));
    for kind in GroupKind::ALL {
        let (size, count) = (mesh.group_size(kind), mesh.num_groups(kind));
        let shown = count.min(GROUPS_SHOWN as u32);
        let mut ranks = if size == 1 {
            "each rank alone".to_owned()
        } else {
            let group = |number| spell(&mesh.members(kind, mesh.first_rank(kind, number)));
            (0..shown).map(group).collect()
        };
        if shown < count && size > 1 {
            write!(ranks, " and {} more", count - shown).expect("a string takes any text");
        }
        line(format_args!(
            "{:<9} {size:>5} {count:>7}  {ranks}",
            kind.name()
        ));
    }
    text
}

/// A grid as a sum: `rank = tp + 2 cp + 4 dp   (tp 2, cp 2, dp 4, pp 1)`.
fn equation(grid: &Grid, names: [&str; 5]) -> String {
    let known = [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Dp, Axis::Pp];
    let name = |axis: Axis| {
        let at = known.iter().position(|&a| a == axis);
        names[at.expect("all axes are known")]
    };
    let terms: Vec<String> = grid
        .iter()
        .filter(|digit| digit.size > 1)
        .map(|digit| match digit.stride {
            1 => name(digit.axis).to_owned(),
            stride => format!("{stride} {}", name(digit.axis)),
        })
        .collect();
    let sum = if terms.is_empty() {
        "0".to_owned()
    } else {
        terms.join(" + ")
    };
    let sizes: Vec<String> = known
        .iter()
        .map(|&axis| digit(grid, axis))
        .filter(|digit| digit.size > 1 || matches!(digit.axis, Axis::Tp | Axis::Dp | Axis::Pp))
        .map(|digit| format!("{} {}", name(digit.axis), digit.size))
        .collect();
    format!("rank = {sum}   ({})", sizes.join(", "))
}

/// A group, consecutive ranks as a range and long ones shortened: `[0..7]`, `[0,2,4]`,
/// `[0,8,..,120]`.
fn spell(group: &[u32]) -> String {
    let parts: Vec<String> = group
        .chunk_by(|a, b| a + 1 == *b)
        .flat_map(|run| match run {
            [first, _, .., last] if run.len() > 2 => vec![format!("{first}..{last}")],
            _ => run.iter().map(u32::to_string).collect(),
        })
        .collect();
    match parts.as_slice() {
        [first, second, .., last] if parts.len() > PARTS_SHOWN => {
            format!("[{first},{second},..,{last}]")
        }
        _ => format!("[{}]", parts.join(",")),
    }
}
