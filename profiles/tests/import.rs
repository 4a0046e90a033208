//! Imports of other people's measurements, held to what the files say when read by hand.
//!
//! `kineto-cpu.json` was made by PyTorch 2.15 itself, under `torch.profiler.profile(record_shapes=True)`:
//! one step of a tiny model on a CPU over two sequences of 16 tokens. The model is an embedding of 96 by 32,
//! RMSNorm, attention with two heads of 16, LayerNorm, an MLP of 64 and a head; gradients are clipped, AdamW
//! is fused. Views and other ops that take no time of their own were cut from it afterwards. `kineto-gloo.json`
//! is of one of two ranks, made and cut in the same way: a linear layer of 64 by 64 over 32 tokens, and six
//! collectives. The other fixtures were written for these tests in the layouts of the tools they are named after.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use moefold_profiles::directory::{Key, Taken};
use moefold_profiles::import::{Format, ImportError, Imported, Options, import};
use moefold_profiles::units::{Bytes, GIB, MIB};
use moefold_profiles::{
    Collective, CollectiveKind, Direction, Dtype, HostCost, Op, Pass, Profile, SweepKind,
};

fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    folder.join("tests/fixtures").join(name)
}

fn read(name: &str) -> Imported {
    import(&fixture(name), &Options::default()).expect("it is read")
}

fn on(device: &str) -> Options<'_> {
    Options {
        device: Some(device),
        ..Options::default()
    }
}

/// Timings by key.
fn timings(imported: &Imported) -> BTreeMap<Key, Vec<f64>> {
    let samples = imported.profile.samples.iter();
    samples
        .map(|sample| (sample.key, sample.seconds.clone()))
        .collect()
}

fn gemm([m, n, k]: [u64; 3], pass: Pass, dtype: Dtype) -> Key {
    Key::Op(Op::Gemm {
        m,
        n,
        k,
        pass,
        dtype,
    })
}

fn collective(kind: CollectiveKind, bytes: u64, [ranks, of_domain]: [u32; 2]) -> Key {
    Key::Collective(Collective {
        kind,
        bytes: Bytes(bytes),
        ranks,
        ranks_per_domain: of_domain,
    })
}

fn close(found: f64, expected: f64) {
    let far = (found - expected).abs();
    assert!(far <= 1e-9 * expected.abs(), "{found}, not {expected}");
}

/// Timings of a key, in microseconds.
fn micros(imported: &Imported, key: &Key) -> Vec<f64> {
    let timings = timings(imported);
    let found = timings.get(key).unwrap_or_else(|| panic!("no {key:?}"));
    found
        .iter()
        .map(|seconds| (seconds * 1e9).round() / 1e3)
        .collect()
}

#[test]
fn golden_a_trace_of_a_cpu_has_every_product_of_its_model_in_three_passes() {
    let imported = read("kineto-cpu.json");
    assert_eq!(imported.format, Format::Kineto);
    assert_eq!(imported.profile.device, "cpu");
    let samples = &imported.profile.samples;
    assert!(samples.iter().all(|sample| sample.taken == Taken::Training));
    // Linear layers as [tokens, out, in], and how many there are: attention's input has the shape of the head.
    let linears = [
        ([32, 96, 32], 2),
        ([32, 32, 32], 1),
        ([32, 64, 32], 1),
        ([32, 32, 64], 1),
    ];
    let found = timings(&imported);
    for ([m, n, k], layers) in linears {
        for (shape, pass) in [
            ([m, n, k], Pass::Forward),
            ([m, k, n], Pass::Dgrad),
            ([n, k, m], Pass::Wgrad),
        ] {
            let key = gemm(shape, pass, Dtype::F32);
            let times = found.get(&key).map_or(0, Vec::len);
            assert_eq!(times, layers, "{key:?}");
        }
    }
    let gemms = found.keys().filter(|key| key.stem() == "gemm");
    assert_eq!(gemms.count(), 3 * linears.len());
}

