//! What torchrun and Slurm say, and what is wrong with what they leave out.

use std::collections::HashMap;

use super::*;

fn of(variables: &[(&str, &str)]) -> Result<Launched, String> {
    let variables: HashMap<&str, &str> = variables.iter().copied().collect();
    let get = |name: &str| variables.get(name).map(|said| (*said).to_owned());
    Launched::from(&get).map_err(|error| {
        assert!(error.is_bad_request());
        error.to_string()
    })
}

const SECRET: (&str, &str) = ("MOEFOLD_SECRET", "sixteen bytes or more");

const TORCHRUN: [(&str, &str); 7] = [
    SECRET,
    ("RANK", "11"),
    ("WORLD_SIZE", "16"),
    ("LOCAL_RANK", "3"),
    ("LOCAL_WORLD_SIZE", "8"),
    ("MASTER_ADDR", "node-a"),
    ("MASTER_PORT", "29500"),
];

const SLURM: [(&str, &str); 7] = [
    SECRET,
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_TASKS_PER_NODE", "4(x2)"),
    ("SLURM_NODELIST", "gpu[07-08,12]"),
    ("SLURM_JOB_ID", "32775"),
];

fn with<'a>(of: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [of, more].concat()
}

fn without<'a>(of: &[(&'a str, &'a str)], name: &str) -> Vec<(&'a str, &'a str)> {
    of.iter().copied().filter(|(n, _)| *n != name).collect()
}

#[test]
fn torchrun_says_it_all() {
    let launched = of(&TORCHRUN).expect("complete");
    assert_eq!((launched.rank, launched.ranks), (11, 16));
    assert_eq!((launched.local_rank, launched.local_ranks), (3, 8));
    assert_eq!((launched.host.as_str(), launched.port), ("node-a", 29500));
    assert_eq!(launched.gpu, 3);
    let shown = |devices| of(&with(&TORCHRUN, &[("CUDA_VISIBLE_DEVICES", devices)]));
    assert_eq!(shown("5").expect("complete").gpu, 0, "its own and no other");
    assert_eq!(shown("4,5,6,7").expect("complete").gpu, 3);
    // Its agent has a store at that port.
    let held = with(
        &TORCHRUN,
        &[
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "x"),
        ],
    );
    let launched = of(&held).expect("complete");
    assert_eq!((launched.port, launched.job.as_str()), (29501, "x"));
    let chosen = of(&with(&held, &[("MOEFOLD_PORT", "7000")])).expect("complete");
    assert_eq!(chosen.port, 7000);
    // Under Slurm torchrun is the one that starts ranks.
    assert_eq!(of(&with(&TORCHRUN, &SLURM)).expect("complete").rank, 11);
}

