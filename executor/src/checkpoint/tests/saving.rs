//! A run leaves whole checkpoints and nothing else, also where it cannot write or remove one.

use std::fs;
use std::path::Path;

use super::layouts::save_marked;
use super::*;

#[test]
fn a_run_keeps_its_last_checkpoints_and_nothing_half_written() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let all = run.path().join(FOLDER);
    assert_eq!(names(&all), ["step-3", "step-4"]);
    let files = names(&all.join("step-4"));
    assert_eq!(files[0], INDEX);
    assert_eq!(files.len(), 5, "{files:?}");
    let found = find(run.path()).expect("there are two");
    let expected = Resumed {
        checkpoint: all.join("step-4"),
        step: 4,
    };
    assert_eq!(found.resumed, expected);
    let named = find(&all.join("step-3")).expect("it is there");
    assert_eq!(named.resumed.step, 3);
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_nothing() {
    let mut bench = Bench::new("mixtral", 8);
    bench.options.steps = 2;
    let failed = |plant: &dyn Fn(&Path)| {
        let run = folder();
        let all = run.path().join(FOLDER);
        fs::create_dir_all(&all).expect("creates");
        plant(&all.join("step-2.partial"));
        let failed = bench.train([4, 2, 4, 1, 2], &bench.saving(2, run.path()));
        let error = failed.expect_err("it cannot be written");
        assert!(!error.is_bad_request(), "{error}");
        assert_eq!(names(&all), [""; 0]);
        error.to_string()
    };
    // A file is where the folder should be, and a folder where the file of a rank should be.
    let text = failed(&|partial| fs::write(partial, "").expect("writes"));
    assert!(text.contains("step-2.partial: could not create"), "{text}");
    let text = failed(&|partial| {
        fs::create_dir_all(partial.join("rank-1.safetensors")).expect("creates");
    });
    for part in [
        "step-2.partial/rank-1.safetensors: could not write the checkpoint",
        "MiB: Is a directory",
        "goes on from the last complete one, if any",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn every_rank_removes_what_it_wrote_of_a_checkpoint_that_failed() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    let failing = partial(&run.path().join(FOLDER), 5);
    let blocked = failing.join("rank-2.safetensors");
    fs::create_dir_all(&blocked).expect("creates");
    save_marked(&bench, [4, 2, 4, 1, 2], run.path(), 5).expect_err("a folder is in the way");
    assert_eq!(names(&failing), ["rank-2.safetensors"]);
    fs::remove_dir(&blocked).expect("only what was planted is left");
    let written = save_marked(&bench, [4, 2, 4, 1, 2], run.path(), 5).expect("saves");
    let sizes: Vec<u64> = written.iter().map(|written| written.bytes).collect();
    assert_eq!(
        sizes[0],
        sizes[1..].iter().sum::<u64>() + first_file(&written[0].dir)
    );
}

/// Bytes of rank 0's file.
fn first_file(dir: &Path) -> u64 {
    let file = fs::metadata(dir.join("rank-0.safetensors"));
    file.expect("it is there").len()
}

#[test]
fn an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    let all = run.path().join(FOLDER);
    let save = |step| {
        let written = save_marked(&bench, [2, 1, 2, 1, 2], run.path(), step).expect("saves");
        written[0].not_removed.clone()
    };
    assert_eq!([save(1), save(2)], [[""; 0]; 2]);
    // A folder cannot take a file's name.
    fs::write(all.join("step-1.partial"), "").expect("writes");
    let said = save(3);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("step-1: could not remove"), "{said:?}");
    assert_eq!(names(&all), ["step-1", "step-2", "step-3"]);
    assert_eq!(save(4), [""; 0]);
    assert_eq!(names(&all), ["step-3", "step-4"]);
}

#[test]
fn a_file_that_rank_0_does_not_see_is_told_by_where_it_was_written() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    save_marked(&bench, [2, 1, 2, 1, 2], run.path(), 1).expect("saves");
    let all = run.path().join(FOLDER);
    let (whole, dir) = (folder_of(&all, 1), partial(&all, 1));
    let index = Index::load(&whole).expect("an index");
    fs::rename(&whole, &dir).expect("renames");
    fs::remove_file(dir.join("rank-1.safetensors")).expect("removes");
    let refused = |apart| write::commit(&all, &index, apart).expect_err("a file is missing");
    let (of_processes, of_threads) = (refused(true), refused(false));
    assert!(of_processes.is_bad_request(), "{of_processes}");
    let text = of_processes.to_string();
    for part in [
        "rank-1.safetensors: is missing from its checkpoint",
        "a run directory that all of them share",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // Ranks of one process have one file system.
    assert!(!of_threads.is_bad_request(), "{of_threads}");
    assert!(!of_threads.to_string().contains("share"), "{of_threads}");
    // Not to be read is not to be missing.
    std::os::unix::fs::symlink("rank-1.safetensors", dir.join("rank-1.safetensors"))
        .expect("links");
    let unreadable = refused(true);
    assert!(!unreadable.is_bad_request(), "{unreadable}");
    assert!(
        unreadable.to_string().contains("could not measure"),
        "{unreadable}"
    );
}