#[test]
fn golden_a_trace_of_a_cpu_has_the_other_ops_of_its_model() {
    let found = timings(&read("kineto-cpu.json"));
    let dtype = Dtype::F32;
    let count = |op: Op| found.get(&Key::Op(op)).map_or(0, Vec::len);
    for pass in [Pass::Forward, Pass::Backward] {
        let attention = Op::Attention {
            batch: 2,
            heads: 2,
            kv_heads: 2,
            q_len: 16,
            kv_len: 16,
            qk_dim: 16,
            v_dim: 16,
            causal: true,
            pass,
            dtype,
        };
        assert_eq!(count(attention), 1, "{pass:?}");
        let (rows, dim, vocab) = (32, 32, 96);
        assert_eq!(
            count(Op::Embedding {
                rows,
                dim,
                pass,
                dtype
            }),
            1
        );
        assert_eq!(
            count(Op::CrossEntropy {
                rows,
                vocab,
                pass,
                dtype
            }),
            1
        );
        // PyTorch has no kernel for the gradient of RMSNorm on a CPU: its parts are left out.
        let norms = if pass == Pass::Forward { 2 } else { 1 };
        assert_eq!(
            count(Op::RmsNorm {
                rows,
                dim,
                pass,
                dtype
            }),
            norms
        );
    }
    // Every parameter: embedding, two norms of which one has a bias, products, one of them with a bias.
    let len = 96 * 32 + 32 + 2 * 32 + (96 + 32 + 64) * 32 + 64 + 32 * 64 + 96 * 32;
    assert_eq!(
        count(Op::Adamw {
            len,
            dtype,
            moments: Dtype::F32,
            remainders: false,
        }),
        1
    );
    assert_eq!(count(Op::GradNorm { len }), 1);
}

/// A reduce-scatter is an all-reduce in Gloo.
#[test]
fn golden_collectives_of_hosts_have_the_bytes_that_ranks_gave() {
    let imported = read("kineto-gloo.json");
    assert_eq!(imported.profile.device, "cpu");
    assert_eq!(imported.profile.concurrent_ranks, 2);
    let tensor = 32 * 64 * 4;
    for (kind, bytes, times) in [
        (CollectiveKind::AllReduce, 64 * 64 * 4, vec![5316.605]),
        (CollectiveKind::AllReduce, tensor, vec![7938.304]),
        (
            CollectiveKind::AllGather,
            2 * tensor,
            vec![3838.653, 3395.726],
        ),
        (CollectiveKind::AllToAll, tensor, vec![152.346]),
        (CollectiveKind::Broadcast, 64 * 64 * 4, vec![585.548]),
    ] {
        assert_eq!(micros(&imported, &collective(kind, bytes, [2, 2])), times);
    }
    let mut left = imported.left_out.iter();
    let of_host = left.find(|left| left.name == "c10d::allreduce_");
    let of_host = of_host.expect("called");
    assert_eq!(of_host.why, "the host's part of a collective");
    let time = imported.device_time.expect("a trace has time");
    assert!(time.collective_s > 0.02, "{time:?}");
}

#[test]
fn law_all_time_of_a_trace_is_sampled_or_left_out() {
    for name in ["kineto-cpu.json", "kineto-gloo.json", "kineto-gpu.json"] {
        let imported = read(name);
        let sampled: f64 = timings(&imported).values().flatten().sum();
        let left: f64 = imported
            .left_out
            .iter()
            .filter_map(|item| item.seconds)
            .sum();
        let share: f64 = imported.left_out.iter().filter_map(|item| item.share).sum();
        assert!(sampled > 0.0 && left > 0.0, "{name}");
        assert!(
            (share - left / (sampled + left)).abs() < 1e-3,
            "{name}: {share}"
        );
        let time = imported.device_time.expect("a trace has time");
        close(time.busy_s + time.idle_s, time.span_s);
        assert!(time.busy_s <= (sampled + left) * (1.0 + 1e-9), "{name}");
    }
}

#[test]
fn golden_kernels_are_given_to_the_ops_that_launched_them() {
    let imported = read("kineto-gpu.json");
    assert_eq!(imported.profile.device, "h100");
    assert_eq!(imported.profile.concurrent_ranks, 4);
    assert_eq!(imported.profile.versions, ["CUDA runtime 12.4"]);
    // Both kernels of the product are its time, and the copy that it caused is not.
    let of = |shape, pass| micros(&imported, &gemm(shape, pass, Dtype::Bf16));
    assert_eq!(of([64, 128, 256], Pass::Forward), [12.0]);
    // Autograd computed the weight's gradient transposed; keys have it one way.
    assert_eq!(of([128, 256, 64], Pass::Wgrad), [11.0]);
    assert_eq!(of([64, 256, 128], Pass::Dgrad), [12.0]);
    let copy = Key::Host(HostCost::Copy {
        bytes: Bytes(4096),
        direction: Direction::ToDevice,
    });
    assert_eq!(micros(&imported, &copy), [3.0]);
    let left: BTreeMap<&str, f64> = imported
        .left_out
        .iter()
        .map(|item| (item.name.as_str(), item.seconds.expect("a time") * 1e6))
        .collect();
    let expected = [
        // Linked by the call of the runtime alone.
        ("aten::silu", 3.0),
        ("aten::mm", 1.0),
        ("ncclDevKernel_Generic_1", 1.0),
        ("triton_poi_fused_add_0", 4.0),
    ];
    assert_eq!(left.len(), expected.len(), "{left:?}");
    for (name, micros) in expected {
        close(left[name], micros);
    }
}