#[test]
fn slurm_says_it_all() {
    let launched = of(&SLURM).expect("complete");
    assert_eq!((launched.rank, launched.ranks), (5, 8));
    assert_eq!((launched.local_rank, launched.local_ranks), (1, 4));
    assert_eq!((launched.host.as_str(), launched.port), ("gpu07", 16_391));
    assert_eq!(launched.job, "32775.");
    let chosen = with(
        &SLURM,
        &[("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "5000")],
    );
    let launched = of(&chosen).expect("complete");
    assert_eq!((launched.host.as_str(), launched.port), ("10.0.0.1", 5000));
    let without_list = without(&SLURM, "SLURM_NODELIST");
    let launched = with(&without_list, &[("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9")]);
    assert_eq!(of(&launched).expect("complete").host, "10.0.0.9");
    let error = of(&without_list).expect_err("nothing says where rank 0 is");
    assert!(error.contains("SLURM_NODELIST"), "{error}");
}

#[test]
fn slurm_counts_the_tasks_of_this_node_in_this_step() {
    let local_ranks = |more: &[(&'static str, &'static str)]| {
        of(&with(&SLURM, more)).expect("complete").local_ranks
    };
    // `srun --nodes 1 --ntasks 2` in a job of two nodes with four tasks each.
    let step = ("SLURM_STEP_TASKS_PER_NODE", "2");
    assert_eq!(local_ranks(&[step, ("SLURM_NODEID", "0")]), 2);
    let uneven = ("SLURM_STEP_TASKS_PER_NODE", "3(x2),2");
    for (node, tasks) in [("0", 3), ("1", 3), ("2", 2)] {
        assert_eq!(local_ranks(&[uneven, ("SLURM_NODEID", node)]), tasks);
    }
    // What was asked for is what the last node may not have.
    let asked = ("SLURM_NTASKS_PER_NODE", "3");
    assert_eq!(local_ranks(&[asked, uneven, ("SLURM_NODEID", "2")]), 2);
    let without_list = without(&SLURM, "SLURM_TASKS_PER_NODE");
    let launched = of(&with(&without_list, &[asked])).expect("complete");
    assert_eq!(launched.local_ranks, 3);

    for (list, node, tasks) in [
        ("4", 0, Some(4)),
        ("4", 1, None),
        ("4(x2),3", 2, Some(3)),
        ("4(x2,3", 0, None),
        ("4(xy),3", 0, None),
        ("", 0, None),
    ] {
        assert_eq!(tasks_of_node(list, node), tasks, "{list}");
    }
}

#[test]
fn every_missing_variable_is_named() {
    for (launcher, optional) in [
        (&TORCHRUN, ["LOCAL_WORLD_SIZE", ""]),
        (&SLURM, ["SLURM_TASKS_PER_NODE", "SLURM_NODELIST"]),
    ] {
        for (name, _) in launcher {
            let rest = without(launcher, name);
            match of(&rest) {
                Ok(_) => assert!(optional.contains(name), "{name}"),
                Err(error) if *name == "SLURM_PROCID" => {
                    assert!(error.contains("neither RANK (torchrun) nor SLURM_PROCID"));
                }
                Err(error) => assert!(error.contains(name), "{name}: {error}"),
            }
        }
    }
}

#[test]
fn what_contradicts_itself_is_refused() {
    let said = |name: &'static str, value: &'static str| {
        let rest = without(&TORCHRUN, name);
        of(&with(&rest, &[(name, value)])).expect_err("refused")
    };
    assert!(said("RANK", "16").contains("RANK is 16 and WORLD_SIZE is 16"));
    assert!(said("LOCAL_RANK", "8").contains("LOCAL_RANK is 8"));
    assert!(said("RANK", "-1").contains("RANK: found \"-1\", expected a whole number"));
    assert!(said("MASTER_PORT", "70000").contains("MASTER_PORT: found \"70000\""));
    assert!(said("MASTER_ADDR", " ").contains("MASTER_ADDR is not set"));
}

#[test]
fn golden_the_first_host_of_a_list() {
    for (list, first) in [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3-5]", "node3"),
        ("node[03,05-07],x[1-2]", "node03"),
        ("r[1-2]n[04-05]-ib,z", "r1n04-ib"),
    ] {
        assert_eq!(first_host(list).as_deref(), Some(first));
    }
    assert_eq!(first_host(""), None);
    assert_eq!(first_host("node[1"), None);
}

#[test]
fn a_timeout_is_seconds_that_somebody_may_wait() {
    for (said, time) in [
        (" 0.5 ", Duration::from_millis(500)),
        ("2592000", LONGEST_TIMEOUT),
    ] {
        assert_eq!(timeout_of(said).expect("sensible"), time);
    }
    for senseless in ["0", "-1", "nan", "inf", "2592001", "1e19", "ten"] {
        let error = timeout_of(senseless).expect_err("refused").to_string();
        assert!(
            error.contains(&format!("MOEFOLD_TIMEOUT_S: found {senseless:?}"))
                && error.contains("at most 2592000 (30 days)"),
            "{error}"
        );
    }
}

#[test]
fn a_secret_comes_from_the_environment_or_a_file_and_is_long_enough() {
    let of = |more: &[(&str, &str)]| of(&with(&without(&TORCHRUN, SECRET.0), more));
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("UTF-8");
    let named = [("MOEFOLD_SECRET_FILE", path)];
    let error = of(&named).expect_err("it is empty");
    assert!(
        error.contains(path) && error.contains("found 0 bytes, expected at least 16"),
        "{error}"
    );
    std::fs::write(path, format!("{}\n", SECRET.1)).expect("written");
    let same = [of(&named), of(&[SECRET])].map(|launched| launched.expect("complete").secret);
    assert_eq!(same[0], same[1]);
    let error = of(&[]).expect_err("there is none");
    assert!(
        error.contains("MOEFOLD_SECRET is not set") && error.contains("/dev/urandom"),
        "{error}"
    );
    let error = of(&[(SECRET.0, "short")]).expect_err("it is short");
    assert!(error.contains("found 5 bytes"), "{error}");
    let error = of(&[("MOEFOLD_SECRET_FILE", "/no/such")]).expect_err("it is not there");
    assert!(error.contains("/no/such"), "{error}");
    let alone = without(&TORCHRUN, SECRET.0)
        .into_iter()
        .map(|(name, said)| match name {
            "RANK" | "LOCAL_RANK" => (name, "0"),
            "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => (name, "1"),
            _ => (name, said),
        });
    super::tests::of(&alone.collect::<Vec<_>>()).expect("one rank has nobody to know");
}
