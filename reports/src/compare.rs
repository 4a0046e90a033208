//! [`compare`]: from plans and runs to a page, plots and tables.

use std::path::{Path, PathBuf};

use crate::draw::svg;
use crate::figures::Named;
use crate::files::Directory;
use crate::inputs::{Input, paired};
use crate::plots::Plot;
use crate::subject::Comparison;
use crate::{ReportError, figures, findings, html, plots};

/// What a comparison wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The files, `report.html` first.
    pub files: Vec<PathBuf>,
    /// What the comparison says, in sentences, the most important first.
    pub findings: Vec<String>,
    /// The ops of each run, predicted and measured, as aligned text; empty without runs.
    pub ops: String,
}

/// Compares any mix of `plan.json`, output of `plan --json` and run directories, and right after a `plan.json` a log of
/// Megatron-LM or a profile with its steps, and writes what that says into `out_dir`, as
/// [`Page::write`] does.
pub fn compare(inputs: &[PathBuf], out_dir: &Path) -> Result<Written, ReportError> {
    Page::of(inputs)?.write(out_dir)
}

/// What a comparison says, before it is written.
#[derive(Debug)]
pub struct Page {
    findings: Vec<String>,
    ops: String,
    html: String,
    plots: Vec<Plot>,
    tables: Vec<Named>,
}

impl Page {
    /// Reads plans and runs, and puts them side by side.
    pub fn of(inputs: &[PathBuf]) -> Result<Self, ReportError> {
        if inputs.is_empty() {
            return Err(ReportError::NoInputs);
        }
        let read: Vec<Input> = inputs
            .iter()
            .map(|path| Input::read(path))
            .collect::<Result<_, _>>()?;
        let comparison = Comparison::of(paired(read)?);
        if comparison.subjects.is_empty() {
            return Err(ReportError::NoPlans {
                paths: inputs.iter().map(|p| p.display().to_string()).collect(),
            });
        }
        let findings = findings::of(&comparison);
        let plots = plots::all(&comparison);
        let tables = figures::all(&comparison);
        Ok(Self {
            html: html::page(&comparison, &findings, &plots, &tables),
            ops: figures::op_text(&comparison),
            findings,
            plots,
            tables,
        })
    }