#[test]
fn golden_collectives_of_a_trace_have_bytes_and_places_of_their_ranks() {
    let imported = read("kineto-gpu.json");
    // Two GPUs a host: four ranks lie on two, and ranks 0 and 2 on one each.
    let gather = collective(CollectiveKind::AllGather, 4096 * 2, [4, 2]);
    assert_eq!(micros(&imported, &gather), [25.0]);
    let reduce = collective(CollectiveKind::AllReduce, 256 * 4, [2, 1]);
    assert_eq!(micros(&imported, &reduce), [5.0]);
    let time = imported.device_time.expect("a trace has time");
    // Work from 150 to 258; gaps from 180 to 190, 195 to 196, 200 to 210, 221 to 235, 247 to 250, 251 to 254.
    close(time.span_s, 108e-6);
    close(time.idle_s, 41e-6);
    close(time.collective_s, 31e-6);
    // The gather is alone from 165 to 180.
    close(time.exposed_collective_s, 21e-6);
    assert!(imported.notes[0].contains("waited"), "{:?}", imported.notes);
}

#[test]
fn a_compressed_trace_is_the_same_trace() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path().join("trace.json.gz");
    let text = std::fs::read(fixture("kineto-gpu.json")).expect("a fixture");
    let file = std::fs::File::create(&path).expect("writable");
    let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    packed.write_all(&text).expect("writable");
    packed.finish().expect("writable");
    let imported = import(&path, &Options::default()).expect("it is read");
    assert_eq!(
        imported.profile.samples,
        read("kineto-gpu.json").profile.samples
    );
}

#[test]
fn golden_nccl_tests_give_both_times_of_a_row() {
    let imported = read("nccl-tests.txt");
    assert_eq!(imported.format, Format::NcclTests);
    assert_eq!(imported.profile.device, "h100");
    let of = |kind, bytes| micros(&imported, &collective(kind, bytes, [4, 2]));
    assert_eq!(of(CollectiveKind::AllReduce, MIB), [100.0, 104.0]);
    assert_eq!(of(CollectiveKind::AllReduce, 4 * MIB), [200.0, 196.0]);
    assert_eq!(of(CollectiveKind::AllToAll, MIB), [300.0]);
    assert_eq!(imported.profile.samples.len(), 3);
    assert_eq!(imported.left_out[0].why, "no bytes");
    let text = std::fs::read_to_string(fixture("nccl-tests.txt")).expect("a fixture");
    let wrong = text.replace("31.46      0 ", "31.46      7 ");
    let imported = import(written(&wrong).path(), &Options::default()).expect("it is read");
    assert_eq!(imported.profile.samples.len(), 2);
    let whys: Vec<&str> = imported
        .left_out
        .iter()
        .map(|left| left.why.as_str())
        .collect();
    assert!(whys.contains(&"wrong results"), "{whys:?}");
}

/// A file with this text.
fn written(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_bytes()).expect("writable");
    file
}

#[test]
fn a_table_of_nccl_tests_without_operation_and_root_is_read() {
    let text = "# Using devices\n\
        #   Rank  0 Pid   1 on node device  0 [0x07] NVIDIA A100-SXM4-80GB\n\
        #   Rank  1 Pid   1 on node device  1 [0x0f] NVIDIA A100-SXM4-80GB\n\
        $ ./build/all_gather_perf -b 1M -e 1M -g 2\n\
        #       size         count      type   redop    root     time   algbw   busbw  error     time   algbw   busbw  error\n\
             1048576        131072     float                     50.0   20.97   10.49  0e+00     51.0   20.56   10.28  0e+00\n";
    let imported = import(written(text).path(), &Options::default()).expect("it is read");
    let key = collective(CollectiveKind::AllGather, MIB, [2, 2]);
    assert_eq!(micros(&imported, &key), [50.0, 51.0]);
    assert_eq!(imported.profile.device, "a100");
}

