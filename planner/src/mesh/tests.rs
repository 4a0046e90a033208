//! Groups against worked examples, and against ranks counted out by nested loops.

use moefold_profiles::Cluster;
use moefold_profiles::presets;

use super::*;
use crate::choice::StackName;
use crate::layout::{Batch, PartialDegrees};
use crate::options::SearchOptions;
use crate::rules::Rules;

fn mesh_of(gpus: u32, text: &str) -> Mesh {
    let pins: PartialDegrees = text.parse().expect("parses");
    mesh(gpus, &pins, Order::default()).expect("tiles")
}

fn check(mesh: &Mesh, kind: GroupKind, expected: &[&[u32]]) {
    assert_eq!(mesh.groups(kind), expected, "{}", kind.name());
}

/// Attention TP2 CP2 DP4, experts ETP1 EP8 EDP2, one stage: an expert group draws tokens from
/// two replicas.
#[test]
fn golden_folding_over_replicas() {
    let mesh = mesh_of(16, "tp=2,cp=2,ep=8,etp=1");
    check(
        &mesh,
        GroupKind::Tp,
        &[
            &[0, 1],
            &[2, 3],
            &[4, 5],
            &[6, 7],
            &[8, 9],
            &[10, 11],
            &[12, 13],
            &[14, 15],
        ],
    );
    check(
        &mesh,
        GroupKind::Cp,
        &[
            &[0, 2],
            &[1, 3],
            &[4, 6],
            &[5, 7],
            &[8, 10],
            &[9, 11],
            &[12, 14],
            &[13, 15],
        ],
    );
    check(
        &mesh,
        GroupKind::TpCp,
        &[
            &[0, 1, 2, 3],
            &[4, 5, 6, 7],
            &[8, 9, 10, 11],
            &[12, 13, 14, 15],
        ],
    );
    check(
        &mesh,
        GroupKind::Dp,
        &[
            &[0, 4, 8, 12],
            &[1, 5, 9, 13],
            &[2, 6, 10, 14],
            &[3, 7, 11, 15],
        ],
    );
    check(
        &mesh,
        GroupKind::DpCp,
        &[&[0, 2, 4, 6, 8, 10, 12, 14], &[1, 3, 5, 7, 9, 11, 13, 15]],
    );
    for kind in [GroupKind::Ep, GroupKind::TpEp] {
        check(
            &mesh,
            kind,
            &[&[0, 1, 2, 3, 4, 5, 6, 7], &[8, 9, 10, 11, 12, 13, 14, 15]],
        );
    }
    check(
        &mesh,
        GroupKind::Edp,
        &[
            &[0, 8],
            &[1, 9],
            &[2, 10],
            &[3, 11],
            &[4, 12],
            &[5, 13],
            &[6, 14],
            &[7, 15],
        ],
    );
    assert_eq!(
        mesh.coordinates(5),
        Coordinates {
            tp: 1,
            cp: 0,
            dp: 1,
            pp: 0,
            etp: 0,
            ep: 5,
            edp: 0
        }
    );
}