    /// Writes `report.html`, every plot as SVG and PNG, `tables.md` and a CSV a table into `out_dir`, which is made where it
    /// is not there. The same inputs give the same bytes.
    pub fn write(self, out_dir: &Path) -> Result<Written, ReportError> {
        let mut out = Directory::create(out_dir)?;
        out.text("report.html", &self.html)?;
        for plot in &self.plots {
            out.text(&format!("{}.svg", plot.stem), &svg::document(&plot.scene))?;
            out.png(&format!("{}.png", plot.stem), &plot.scene)?;
        }
        let mut markdown = String::from("# Comparison\n\n");
        for finding in &self.findings {
            markdown.extend(["- ", finding, "\n"]);
        }
        for table in &self.tables {
            markdown.extend(["\n## ", &table.title, "\n\n", &table.shown.markdown()]);
            out.text(&format!("{}.csv", table.stem), &table.raw.csv())?;
        }
        out.text("tables.md", &markdown)?;
        Ok(Written {
            files: out.into_written(),
            findings: self.findings,
            ops: self.ops,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;
    use moefold_planner::plan::{Plan, ProfileUsed};
    use moefold_profiles::import;
    use moefold_profiles::run::{HostLoad, RunSummary};
    use moefold_profiles::units::Bytes;
    use moefold_profiles::{ByClass, Profile, TensorClass};
    use tempfile::TempDir;

    fn scratch() -> TempDir {
        tempfile::tempdir().expect("a temporary directory")
    }

    fn names(written: &Written) -> Vec<String> {
        let name = |path: &PathBuf| {
            let name = path.file_name().expect("a file");
            name.to_string_lossy().into_owned()
        };
        written.files.iter().map(name).collect()
    }

    fn read(path: impl AsRef<Path>) -> String {
        std::fs::read_to_string(path).expect("readable")
    }

    /// Reading and comparing without drawing PNGs, which is what takes time.
    fn compared(paths: &[PathBuf]) -> Comparison {
        let read = paths.iter().map(|path| Input::read(path).expect("reads"));
        Comparison::of(paired(read.collect()).expect("steps come after their plan"))
    }

    #[test]
    fn law_the_same_inputs_give_the_same_bytes_and_no_leftovers() {
        let dir = scratch();
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let run = sample::write_run(&dir.path().join("run"), &plan, 1.3, 12);
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let first = compare(std::slice::from_ref(&run), &a).expect("compares");
        let second = compare(&[run], &b).expect("compares");
        assert_eq!(first.findings, second.findings);
        assert_eq!(names(&first), names(&second));
        for name in names(&first) {
            let bytes = |dir: &Path| std::fs::read(dir.join(&name)).expect("readable");
            assert!(bytes(&a) == bytes(&b), "{name} differs");
        }
        let left = std::fs::read_dir(&a).expect("readable").count();
        assert_eq!(left, first.files.len());
        for part in [
            "report.html",
            "step-time.svg",
            "step-time.png",
            "memory.svg",
            "memory-by-rank.svg",
            "predicted-measured-steps.svg",
            "predicted-measured-ops.svg",
            "loss.svg",
            "loss.png",
            "expert-load.svg",
            "tables.md",
            "layouts.csv",
            "ops.csv",
        ] {
            assert!(
                names(&first).iter().any(|name| name == part),
                "{part} is not in {:?}",
                names(&first)
            );
        }
        let png = std::fs::read(a.join("loss.png")).expect("readable");
        assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
    }

    #[test]
    fn the_page_needs_nothing_else_and_names_cannot_break_it() {
        let dir = scratch();
        let mut plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        plan.model.name = "</script><b>evil & \"co\"</b>".to_owned();
        let run = sample::write_run(&dir.path().join("<i>run"), &plan, 1.3, 5);
        let comparison = compared(&[run]);
        let plots = plots::all(&comparison);
        let tables = figures::all(&comparison);
        let page = html::page(&comparison, &findings::of(&comparison), &plots, &tables);
        for foreign in [
            "<b>evil", "<i>run", "src=\"", "url(http", "@import", "<link",
        ] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        // The namespace of SVG is a name, not an address that is fetched.
        let addresses = page.matches("http").count();
        assert_eq!(
            addresses,
            page.matches("http://www.w3.org/2000/svg").count()
        );
        assert_eq!(page.matches("</script>").count(), 2);
        assert_eq!(page.matches("<svg").count(), plots.len());
        let start = page.find("id=\"data\">").expect("a data block") + 10;
        let end = start + page[start..].find("</script>").expect("its end");
        let data: serde_json::Value = serde_json::from_str(&page[start..end]).expect("JSON");
        assert_eq!(data["subjects"][0]["model"], plan.model.name.as_str());
    }

    #[test]
    fn plots_hold_for_one_and_for_many_layouts() {
        let dir = scratch();
        for count in [1, 2, 13, 50, 60] {
            let path = dir.path().join(format!("{count}.json"));
            let comparison = compared(&[sample::write_json(&path, &sample::answer(count))]);
            assert_eq!(comparison.subjects.len(), count);
            let plots = plots::all(&comparison);
            let stems: Vec<&str> = plots.iter().map(|p| p.stem.as_str()).collect();
            assert_eq!(
                stems,
                ["step-time", "memory", "memory-by-rank", "speed-memory"]
            );
            for plot in &plots {
                inside(&plot.scene);
            }
        }
    }

    /// Everything lies in the picture, text by the metrics of the embedded font.
    fn inside(scene: &crate::draw::scene::Scene) {
        use crate::draw::font;
        use crate::draw::scene::{Anchor, Shape};
        let fits = |x: f64, y: f64| {
            x >= -0.5 && y >= -0.5 && x <= scene.width + 0.5 && y <= scene.height + 0.5
        };
        for shape in &scene.shapes {
            let corners = match shape {
                Shape::Rect(r) => vec![(r.x, r.y), (r.x + r.width, r.y + r.height)],
                Shape::Line(l) => l.points.clone(),
                Shape::Mark(m) => vec![(m.x, m.y)],
                Shape::Text(t) if t.upwards => vec![(t.x, t.y)],
                Shape::Text(t) => {
                    let width = font::width(&t.words, t.size, t.weight);
                    let left = match t.anchor {
                        Anchor::Start => t.x,
                        Anchor::Middle => t.x - width / 2.0,
                        Anchor::End => t.x - width,
                    };
                    vec![(left, t.y), (left + width, t.y)]
                }
            };
            for (x, y) in corners {
                assert!(fits(x, y), "{shape:?} leaves {}", scene.title);
            }
        }
    }

    #[test]
    fn runs_beside_plans_fit_their_pictures() {
        let dir = scratch();
        let first = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let other = sample::cpu_plan([1, 1, 1, 2, 2], 0.47);
        let name = "a-run-with-a-name-that-goes-on-and-on-for-longer-than-any-column-is-wide";
        let runs = [
            sample::write_run(&dir.path().join(name), &first, 1.37, 48),
            sample::write_run(&dir.path().join("one-step"), &other, 0.2, 1),
            sample::write_run(&dir.path().join("no-step"), &other, 0.94, 0),
        ];
        let comparison = compared(&runs);
        assert_eq!(comparison.subjects.len(), 3);
        for plot in plots::all(&comparison) {
            inside(&plot.scene);
        }
    }

    #[test]
    fn a_plan_beside_its_run_is_one_subject() {
        let dir = scratch();
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let run = sample::write_run(&dir.path().join("run"), &plan, 1.3, 3);
        let file = run.join("plan.json");
        let both = compared(&[file, run]);
        assert_eq!(both.subjects.len(), 1);
        assert!(both.subjects[0].measured.is_some());
    }

    /// What Megatron-LM prints of steps of `batch` sequences, each of 0.4 s but the first.
    fn log(batch: u64) -> String {
        let line = |step: u64| {
            let ms = if step == 1 { 9000.0 } else { 400.0 };
            format!(
                " [2026-01-01 00:00:0{step}] iteration {step}/ 9 | consumed samples: {} | elapsed time per \
                 iteration (ms): {ms} | learning rate: 1.0E-04 | global batch size: {batch} | lm loss: 1.0E+01 |\n",
                step * batch
            )
        };
        (1..9).map(line).collect()
    }

    #[test]
    fn steps_that_another_program_ran_are_set_beside_their_plan() {
        let dir = scratch();
        let at = |name: &str| dir.path().join(name);
        let plan = sample::write_json(&at("plan.json"), &sample::cpu_plan([2, 1, 1, 4, 1], 0.31));
        let other = sample::write_json(&at("b.json"), &sample::cpu_plan([1, 1, 1, 2, 2], 0.3));
        for (name, batch) in [("train.log", 8), ("larger.log", 16)] {
            std::fs::write(at(name), log(batch)).expect("written");
        }
        let steps = import::steps(&at("train.log")).expect("a log");
        let profile = Profile {
            steps,
            ..Profile::of("cpu", Vec::new())
        };
        profile.save(&at("imported")).expect("written");
        for (number, measured) in ["train.log", "imported"].into_iter().enumerate() {
            let paths = [other.clone(), plan.clone(), at(measured)];
            let written = compare(&paths, &at(&format!("out-{number}"))).expect("compares");
            let first = &written.findings[0];
            for part in [
                "310 ms",
                "measured at 400 ms",
                "median of 7 steps",
                "22.5% too fast",
            ] {
                assert!(first.contains(part), "{part}: {first}");
            }
            let table = read(at(&format!("out-{number}/layouts.csv")));
            let lines: Vec<&str> = table.lines().collect();
            assert!(
                lines[1].contains(",0.31,") && lines[1].contains(",0.4,"),
                "{table}"
            );
            assert!(!lines[2].contains(",0.4,"), "{table}");
        }
        let refused = |inputs: &[PathBuf]| Page::of(inputs).expect_err("refused").to_string();
        for alone in [
            &[at("train.log"), plan.clone()][..],
            &[plan.clone(), at("train.log"), at("train.log")],
        ] {
            let error = refused(alone);
            assert!(
                error.contains("train.log: a step was measured here"),
                "{error}"
            );
        }
        let error = refused(&[plan, at("larger.log")]);
        assert!(
            error.contains("steps of 16 sequences, expected 8"),
            "{error}"
        );
    }

    #[test]
    fn inputs_are_named_apart() {
        let dir = scratch();
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let slower = sample::cpu_plan([2, 1, 1, 4, 1], 0.4);
        for (name, plan) in [("x/a", &plan), ("y/a", &slower), ("z", &slower)] {
            std::fs::create_dir_all(dir.path().join(name)).expect("a directory");
            sample::write_json(&dir.path().join(name).join("plan.json"), plan);
        }
        let at = |name: &str| dir.path().join(name);
        let comparison = compared(&[at("x/a/plan.json"), at("y/a"), at("z")]);
        let names: Vec<&str> = comparison
            .subjects
            .iter()
            .map(|s| s.name.as_str())
            .collect();
        assert_eq!(names, ["x/a", "y/a"], "z is the plan of y/a");
    }

    #[test]
    fn findings_say_who_wins_and_how_good_the_prediction_was() {
        let dir = scratch();
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let other = sample::cpu_plan([1, 1, 1, 2, 2], 0.47);
        let runs = [
            sample::write_run(&dir.path().join("folded"), &plan, 1.25, 10),
            sample::write_run(&dir.path().join("plain"), &other, 0.9, 10),
        ];
        let text = findings::of(&compared(&runs)).join("\n");
        for part in [
            "Fastest measured: folded (TP2 DP2 | EP4 | mbs 1), 388 ms a step",
            "ahead of plain (DP4 | ETP2 EP2 | mbs 1)",
            "predicted at 310 ms and measured at 388 ms: 20.0% too fast",
            "The loss of folded and plain fell from",
            "the busiest expert of a layer got 1.50 times its even share",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn a_run_leads_with_how_far_off_it_was_and_why() {
        let dir = scratch();
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let run = sample::write_run(&dir.path().join("run"), &plan, 1.25, 10);
        let comparison = compared(std::slice::from_ref(&run));
        let lead = &findings::of(&comparison)[0];
        for part in [
            "The step of run was predicted at 310 ms and measured at 388 ms: 20.0% too fast; measured less \
             predicted is +77.5 ms over all categories, most in experts (+",
            " ms), attention (+",
        ] {
            assert!(lead.contains(part), "{part:?} is not in {lead}");
        }
        // Every category takes as much longer, so the three largest differ most.
        let time = &plan.planned.predicted.time_s;
        let mut seconds = moefold_profiles::Category::ALL.map(|category| time.get(category).0);
        seconds.sort_by(|a, b| b.total_cmp(a));
        for most in &seconds[..3] {
            let words = crate::format::signed_seconds(0.25 * most);
            assert!(lead.contains(&format!("({words})")), "{words}: {lead}");
        }
        let exact = sample::write_run(&dir.path().join("exact"), &plan, 1.0, 10);
        let lead = &findings::of(&compared(&[exact]))[0];
        assert!(lead.ends_with("measured at 310 ms: exact."), "{lead}");
    }

    #[test]
    fn law_ops_have_their_calls_and_shares_of_the_difference() {
        let dir = scratch();
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let run = sample::write_run(&dir.path().join("run"), &plan, 1.25, 10);
        let comparison = compared(&[run]);
        let tables = figures::all(&comparison);
        let ops = tables
            .iter()
            .find(|table| table.stem == "ops")
            .expect("a table of ops");
        let mut last = f64::INFINITY;
        let mut shares = 0.0;
        for row in ops.raw.rows() {
            let number = |i: usize| row[i].parse::<f64>().expect("a number");
            let [predicted, measured, predicted_calls, measured_calls] = [2, 3, 4, 5].map(number);
            let calls = if row[1] == "adamw" { 1.0 } else { 8.0 };
            assert_eq!([predicted_calls, measured_calls], [calls; 2], "{row:?}");
            assert_eq!(
                [number(6), number(7)],
                [predicted / calls, measured / calls],
                "{row:?}"
            );
            let miss = (predicted - measured).abs();
            assert!(miss <= last, "{row:?} is not in order");
            (last, shares) = (miss, shares + number(8));
        }
        assert!((shares - 1.0).abs() < 1e-12, "{shares}");
        let text = figures::op_text(&comparison);
        assert!(text.contains("run, what is off by most first:"), "{text}");
        assert!(text.contains("and 1 more in ops.csv"), "{text}");
        let plan = sample::write_json(&dir.path().join("plan.json"), &plan);
        assert_eq!(figures::op_text(&compared(&[plan])), "", "nothing ran");
    }

    /// A run whose summary is edited.
    fn edited(dir: &Path, edit: impl Fn(&mut RunSummary)) -> PathBuf {
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let run = sample::write_run(dir, &plan, 1.25, 10);
        edit_summary(&run, edit);
        run
    }

    fn edit_summary(run: &Path, edit: impl Fn(&mut RunSummary)) {
        let file = run.join("summary.json");
        let mut summary: RunSummary = serde_json::from_str(&read(&file)).expect("a summary");
        edit(&mut summary);
        sample::write_json(&file, &summary);
    }

    #[test]
    fn a_machine_with_more_to_do_than_cores_is_said() {
        let dir = scratch();
        let said = |name: &str, others_busy: Option<f64>, load_before: f64, threads: u32| {
            let run = edited(&dir.path().join(name), |summary| {
                summary.host = Some(HostLoad {
                    cores: 4,
                    threads,
                    load_before,
                    load_after: 9.0,
                    others_busy,
                    pace_s: None,
                });
            });
            let findings = findings::of(&compared(&[run]));
            findings
                .into_iter()
                .find(|finding| finding.starts_with("While "))
        };
        let others = said("others", Some(1.5), 0.0, 4).expect("loaded");
        assert!(
            others.contains("other programs kept 1.5 of the 4 cores busy"),
            "{others}"
        );
        let before = said("before", None, 2.5, 4).expect("loaded");
        assert!(
            before.contains("2.5 runnable threads before it began"),
            "{before}"
        );
        // Its own threads are no others, and beside a thread on four cores there is room.
        assert_eq!(said("alone", Some(0.1), 8.0, 4), None);
        assert_eq!(said("roomy", Some(2.0), 2.0, 1), None);
        assert_eq!(said("quiet", None, 0.2, 4), None);
    }

    #[test]
    fn a_machine_of_another_speed_than_its_profile_is_said() {
        let dir = scratch();
        let said = |name: &str, then_s: Option<f64>, now_s: [f64; 2]| {
            let mut plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
            plan.profiles = vec![ProfileUsed {
                name: "here".to_owned(),
                hash: "1".to_owned(),
                pace_s: then_s.map(|then_s| [then_s; 2]),
            }];
            let run = sample::write_run(&dir.path().join(name), &plan, 1.25, 10);
            edit_summary(&run, |summary| {
                summary.host = Some(HostLoad {
                    cores: 4,
                    threads: 4,
                    load_before: 0.0,
                    load_after: 4.0,
                    others_busy: None,
                    pace_s: Some(now_s),
                });
            });
            let findings = findings::of(&compared(&[run]));
            let mut said = findings.into_iter();
            said.find(|finding| finding.contains("a fixed piece of work"))
        };
        let slower = said("slower", Some(0.004), [0.0045, 0.0055]).expect("another speed");
        assert!(
            slower.contains("took 25.0% longer than") && slower.contains("was slower"),
            "{slower}"
        );
        let faster = said("faster", Some(0.004), [0.003; 2]).expect("another speed");
        assert!(
            faster.contains("took 25.0% less than") && faster.contains("was faster"),
            "{faster}"
        );
        assert_eq!(said("as before", Some(0.004), [0.0042; 2]), None);
        assert_eq!(said("not said", None, [0.003; 2]), None);
    }

    #[test]
    fn golden_reserved_memory_is_told_by_where_it_went() {
        let dir = scratch();
        let mib = |n: u64| Bytes(n << 20);
        let run = edited(&dir.path().join("gpu"), |summary| {
            for peak in &mut summary.peak_by_rank {
                (peak.reserved, peak.reached, peak.growths) = (mib(500), mib(420), 2);
                peak.bytes = ByClass::from_fn(|class| match class {
                    TensorClass::Weights => mib(100),
                    TensorClass::Activations => mib(200 + u64::from(peak.rank)),
                    TensorClass::Overhead => mib(530),
                    _ => Bytes(0),
                });
            }
        });
        let comparison = compared(&[run]);
        let tables = figures::all(&comparison);
        let table = tables
            .iter()
            .find(|table| table.stem == "reserved")
            .expect("a table");
        let expected = [303, 117, 80, 500, 530].map(|n| mib(n).0.to_string());
        let row = &table.raw.rows()[0];
        assert_eq!(
            (&row[1], &row[2..7], &row[8]),
            (&"3".to_owned(), &expected[..], &"2".to_owned())
        );
        let (_, measured) = comparison.runs().next().expect("a run");
        let text = crate::peak_text(&measured.summary);
        for part in [
            "memory of the fullest rank (3): 303 MiB of tensors at the peak: weights 100 MiB, activations 203 MiB\n",
            "taken for tensors 500 MiB: 117 MiB of holes between them, 80.0 MiB beyond what they reached; \
             it grew 2 times after the first step\n",
            "beside tensors 530 MiB: context",
            "its process had 768 MiB of the host's memory at most; the tensors of all 4 ranks peak at 1.18 GiB\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        // On the host nothing is beside tensors, and what is not alive is kept.
        let run = edited(&dir.path().join("cpu"), |_| ());
        let comparison = compared(&[run]);
        let (_, measured) = comparison.runs().next().expect("a run");
        let text = crate::peak_text(&measured.summary);
        assert!(text.contains("of rounding and kept for reuse"), "{text}");
        assert!(
            !text.contains("beside tensors") && !text.contains("holes"),
            "{text}"
        );
    }

    #[test]
    fn predictions_from_different_prices_are_not_ranked() {
        let dir = scratch();
        let rough = sample::cpu_plan([2, 1, 1, 4, 1], 0.1);
        let mut informed = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        informed.profiles.push(ProfileUsed {
            name: "here".to_owned(),
            hash: "1".to_owned(),
            pace_s: None,
        });
        informed.planned.predicted.confidence.measured = 1.0;
        let paths = [("rough.json", &rough), ("informed.json", &informed)]
            .map(|(name, plan)| sample::write_json(&dir.path().join(name), plan));
        let comparison = compared(&paths);
        let findings = findings::of(&comparison);
        assert!(findings[0].starts_with("informed "), "{findings:?}");
    }

    #[test]
    fn different_models_are_not_ranked() {
        let dir = scratch();
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let mut other = plan.clone();
        other.model.name = "another".to_owned();
        let paths = [("a.json", &plan), ("b.json", &other)]
            .map(|(name, plan)| sample::write_json(&dir.path().join(name), plan));
        let comparison = compared(&paths);
        assert!(!comparison.is_comparable());
        let findings = findings::of(&comparison);
        assert!(findings[0].contains("not ranked"), "{findings:?}");
        let stems: Vec<String> = plots::all(&comparison)
            .into_iter()
            .map(|p| p.stem)
            .collect();
        assert!(!stems.contains(&"speed-memory".to_owned()), "{stems:?}");
    }

    fn refusal(path: &Path) -> String {
        let out = path.parent().expect("a parent").join("out");
        let error = compare(&[path.to_owned()], &out).expect_err("refused");
        assert!(
            !out.exists(),
            "nothing is written before everything is read"
        );
        error.to_string()
    }

    #[test]
    fn refusals_name_the_file_and_the_key() {
        let dir = scratch();
        let at = |name: &str| dir.path().join(name);
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let write = |name: &str, text: &str| {
            std::fs::write(at(name), text).expect("written");
            refusal(&at(name))
        };
        let text = write("not.json", "{");
        assert!(
            text.contains("not.json") && text.contains("line 1"),
            "{text}"
        );
        let text = write("other.json", r#"{"steps": 3}"#);
        assert!(
            text.contains("`layout`") && text.contains("`plans`"),
            "{text}"
        );
        let text = write("new.json", r#"{"version": 99, "layout": {}}"#);
        assert!(text.contains("99"), "{text}");
        let text = write("empty.json", r#"{"plans": [], "search": {"space": 0}}"#);
        assert!(text.contains("refused"), "missing key: {text}");
        let text = refusal(&at("absent.json"));
        assert!(text.contains("absent.json"), "{text}");
        std::fs::create_dir(at("hollow")).expect("a directory");
        let text = refusal(&at("hollow"));
        assert!(text.contains("plan.json"), "{text}");
        let run = sample::write_run(&at("run"), &plan, 1.0, 2);
        std::fs::remove_file(run.join("summary.json")).expect("removed");
        let text = refusal(&run);
        assert!(text.contains("no summary.json"), "{text}");
        let run = sample::write_run(&at("torn"), &plan, 1.0, 2);
        let steps = read(run.join("steps.jsonl"));
        std::fs::write(run.join("steps.jsonl"), &steps[..steps.len() - 20]).expect("written");
        let text = refusal(&run);
        assert!(
            text.contains("steps.jsonl") && text.contains("line 2"),
            "{text}"
        );
        let run = sample::write_run(&at("gap"), &plan, 1.0, 4);
        let steps = read(run.join("steps.jsonl"));
        let lines: Vec<&str> = steps.lines().collect();
        let with = |lines: &[&str]| {
            std::fs::write(run.join("steps.jsonl"), lines.join("\n")).expect("written");
            refusal(&run)
        };
        for (text, wrong) in [
            (
                with(&[lines[0], lines[2], lines[3]]),
                "line 2: found step 2, expected step 1",
            ),
            (
                with(&[lines[0], lines[1], lines[1]]),
                "line 3: found step 1, expected step 2",
            ),
            (
                with(&lines[..3]),
                "found 3 steps, expected the 4 that summary.json says ran",
            ),
        ] {
            assert!(
                text.contains("steps.jsonl: ") && text.contains(wrong),
                "{text}"
            );
        }
        let nothing = compare(&[], &at("out")).expect_err("refused").to_string();
        assert!(nothing.contains("nothing to compare"), "{nothing}");
    }

    /// An answer edited by hand goes through the same door as a plan.
    #[test]
    fn illegal_layouts_in_an_answer_are_refused_with_their_place() {
        type Edit = fn(&mut moefold_planner::answer::Answer);
        let dir = scratch();
        let path = dir.path().join("edited.json");
        let cases: [(&[&str], Edit); 4] = [
            (
                &["plans[1].layout: 8 experts are not divisible by ep = 16"],
                |answer| answer.plans[1].layout.ep = 16,
            ),
            (&["plans[0].layout: ", "128 GPUs", "48 heads"], |answer| {
                answer.plans[0].layout.tp = 5;
            }),
            (&["search.feasible[7].layout.dp is 3"], |answer| {
                answer.search.feasible[7].layout.dp = 3;
            }),
            (
                &["plans[0].layout: the moefold stack does not run `precision` fp8"],
                |answer| {
                    answer.plans[0].stack = moefold_planner::choice::StackName::Moefold;
                    answer.plans[0].precision = moefold_profiles::Precision::Fp8;
                },
            ),
        ];
        for (expected, edit) in cases {
            let mut answer = sample::answer(2);
            edit(&mut answer);
            let message = refusal(&sample::write_json(&path, &answer));
            assert!(message.contains("edited.json"), "{message}");
            for expected in expected {
                assert!(message.contains(expected), "{expected}: {message}");
            }
        }
    }

    #[test]
    fn a_search_that_found_nothing_is_refused() {
        let dir = scratch();
        let path = sample::write_json(&dir.path().join("none.json"), &sample::answer(0));
        assert!(refusal(&path).contains("nothing feasible"));
    }

    #[test]
    fn a_diverged_run_is_drawn_up_to_there() {
        let dir = scratch();
        let plan: Plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let run = sample::write_run(&dir.path().join("run"), &plan, 1.0, 6);
        let steps = read(run.join("steps.jsonl"));
        let broken: Vec<String> = steps
            .lines()
            .enumerate()
            .map(|(i, line)| match (i, line.find("\"loss\":")) {
                (3.., Some(at)) => {
                    let end = at + line[at..].find(',').expect("more keys");
                    format!("{}\"loss\":null{}", &line[..at], &line[end..])
                }
                _ => line.to_owned(),
            })
            .collect();
        std::fs::write(run.join("steps.jsonl"), broken.join("\n")).expect("written");
        let comparison = compared(&[run]);
        let findings = findings::of(&comparison).join("\n");
        assert!(
            findings.contains("stopped being a number at step 3"),
            "{findings}"
        );
        assert!(plots::all(&comparison).iter().any(|p| p.stem == "loss"));
    }
}