/// What launchers put before a line, and names that tests are given, change nothing.
#[test]
fn nccl_tests_are_read_as_launchers_and_people_leave_them() {
    let text = std::fs::read_to_string(fixture("nccl-tests.txt")).expect("a fixture");
    let plain = read("nccl-tests.txt").profile.samples;
    for tag in [
        "[1,0]<stdout>:",
        "[prterun-a-1@1,0]<stdout>: ",
        "0: ",
        " 3: ",
    ] {
        let tagged: Vec<String> = text.lines().map(|line| format!("{tag}{line}")).collect();
        let imported =
            import(written(&tagged.join("\n")).path(), &Options::default()).expect("it is read");
        assert_eq!(imported.profile.samples, plain, "{tag}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (head, _) = text
        .split_once("# Collective test starting: alltoall")
        .expect("a second");
    let unnamed = head.replace("# Collective test starting: all_reduce_perf", "#");
    let named = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, &unnamed).expect("writable");
        import(&path, &Options::default())
    };
    for name in ["nccl_all_reduce_perf.out", "all_reduce_perf_mpi.txt"] {
        let of = micros(
            &named(name).expect("it is read"),
            &collective(CollectiveKind::AllReduce, MIB, [4, 2]),
        );
        assert_eq!(of, [100.0, 104.0], "{name}");
    }
    let refused = named("my_reduce_perf.txt")
        .expect_err("no price")
        .to_string();
    let expected = "rows of my_reduce_perf are left out: prices know no such collective";
    assert!(refused.contains(expected), "{refused}");
}

/// The last line of a job that was killed may end anywhere, in a number too.
#[test]
fn a_line_of_a_log_that_is_cut_off_is_left_out() {
    let line = |number: u32| {
        format!(
            " iteration {number}/ 9 | elapsed time per iteration (ms): 1250.5 | global batch size: 8 | lm loss: 2.0 |\n"
        )
    };
    let whole: String = (1..5).map(line).collect();
    let last = line(5);
    for end in ["(ms): 12", "(ms): 1250", "size: 8", "loss: 2.0"] {
        let at = last.find(end).expect("is there") + end.len();
        let text = format!("{whole}{}", &last[..at]);
        let imported = import(written(&text).path(), &on("h100")).expect("it is read");
        let steps = imported.profile.steps.expect("a log has steps");
        assert_eq!(
            (steps.seconds, steps.global_batch),
            (vec![1.2505; 3], Some(8))
        );
        let whys: Vec<&str> = imported.left_out.iter().map(|item| &*item.why).collect();
        assert!(whys.contains(&"its line is cut off"), "{end}: {whys:?}");
    }
    // A line without its line feed is whole where it ends as the others do.
    let text = format!("{whole}{}", last.trim_end());
    let imported = import(written(&text).path(), &on("h100")).expect("it is read");
    assert_eq!(imported.profile.steps.expect("steps").seconds.len(), 4);
}

#[test]
fn golden_steps_of_a_log_are_those_after_warm_up() {
    let imported = import(&fixture("megatron.log"), &on("h100")).expect("it is read");
    assert_eq!(imported.format, Format::MegatronLog);
    assert!(imported.profile.samples.is_empty());
    let steps = imported.profile.steps.expect("a log has steps");
    assert_eq!(steps.seconds, [1.003, 1.0015, 0.999]);
    assert_eq!(steps.global_batch, Some(32));
    let bytes = Bytes((51_200.25 * MIB as f64) as u64);
    assert_eq!(steps.peak_allocated, Some(bytes), "that of the worst rank");
    assert!(
        steps
            .source
            .contains("megatron.log: 3 of 4 logged iterations, from 2 to 4"),
        "{}",
        steps.source
    );
    assert_eq!(imported.left_out[0].why, "warm-up");
    close(imported.left_out[0].seconds.expect("a time"), 21.4027);
}

#[test]
fn a_run_that_began_again_warms_up_again_and_other_batches_are_left_out() {
    let line = |number: u32, ms: f64, batch: u32| {
        format!(
            " iteration {number}/ 9 | elapsed time per iteration (ms): {ms} | global batch size: {batch} |\n"
        )
    };
    let text = [
        line(1, 900.0, 8),
        line(2, 100.0, 8),
        line(3, 200.0, 16),
        line(3, 800.0, 16),
        line(4, 201.0, 16),
    ];
    let imported = import(written(&text.concat()).path(), &on("b200")).expect("it is read");
    let steps = imported.profile.steps.expect("a log has steps");
    assert_eq!(steps.seconds, [0.2, 0.201]);
    assert_eq!(steps.global_batch, Some(16));
    let left: u64 = imported.left_out.iter().map(|item| item.count).sum();
    assert_eq!(left, 3);
    // One line alone is kept, with a warning.
    let one = import(written(&text[0]).path(), &on("b200")).expect("it is read");
    assert_eq!(one.profile.steps.expect("a step").seconds, [0.9]);
    assert_eq!(one.notes.len(), 1);
}