/// Two stages: PP2 TP2 CP2 DP2 over ETP1 EP4 EDP2.
#[test]
fn golden_folding_under_a_pipeline() {
    let mesh = mesh_of(16, "pp=2,tp=2,cp=2,ep=4");
    let pipelines: Vec<Vec<u32>> = (0..8).map(|rank| vec![rank, rank + 8]).collect();
    assert_eq!(mesh.groups(GroupKind::Pp), pipelines);
    assert_eq!(
        mesh.groups(GroupKind::Dp)[..5],
        [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
    );
    check(
        &mesh,
        GroupKind::DpCp,
        &[
            &[0, 2, 4, 6],
            &[1, 3, 5, 7],
            &[8, 10, 12, 14],
            &[9, 11, 13, 15],
        ],
    );
    check(
        &mesh,
        GroupKind::Ep,
        &[
            &[0, 1, 2, 3],
            &[4, 5, 6, 7],
            &[8, 9, 10, 11],
            &[12, 13, 14, 15],
        ],
    );
    assert_eq!(
        mesh.groups(GroupKind::Edp)[..5],
        [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
    );
}

/// Expert tensor parallelism: ETP groups are the TP pairs.
#[test]
fn golden_expert_tensor_parallel() {
    let mesh = mesh_of(8, "tp=2,cp=2,etp=2,ep=2");
    assert_eq!(mesh.groups(GroupKind::Etp), mesh.groups(GroupKind::Tp));
    check(&mesh, GroupKind::Ep, &[&[0, 2], &[1, 3], &[4, 6], &[5, 7]]);
    check(&mesh, GroupKind::Edp, &[&[0, 4], &[1, 5], &[2, 6], &[3, 7]]);
}

/// Coordinates counted out by nested loops, the slowest axis outermost: what an order means.
struct Counted {
    /// For each rank, its position on tp, cp, ep, dp and pp in the order of [`Axis`].
    attention: Vec<[u32; 5]>,
    expert: Vec<[u32; 5]>,
}

fn count_out(order: Order, sizes: [u32; 5]) -> Vec<[u32; 5]> {
    let of = |axis: usize| sizes[order.axes()[axis] as usize];
    let mut ranks = Vec::new();
    for e in 0..of(4) {
        for d in 0..of(3) {
            for c in 0..of(2) {
                for b in 0..of(1) {
                    for a in 0..of(0) {
                        let mut at = [0; 5];
                        for (axis, index) in order.axes().into_iter().zip([a, b, c, d, e]) {
                            at[axis as usize] = index;
                        }
                        ranks.push(at);
                    }
                }
            }
        }
    }
    ranks
}

impl Counted {
    /// Ranks that agree on every axis outside the kind's, by lowest member.
    fn groups(&self, kind: GroupKind) -> Vec<Vec<u32>> {
        let inside: &[Axis] = match kind {
            GroupKind::Tp | GroupKind::Etp => &[Axis::Tp],
            GroupKind::Cp => &[Axis::Cp],
            GroupKind::Dp | GroupKind::Edp => &[Axis::Dp],
            GroupKind::Pp => &[Axis::Pp],
            GroupKind::Ep => &[Axis::Ep],
            GroupKind::DpCp => &[Axis::Dp, Axis::Cp],
            GroupKind::TpCp => &[Axis::Tp, Axis::Cp],
            GroupKind::TpDpCp => &[Axis::Tp, Axis::Dp, Axis::Cp],
            GroupKind::TpEp => &[Axis::Tp, Axis::Ep],
            GroupKind::TpEpPp => &[Axis::Tp, Axis::Ep, Axis::Pp],
        };
        let on_experts = matches!(
            kind,
            GroupKind::Ep | GroupKind::Etp | GroupKind::Edp | GroupKind::TpEp | GroupKind::TpEpPp
        );
        let grid = if on_experts {
            &self.expert
        } else {
            &self.attention
        };
        group_by(grid, inside)
    }
}

fn group_by(grid: &[[u32; 5]], inside: &[Axis]) -> Vec<Vec<u32>> {
    let outside = |rank: u32| {
        let mut at = grid[rank as usize];
        for &axis in inside {
            at[axis as usize] = 0;
        }
        at
    };
    let mut ranks: Vec<u32> = (0..grid.len() as u32).collect();
    ranks.sort_by_key(|&rank| outside(rank));
    let mut groups: Vec<Vec<u32>> = ranks
        .chunk_by(|&a, &b| outside(a) == outside(b))
        .map(<[u32]>::to_vec)
        .collect();
    groups.sort_by_key(|group| group[0]);
    groups
}

/// Every tuple of degrees whose grids tile up to `most` ranks.
fn every_tuple(most: u32) -> impl Iterator<Item = Degrees> {
    let divisors = |n: u32| (1..=n).filter(move |d| n.is_multiple_of(*d));
    (1..=most).flat_map(move |gpus| {
        divisors(gpus).flat_map(move |pp| {
            let share = gpus / pp;
            divisors(share).flat_map(move |tp| {
                divisors(share / tp).flat_map(move |cp| {
                    divisors(share).flat_map(move |etp| {
                        divisors(share / etp).map(move |ep| Degrees {
                            gpus,
                            tp,
                            cp,
                            pp,
                            vpp: 1,
                            ep,
                            etp,
                            mbs: 1,
                        })
                    })
                })
            })
        })
    })
}

fn counted(d: &Degrees, order: Order) -> Counted {
    let dp = d.gpus / (d.tp * d.cp * d.pp);
    let edp = d.gpus / (d.etp * d.ep * d.pp);
    Counted {
        attention: count_out(order, [d.tp, d.cp, 1, dp, d.pp]),
        expert: count_out(order, [d.etp, 1, d.ep, edp, d.pp]),
    }
}

fn cluster(per_node: u32, per_domain: u32) -> Cluster {
    Cluster {
        gpus_per_node: per_node,
        gpus_per_domain: per_domain,
        ..presets::cluster("dgx-h100").expect("a preset")
    }
}

/// All tuples up to 64 ranks: groups equal the counted ones, partition the ranks, multiply out;
/// both grids have the same pipeline groups; placements equal those of the listed groups.
#[test]
fn oracle_every_tuple_up_to_64_ranks() {
    let clusters = [cluster(8, 8), cluster(4, 72), cluster(3, 6), cluster(1, 1)];
    let mut tuples = 0;
    for degrees in every_tuple(64) {
        tuples += 1;
        let mesh = Mesh::new(&degrees, Order::default()).expect("tiles");
        let counted = counted(&degrees, Order::default());
        assert_eq!(
            group_by(&counted.attention, &[Axis::Pp]),
            group_by(&counted.expert, &[Axis::Pp]),
            "{degrees:?}"
        );
        for kind in GroupKind::ALL {
            let groups = mesh.groups(kind);
            assert_eq!(groups, counted.groups(kind), "{degrees:?} {kind:?}");
            let members: usize = groups.iter().map(Vec::len).sum();
            assert_eq!(members, degrees.gpus as usize);
            assert_eq!(mesh.group_size(kind) as usize, groups[0].len());
            let cluster = &clusters[tuples % clusters.len()];
            let least = |share: &dyn Fn(&[u32]) -> u32| groups.iter().map(|g| share(g)).min();
            let placement = mesh.placement(kind, cluster);
            assert_eq!(
                Some(placement.ranks_per_domain),
                least(&|group| {
                    let domain = domain_in_job(cluster, degrees.gpus);
                    let runs = group.chunk_by(|&a, &b| a / domain == b / domain);
                    runs.map(<[u32]>::len).max().unwrap_or(0) as u32
                }),
                "{degrees:?} {kind:?} domains of {}",
                cluster.gpus_per_domain
            );
            let node = |group: &[u32]| {
                let runs =
                    group.chunk_by(|&a, &b| a / cluster.gpus_per_node == b / cluster.gpus_per_node);
                runs.map(<[u32]>::len).max().unwrap_or(0) as u32
            };
            assert_eq!(Some(placement.ranks_per_node), least(&node));
            let domain = domain_in_job(cluster, degrees.gpus);
            let last = groups[0].iter().map(|rank| rank / domain).max();
            assert_eq!(Some(mesh.reach(kind, cluster) - 1), last);
        }
        let sizes =
            |kinds: &[GroupKind]| -> u32 { kinds.iter().map(|&k| mesh.group_size(k)).product() };
        assert_eq!(
            sizes(&[GroupKind::Tp, GroupKind::Cp, GroupKind::Dp, GroupKind::Pp]),
            degrees.gpus
        );
        assert_eq!(
            sizes(&[GroupKind::Etp, GroupKind::Ep, GroupKind::Edp, GroupKind::Pp]),
            degrees.gpus
        );
        assert_eq!(sizes(&[GroupKind::TpDpCp, GroupKind::Pp]), degrees.gpus);
        assert_eq!(sizes(&[GroupKind::TpEpPp, GroupKind::Edp]), degrees.gpus);
    }
    assert!(tuples > 10_000, "{tuples} tuples");
}

/// Coordinates, groups of a rank and positions in them tell the same story.
#[test]
fn law_every_rank_finds_itself() {
    for degrees in every_tuple(24) {
        let mesh = Mesh::new(&degrees, Order::default()).expect("tiles");
        let counted = counted(&degrees, Order::default());
        for rank in 0..degrees.gpus {
            let at = mesh.coordinates(rank);
            let [tp, cp, _, dp, pp] = counted.attention[rank as usize];
            let [etp, _, ep, edp, _] = counted.expert[rank as usize];
            assert_eq!((at.tp, at.cp, at.dp, at.pp), (tp, cp, dp, pp));
            assert_eq!((at.etp, at.ep, at.edp), (etp, ep, edp));
            for kind in GroupKind::ALL {
                let group = mesh.group_of(kind, rank);
                assert!(group.contains(&rank) && mesh.groups(kind).contains(&group));
            }
        }
    }
}

/// With dp slowest the grids agree on pipeline groups exactly where PP is 1 or EDP equals DP.
#[test]
fn oracle_dp_last_is_refused_where_pipelines_differ() {
    for degrees in every_tuple(32) {
        let counted = counted(&degrees, Order::DP_LAST);
        let agree =
            group_by(&counted.attention, &[Axis::Pp]) == group_by(&counted.expert, &[Axis::Pp]);
        match Mesh::new(&degrees, Order::DP_LAST) {
            Ok(mesh) => {
                assert!(agree, "{degrees:?}");
                for kind in GroupKind::ALL {
                    assert_eq!(mesh.groups(kind), counted.groups(kind));
                }
            }
            Err(broken) => {
                assert!(!agree, "{degrees:?}");
                assert_eq!(broken[0].reason(), "pipeline_groups");
            }
        }
        let dp = degrees.gpus / (degrees.tp * degrees.cp * degrees.pp);
        let edp = degrees.gpus / (degrees.etp * degrees.ep * degrees.pp);
        assert_eq!(agree, degrees.pp == 1 || dp == edp);
    }
}

#[test]
fn placement_sees_domains_that_groups_straddle() {
    let nvl72 = cluster(4, 72);
    let ep64 = |gpus| mesh_of(gpus, "ep=64").placement(GroupKind::Ep, &nvl72);
    assert!(ep64(64).inside_domain());
    // 64 GPUs of each rack are used, and a group is a rack.
    assert_eq!(domain_in_job(&nvl72, 256), 64);
    assert!(ep64(256).inside_domain());
    // 320 GPUs likewise; 144 and 576 fill racks, and groups of 64 straddle them.
    assert_eq!(domain_in_job(&nvl72, 320), 64);
    assert_eq!(domain_in_job(&nvl72, 576), 72);
    assert_eq!(ep64(576).ranks_per_domain, 32);
    assert_eq!(ep64(576).ranks, 64);
    // 100 GPUs divide only into less than half racks: as they come.
    assert_eq!(domain_in_job(&nvl72, 100), 72);
    assert_eq!(domain_in_job(&cluster(8, 8), 1024), 8);
    assert_eq!(domain_in_job(&cluster(8, 1), 1024), 1);
}

#[test]
fn orders_parse_and_print() {
    assert_eq!("tp-cp-ep-dp-pp".parse(), Ok(Order::PP_LAST));
    assert_eq!(Order::DP_LAST.to_string(), "tp-cp-ep-pp-dp");
    for wrong in [
        "",
        "tp-cp-ep-dp",
        "tp-cp-ep-dp-dp",
        "tp-cp-ep-dp-pp-pp",
        "tp-cp-ep-dp-xx",
    ] {
        assert!(wrong.parse::<Order>().is_err(), "{wrong}");
    }
}

#[test]
fn golden_description() {
    let text = describe(&mesh_of(64, "tp=2,cp=2,pp=2,ep=8"));
    assert_eq!(
        text.lines().collect::<Vec<_>>(),
        [
            "attention  rank = tp + 2 cp + 4 dp + 32 pp   (tp 2, cp 2, dp 8, pp 2)",
            "experts    rank = ep + 8 edp + 32 pp   (etp 1, ep 8, edp 4, pp 2)",
            "",
            "group      size  groups  ranks",
            "tp            2      32  [0,1][2,3][4,5][6,7][8,9][10,11][12,13][14,15][16,17][18,19]\
             [20,21][22,23][24,25][26,27][28,29][30,31] and 16 more",
            "cp            2      32  [0,2][1,3][4,6][5,7][8,10][9,11][12,14][13,15][16,18][17,19]\
             [20,22][21,23][24,26][25,27][28,30][29,31] and 16 more",
            "dp            8       8  [0,4,8,12,16,20,24,28][1,5,9,13,17,21,25,29]\
             [2,6,10,14,18,22,26,30][3,7,11,15,19,23,27,31][32,36,40,44,48,52,56,60]\
             [33,37,41,45,49,53,57,61][34,38,42,46,50,54,58,62][35,39,43,47,51,55,59,63]",
            "dp-cp        16       4  [0,2,..,30][1,3,..,31][32,34,..,62][33,35,..,63]",
            "tp-cp         4      16  [0..3][4..7][8..11][12..15][16..19][20..23][24..27][28..31]\
             [32..35][36..39][40..43][44..47][48..51][52..55][56..59][60..63]",
            "tp-dp-cp     32       2  [0..31][32..63]",
            "pp            2      32  [0,32][1,33][2,34][3,35][4,36][5,37][6,38][7,39][8,40][9,41]\
             [10,42][11,43][12,44][13,45][14,46][15,47] and 16 more",
            "ep            8       8  [0..7][8..15][16..23][24..31][32..39][40..47][48..55][56..63]",
            "etp           1      64  each rank alone",
            "tp-ep         8       8  [0..7][8..15][16..23][24..31][32..39][40..47][48..55][56..63]",
            "edp           4      16  [0,8,16,24][1,9,17,25][2,10,18,26][3,11,19,27][4,12,20,28]\
             [5,13,21,29][6,14,22,30][7,15,23,31][32,40,48,56][33,41,49,57][34,42,50,58]\
             [35,43,51,59][36,44,52,60][37,45,53,61][38,46,54,62][39,47,55,63]",
            "tp-ep-pp     16       4  [0..7,32..39][8..15,40..47][16..23,48..55][24..31,56..63]",
        ]
    );
    let listed = listing(16, &"tp=2,cp=2,ep=8,etp=1".parse().expect("parses")).expect("tiles");
    let json = serde_json::to_value(&listed).expect("serializes");
    assert_eq!(json["tp-ep"][1][0], 8);
    let keys: Vec<&String> = json.as_object().expect("an object").keys().collect();
    assert_eq!(keys.len(), GroupKind::ALL.len());
    for kind in GroupKind::ALL {
        assert!(
            json.get(kind.name()).is_some(),
            "{} is missing",
            kind.name()
        );
    }
    let wrong = listing(16, &"tp=2,dp=4".parse().expect("parses")).expect_err("dp is 8");
    assert_eq!(wrong[0].reason(), "replicas");
}

#[test]
fn law_every_chunk_of_a_sequence_is_one_rank_s_and_causal_work_is_even() {
    for cp in 1..=16 {
        let of_ranks: Vec<[u32; 2]> = (0..cp).map(|rank| chunks(cp, rank)).collect();
        let mut all: Vec<u32> = of_ranks.iter().flatten().copied().collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..2 * cp));
        // A chunk sees itself by half and all before it.
        let work = |rank: &[u32; 2]| rank.iter().sum::<u32>();
        assert!(of_ranks.iter().all(|rank| work(rank) == 2 * cp - 1));
    }
}

