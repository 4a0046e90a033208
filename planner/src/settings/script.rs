//! [`text()`]: settings as a file of some form, with the remarks beside what they are of.

use std::fmt::{self, Write as _};

use super::table::{self, Role};
use super::text::{Setting, Value};
use super::version::Version;
use super::writer::Written;
use super::{words, yaml};

moefold_profiles::named! {
    /// What settings are written as.
    pub enum Form {
        /// A shell file to be sourced: the environment, and an array of flags.
        MegatronLm = "megatron-lm",
        /// YAML as recipes of Megatron-LM are: `ENV_VARS` and `ARGS`.
        MegatronYaml = "megatron-yaml",
        /// A shell script that starts the ranks of a node with torchrun.
        Torchrun = "torchrun",
        /// A job of Slurm that starts all ranks.
        Slurm = "slurm",
    }
}

/// What stands above settings, and what their launch needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Heading {
    /// What is trained where, and what is expected of it; a line each.
    pub lines: Vec<String>,
    /// A name for the job.
    pub name: String,
    /// Ranks.
    pub gpus: u32,
    /// Ranks that share a host.
    pub gpus_per_node: u32,
    /// The release of Megatron-LM.
    pub version: Version,
}

impl Heading {
    fn nodes(&self) -> u32 {
        self.gpus.div_ceil(self.gpus_per_node.max(1)).max(1)
    }

    fn each(&self) -> u32 {
        self.gpus.min(self.gpus_per_node.max(1))
    }
}

/// Writes settings.
pub fn text(form: Form, written: &Written, heading: &Heading) -> String {
    let mut out = String::new();
    match form {
        Form::MegatronLm => {
            comments(heading, &mut out);
            out.push_str(
                "# Source this file, then give \"${MEGATRON_ARGS[@]}\" to pretrain_gpt.py on every rank.\n\n",
            );
            environment(written, &mut out);
            array(written, &mut out);
        }
        Form::MegatronYaml => as_yaml(written, heading, &mut out),
        Form::Torchrun => {
            out.push_str("#!/bin/bash\n");
            comments(heading, &mut out);
            out.push_str("# Run it on every node, with NODE_RANK and MASTER_ADDR set and MEGATRON_LM the folder of Megatron-LM.\n\
                          set -euo pipefail\n\n");
            environment(written, &mut out);
            array(written, &mut out);
            add(
                &mut out,
                format_args!(
                    "\ntorchrun --nproc-per-node {} --nnodes {} --node-rank \"${{NODE_RANK:-0}}\" \\\n    \
                 --master-addr \"${{MASTER_ADDR:-localhost}}\" --master-port \"${{MASTER_PORT:-29500}}\" \\\n    \
                 \"${{MEGATRON_LM:?the folder of Megatron-LM}}/pretrain_gpt.py\" \"${{MEGATRON_ARGS[@]}}\"\n",
                    heading.each(),
                    heading.nodes()
                ),
            );
        }
        Form::Slurm => {
            add(
                &mut out,
                format_args!(
                    "#!/bin/bash\n#SBATCH --job-name={}\n#SBATCH --nodes={}\n#SBATCH --ntasks-per-node={each}\n\
                 #SBATCH --gpus-per-node={each}\n#SBATCH --exclusive\n",
                    heading.name,
                    heading.nodes(),
                    each = heading.each()
                ),
            );
            comments(heading, &mut out);
            out.push_str("# Submit it with MEGATRON_LM set to the folder of Megatron-LM: sbatch --export=ALL,MEGATRON_LM=...\n\
                          set -euo pipefail\n\n");
            environment(written, &mut out);
            out.push_str("export MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\n\
                          export MASTER_PORT=${MASTER_PORT:-29500}\n\n");
            array(written, &mut out);
            out.push_str(
                "\n# One process a GPU; Slurm's numbers are the ranks.\n\
                 srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \\\n    \
                 exec python -u \"$@\"' megatron \\\n    \
                 \"${MEGATRON_LM:?the folder of Megatron-LM}/pretrain_gpt.py\" \"${MEGATRON_ARGS[@]}\"\n",
            );
        }
    }
    out
}