#[test]
fn golden_efficiencies_become_the_times_they_were_computed_from() {
    let imported = read("simumax.json");
    assert_eq!(imported.format, Format::Simumax);
    assert_eq!(imported.profile.device, "a100-pcie");
    let found = timings(&imported);
    let flops = 2.0 * 4096.0 * 5120.0 * 1536.0;
    for (shape, pass, efficiency) in [
        ([4096, 1536, 5120], Pass::Forward, 0.5),
        ([4096, 5120, 1536], Pass::Dgrad, 0.25),
        ([1536, 5120, 4096], Pass::Wgrad, 0.125),
    ] {
        let seconds = &found[&gemm(shape, pass, Dtype::Bf16)];
        assert_eq!(seconds.len(), 1, "gradients in bf16 are left out");
        close(seconds[0], flops / (312e12 * efficiency));
    }
    let grouped = Key::Op(Op::GroupedGemm {
        groups: 40,
        rows: 40 * 616,
        n: 3072,
        k: 5120,
        pass: Pass::Wgrad,
        dtype: Dtype::Bf16,
    });
    close(
        found[&grouped][0],
        2.0 * 40.0 * 616.0 * 3072.0 * 5120.0 / 156e12,
    );
    // Five halves of the forward work over all scores (4 S^2 d a head), at 312 and 156 TFLOP/s.
    let attention = Key::Op(Op::Attention {
        batch: 1,
        heads: 32,
        kv_heads: 8,
        q_len: 4096,
        kv_len: 4096,
        qk_dim: 128,
        v_dim: 128,
        causal: true,
        pass: Pass::Backward,
        dtype: Dtype::Bf16,
    });
    let work = 2.5 * 4.0 * 4096.0_f64.powi(2) * 128.0 * 32.0;
    let mut seconds = found[&attention].clone();
    seconds.sort_by(f64::total_cmp);
    close(seconds[0], work / 312e12);
    close(seconds[1], work / 156e12);
    let left: Vec<&str> = imported
        .left_out
        .iter()
        .map(|item| item.name.as_str())
        .collect();
    assert_eq!(left, ["default", "inter_node", "matmul"]);
}

#[test]
fn golden_fits_become_times_at_sizes() {
    let found = timings(&read("simumax.json"));
    // Read twice, written once, at half of 1000 GiB/s, and 40 us.
    let add = Key::Op(Op::Add {
        len: 1 << 24,
        dtype: Dtype::Bf16,
    });
    let rate = 500.0 * GIB as f64;
    close(
        found[&add][0],
        3.0 * 2.0 * f64::from(1 << 24) / rate + 40e-6,
    );
    let permute = Key::Op(Op::Permute {
        rows: 4096,
        dim: 2048,
        pass: Pass::Forward,
        dtype: Dtype::Bf16,
    });
    let bytes = 2.0 * 4096.0 * 2048.0 * 3.125;
    close(found[&permute][0], bytes / (rate / 2.0) + 40e-6);
    let copy = Key::Op(Op::Sweep {
        kind: SweepKind::Copy,
        len: 1 << 31,
        dtype: Dtype::Bf16,
    });
    assert!(found.contains_key(&copy));
    let unfused = Key::Op(Op::CrossEntropy {
        rows: 1024,
        vocab: 4096,
        pass: Pass::Forward,
        dtype: Dtype::Bf16,
    });
    close(found[&unfused][0], 38.0 * 1024.0 * 4096.0 / rate + 40e-6);
    // Six steps of a ring of four at 3 us; three quarters of the bytes leave twice, at 8 GiB/s.
    let reduce = collective(CollectiveKind::AllReduce, 16 * MIB, [4, 4]);
    let leaving = 1.5 * 16.0 * MIB as f64;
    close(found[&reduce][0], leaving / (8.0 * GIB as f64) + 18e-6);
    let exchange = collective(CollectiveKind::AllToAll, 16 * MIB, [4, 4]);
    let leaving = 0.75 * 16.0 * MIB as f64;
    close(found[&exchange][0], leaving / (4.0 * GIB as f64) + 26e-6);
    let send = collective(CollectiveKind::SendRecv, MIB, [2, 2]);
    close(found[&send][0], MIB as f64 / (8.0 * GIB as f64) + 10e-6);
    assert!(
        !found
            .keys()
            .any(|key| matches!(key, Key::Collective(key) if key.ranks == 8))
    );
}