/// Replicas of 16 ranks in nodes of 4, cut into instances: by hand.
#[test]
fn golden_cuts_of_replicas() {
    let cluster = cluster(4, 4);
    let options = SearchOptions::new(
        Batch {
            seq_len: 4096,
            global_batch: 64,
        },
        StackName::Megatron,
    );
    let model = crate::model::presets::load("mixtral-8x7b").expect("a preset");
    let cut = |words: &str, kind, parts| {
        let pins: PartialDegrees = words.parse().expect("degrees");
        let degrees = pins.complete(16).expect("all");
        let layout = Rules::of(&model, &options).layout(&degrees).expect("legal");
        cut(&layout, kind, parts, &cluster).map(|p| [p.ranks, p.ranks_per_domain])
    };
    let alone = "tp=1,cp=1,pp=1,vpp=1,ep=1,etp=1,mbs=1";
    assert_eq!(cut(alone, GroupKind::DpCp, 4), [[4, 4], [4, 1]]);
    assert_eq!(cut(alone, GroupKind::DpCp, 2), [[8, 4], [2, 1]]);
    assert_eq!(cut(alone, GroupKind::DpCp, 8), [[2, 2], [8, 2]]);
    // Two tensor-parallel ranks leave every other: 0 2 | 4 6 | ... and of experts every fourth.
    let folded = "tp=2,cp=1,pp=1,vpp=1,ep=4,etp=1,mbs=1";
    assert_eq!(cut(folded, GroupKind::DpCp, 4), [[2, 2], [4, 1]]);
    assert_eq!(cut(folded, GroupKind::DpCp, 2), [[4, 2], [2, 1]]);
    assert_eq!(cut(folded, GroupKind::Edp, 2), [[2, 1], [2, 1]]);
    assert_eq!(cut(folded, GroupKind::Edp, 1), [[4, 1], [1, 1]]);
}