fn comments(heading: &Heading, out: &mut String) {
    for line in &heading.lines {
        add(out, format_args!("# {line}\n"));
    }
    let version = heading.version.name();
    add(out, format_args!("# Flags of Megatron-LM {version}.\n"));
}

fn environment(written: &Written, out: &mut String) {
    for (name, value) in &written.settings.env {
        let remark = written
            .remark(name)
            .map_or_else(String::new, |remark| format!("  # {remark}"));
        let value = words::written(&words::without_unset(value));
        add(out, format_args!("export {name}={value}{remark}\n"));
    }
    if !written.settings.env.is_empty() {
        out.push('\n');
    }
}

fn array(written: &Written, out: &mut String) {
    out.push_str("MEGATRON_ARGS=(\n");
    for (heading, settings) in groups(written) {
        add(out, format_args!("    # {heading}\n"));
        for setting in settings {
            let mut line = format!("    {}", setting.flag());
            match &setting.value {
                Value::On => {}
                // Absent is off.
                Value::Off => continue,
                Value::Words(words) => {
                    for word in words {
                        line.push(' ');
                        line.push_str(&words::written(word));
                    }
                }
            }
            with_remark(&mut line, written.remark(&setting.name));
            out.push_str(&line);
            out.push('\n');
        }
    }
    out.push_str(")\n");
}

/// Adds to a text, which cannot fail.
fn add(text: &mut String, more: fmt::Arguments<'_>) {
    let _ = text.write_fmt(more);
}

fn with_remark(line: &mut String, remark: Option<&str>) {
    if let Some(remark) = remark {
        add(line, format_args!("  # {remark}"));
    }
}

/// Flags by heading, in their order.
fn groups(written: &Written) -> Vec<(&'static str, Vec<&Setting>)> {
    const OTHERS: &str = "what the plan says nothing of";
    let mut before = OTHERS;
    let mut groups: Vec<(&'static str, Vec<&Setting>)> = Vec::new();
    for setting in &written.settings.flags {
        let own = match table::find(&setting.name).map(|known| known.role) {
            Some(Role::Read(facet)) => facet.words(),
            // What a plan chooses beside what it says stands with that.
            Some(Role::Unpriced(_)) if written.remark(&setting.name).is_some() => before,
            _ => OTHERS,
        };
        before = own;
        match groups.iter_mut().find(|(name, _)| *name == own) {
            Some((_, settings)) => settings.push(setting),
            None => groups.push((own, vec![setting])),
        }
    }
    groups.sort_by_key(|(name, _)| *name == OTHERS);
    groups
}

/// YAML keeps the order of its flags, so that a recipe comes out as it went in.
fn as_yaml(written: &Written, heading: &Heading, out: &mut String) {
    comments(heading, out);
    if !written.settings.env.is_empty() {
        out.push_str("ENV_VARS:\n");
    }
    for (name, value) in &written.settings.env {
        // Values of an environment are texts.
        let mut line = format!("  {name}: '{}'", value.replace('\'', "''"));
        with_remark(&mut line, written.remark(name));
        out.push_str(&line);
        out.push('\n');
    }
    out.push_str("ARGS:\n");
    for setting in &written.settings.flags {
        let mut line = format!("  {}:", setting.name);
        match &setting.value {
            Value::On => line.push_str(" true"),
            Value::Off => line.push_str(" false"),
            Value::Words(words) if words.len() == 1 && !is_list(&setting.name) => {
                line.push(' ');
                line.push_str(&yaml::written(&words[0]));
            }
            Value::Words(words) => {
                with_remark(&mut line, written.remark(&setting.name));
                for word in words {
                    add(&mut line, format_args!("\n  - {}", yaml::written(word)));
                }
                out.push_str(&line);
                out.push('\n');
                continue;
            }
        }
        with_remark(&mut line, written.remark(&setting.name));
        out.push_str(&line);
        out.push('\n');
    }
}

/// Flags that take words and are lists also where there is one.
fn is_list(name: &str) -> bool {
    ["recompute_modules", "offload_modules", "cuda_graph_modules"].contains(&name)
}