#[test]
fn law_what_is_imported_is_a_profile() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    for name in [
        "kineto-cpu.json",
        "kineto-gloo.json",
        "kineto-gpu.json",
        "nccl-tests.txt",
        "megatron.log",
        "simumax.json",
    ] {
        let options = if name == "megatron.log" {
            on("h100")
        } else {
            Options::default()
        };
        let imported = import(&fixture(name), &options).expect("it is read");
        let out = folder.path().join(name);
        imported.profile.save(&out).expect("writable");
        assert_eq!(Profile::load(&out).expect("readable"), imported.profile);
    }
}

/// What a file with this text is refused with.
fn refusal(text: &str, options: &Options<'_>) -> ImportError {
    import(written(text).path(), options).expect_err("refused")
}

#[test]
fn refusals_name_the_place_what_was_found_and_what_was_expected() {
    let check = |text: &str, options: &Options<'_>, parts: &[&str]| {
        let error = refusal(text, options).to_string();
        for part in parts {
            assert!(error.contains(part), "{error} does not say {part}");
        }
    };
    let any = Options::default();
    check(
        "step 1 took 3 s\n",
        &any,
        &["`step 1 took 3 s`", "nccl-tests", "--format"],
    );
    check("{\"a\": 1}", &any, &["`{\"a\": 1}`"]);
    check(
        "{\"traceEvents\": [{\"ph\": \"X\"},]}",
        &any,
        &["line 1 column", "trace of torch.profiler"],
    );
    check(
        "{\"traceEvents\": []}",
        &any,
        &["nothing to import", "schedule"],
    );
    let log = std::fs::read_to_string(fixture("megatron.log")).expect("a fixture");
    check(&log, &any, &["--device", "cpu", "h100"]);
    check(&log, &on("h1000"), &["`h1000`", "h100"]);
    let broken = log.replace("(ms): 1003.0", "(ms): soon");
    check(
        &broken,
        &on("h100"),
        &["line 5", "`soon`", "a number above 0"],
    );
    let nccl = std::fs::read_to_string(fixture("nccl-tests.txt")).expect("a fixture");
    let broken = nccl.replace("300.0    3.50", "3x0.0    3.50");
    check(&broken, &any, &["line 24", "`3x0.0`"]);
    let broken = nccl.replace("all_reduce_perf", "a test");
    check(&broken, &any, &["line 15", "all_gather_perf"]);
    let broken = nccl.replace("# Collective test starting: alltoall_perf", "");
    let broken = broken.replace("Rank", "rank");
    check(&broken, &any, &["line 15", "a list of devices"]);
    let system = std::fs::read_to_string(fixture("simumax.json")).expect("a fixture");
    let broken = system.replace("layout=TN", "layout=TT");
    check(
        &broken,
        &any,
        &["accelerator.op.matmul", "`layout=TT`", "TN, NN or NT"],
    );
    let broken = system.replace("\"offset\": -1", "\"shift\": -1");
    check(&broken, &any, &["networks.intra_node_pcie_4x", "offset"]);
    let broken = system.replace("\"gbps\": 1000", "\"gbps\": -1");
    check(
        &broken,
        &any,
        &["accelerator.bandwidth", "gbps", "-1", "above 0"],
    );
    let unnamed = system.replace("a100_pcie_bf16", "my_cluster");
    check(&unnamed, &any, &["--device"]);
    // What the caller says a file is, it must be.
    let forced = Options {
        format: Some(Format::Simumax),
        ..any
    };
    check(&log, &forced, &["system file of SimuMax", "line 1"]);
    let missing = import(Path::new("/nonexistent"), &any).expect_err("refused");
    assert!(missing.to_string().contains("/nonexistent"));
}

#[test]
fn a_trace_without_shapes_says_what_would_help() {
    let text = std::fs::read_to_string(fixture("kineto-cpu.json")).expect("a fixture");
    let error = refusal(
        &text.replace("Input Dims", "Input Places"),
        &Options::default(),
    );
    assert!(error.to_string().contains("record_shapes=True"), "{error}");
}
