//! The order of places, in a made-up file system.

use super::*;

#[test]
fn places_come_in_the_stated_order_and_only_once() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let folder = |path: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(&path).expect("a folder");
        path
    };
    let home = folder("toolkit");
    folder("toolkit/lib64");
    folder("toolkit/targets/x86_64-linux/lib");
    folder("usr/local/cuda-12.9/lib64");
    folder("usr/local/cuda-12.10/lib64");
    folder("usr/local/cuda-other/lib64");
    folder("venv/lib/python3.9/site-packages/nvidia/cu13/lib");
    folder("venv/lib/python3.12/site-packages/nvidia/nccl/lib");
    folder("venv/lib/python3.12/site-packages/nvidia/nccl/include");
    folder("venv/bin");
    std::fs::write(root.path().join("venv/bin/python3"), "").expect("a file");
    let environment = Environment {
        moefold_cuda: Some(format!("{0}/mine::{0}/toolkit", root.path().display()).into()),
        cuda_home: Some(home.clone().into()),
        cuda_path: Some(home.into()),
        virtual_env: Some(root.path().join("venv").into()),
        conda_prefix: None,
        path: Some(format!("/nowhere:{}/venv/bin", root.path().display()).into()),
        home: None,
        root: root.path().to_owned(),
    };
    let found: Vec<String> = places(&environment)
        .iter()
        .map(|place| {
            place
                .to_string()
                .replace(&root.path().display().to_string(), "")
        })
        .collect();
    assert_eq!(
        found,
        [
            "/mine (MOEFOLD_CUDA)",
            "/toolkit (MOEFOLD_CUDA)",
            "/toolkit/lib64 (MOEFOLD_CUDA)",
            "/toolkit/targets/x86_64-linux/lib (MOEFOLD_CUDA)",
            "LD_LIBRARY_PATH and the system's loader",
            "/usr/local/cuda-12.10/lib64 (a toolkit's usual place)",
            "/usr/local/cuda-12.9/lib64 (a toolkit's usual place)",
            "/venv/lib/python3.12/site-packages/nvidia/nccl/lib (VIRTUAL_ENV)",
            "/venv/lib/python3.9/site-packages/nvidia/cu13/lib (VIRTUAL_ENV)",
        ]
    );
}

#[test]
fn debian_has_the_wheels_of_its_python_in_the_next_prefix() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let wheel = root
        .path()
        .join("usr/local/lib/python3.11/dist-packages/nvidia/cublas/lib");
    std::fs::create_dir_all(&wheel).expect("a folder");
    let bin = root.path().join("usr/bin");
    std::fs::create_dir_all(&bin).expect("a folder");
    std::fs::write(bin.join("python3"), "").expect("a file");
    let environment = Environment {
        path: Some(bin.into()),
        root: root.path().to_owned(),
        ..Environment::default()
    };
    let because = "python3 on PATH";
    let wheel = Place::Folder {
        path: wheel,
        because,
    };
    assert_eq!(places(&environment), [Place::Loader, wheel]);
}

#[test]
fn an_empty_machine_has_the_loader_alone() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let environment = Environment {
        root: root.path().to_owned(),
        ..Environment::default()
    };
    assert_eq!(places(&environment), [Place::Loader]);
}
