//! Which ranks a collective is measured among, on one machine and on several.

use moefold_profiles::units::Bytes;

use super::*;

fn machines(places: &[[u64; 2]]) -> Machines {
    Machines::of(
        &places
            .iter()
            .map(|place| place.to_vec())
            .collect::<Vec<_>>(),
    )
}

fn reduction(ranks: u32, ranks_per_domain: u32) -> Collective {
    Collective {
        kind: CollectiveKind::AllReduce,
        bytes: Bytes(1024),
        ranks,
        ranks_per_domain,
    }
}

#[test]
fn golden_groups_take_as_many_ranks_of_as_many_machines_as_the_key_says() {
    let two_by_four = (0..8).map(|rank| [rank % 4, 4]).collect::<Vec<_>>();
    let machines = machines(&two_by_four);
    assert_eq!(machines.each, Some(4));
    let group = |rank, ranks, near| {
        let key = reduction(ranks, near);
        assert_eq!(machines.refusal(&key), None);
        machines.group_of(rank, &key)
    };
    assert_eq!(group(5, 2, 2), [4, 5]);
    assert_eq!(group(5, 4, 4), [4, 5, 6, 7]);
    assert_eq!(group(5, 8, 4), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(group(5, 2, 1), [1, 5]);
    assert_eq!(group(6, 4, 2), [2, 3, 6, 7]);
    for (ranks, near) in [(8, 8), (4, 1), (8, 2), (3, 3)] {
        assert!(machines.refusal(&reduction(ranks, near)).is_some());
    }
}

#[test]
fn law_every_rank_is_in_one_group_and_all_its_members_know_it() {
    for (each, number) in [(1, 4), (2, 2), (3, 2), (4, 3), (8, 1)] {
        let places = (0..each * number).map(|rank| [rank % each, each]);
        let machines = machines(&places.collect::<Vec<_>>());
        for ranks in 2..=machines.ranks {
            for near in 1..=ranks {
                let key = reduction(ranks, near);
                if machines.refusal(&key).is_some() {
                    continue;
                }
                for rank in 0..machines.ranks {
                    let group = machines.group_of(rank, &key);
                    assert_eq!(group.len(), ranks as usize);
                    assert!(group.contains(&rank));
                    for &member in &group {
                        assert_eq!(machines.group_of(member, &key), group);
                        let near_to = group
                            .iter()
                            .filter(|m| *m / each as u32 == member / each as u32);
                        assert_eq!(near_to.count(), near as usize, "{group:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn ranks_dealt_out_in_turn_or_unevenly_are_not_mistaken_for_machines() {
    let in_turn = [[0, 2], [0, 2], [1, 2], [1, 2]];
    let uneven = [[0, 2], [1, 2], [0, 1]];
    for places in [&in_turn[..], &uneven] {
        let machines = machines(places);
        assert_eq!(machines.each, None);
        let key = reduction(machines.ranks, machines.ranks);
        let reason = machines.refusal(&key).expect("nobody knows who is near");
        assert!(reason.contains("machine by machine"), "{reason}");
    }
}
