//! The command line as typed. Meaning is given by the verb's own file.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use moefold_executor::data::Split;
use moefold_executor::options::MTP_LOSS_SCALING_FACTOR;
use moefold_planner::choice::{
    CpComm, Dispatcher, DropPolicy, Graphs, Masters, Offload, Optimizer, Overlap, PrimaryWeights,
    RecomputePlan, ScheduleName, StackName, Zero,
};
use moefold_planner::layout::{Order, PartialDegrees};
use moefold_planner::options::{MEMORY_HEADROOM, PipelineLayout};
use moefold_planner::settings::{self, Version};
use moefold_profiles::import::Format;
use moefold_profiles::{Dtype, Precision};

use crate::flags::{self, Auto, Goal, Placed};

/// Plan and run the training of Mixture-of-Experts language models.
#[derive(Debug, Parser)]
#[command(
    name = "moefold",
    version,
    max_term_width = 100,
    propagate_version = true
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// Flags every verb takes.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Common {
    /// Print one machine-readable JSON document on stdout and nothing else
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Print only the answer
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print more
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Find the best layouts for a model on a cluster
    Plan(Box<PlanArgs>),
    /// Write a plan as settings of Megatron-LM: flags, the environment that belongs to them, a script
    Export(ExportArgs),
    /// Judge settings of Megatron-LM: legal or not, do they fit, how fast, and which flags make them faster
    Check(CheckArgs),
    /// Train under a plan
    Execute(Box<ExecuteArgs>),
    /// Measure this machine's ops and collectives for the planner
    Profile(ProfileArgs),
    /// Make a profile of measurements that others made: traces of torch.profiler, output of nccl-tests,
    /// logs of Megatron-LM, system files of SimuMax
    Import(ImportArgs),
    /// Draw plans and runs against each other
    Compare(CompareArgs),
    /// Fit a machine to measured steps of known layouts, for `plan --profile`
    Calibrate(CalibrateArgs),
    /// Hold the planner to published measurements, or to your own
    Validate(ValidateArgs),
    /// Make training data of text
    #[command(subcommand)]
    Data(DataVerb),
    /// Turn a Hugging Face folder into a checkpoint, a checkpoint into a folder, or a dense model into experts
    Convert(ConvertArgs),
    /// Plan, train, measure and compare a small model on this machine
    Quickstart(QuickstartArgs),
    /// Print every process group of a layout
    Groups(GroupsArgs),
    /// List model presets, or show one model
    Models(ModelsArgs),
    /// List cluster presets, or show one cluster
    Clusters(ClustersArgs),
    /// Measure training throughput of a model on this machine
    Bench(BenchArgs),
    /// See what this machine has for GPUs, what is missing and how to get it
    Doctor,
    /// Compile the CUDA kernels on this machine, with or without a GPU
    Kernels(KernelsArgs),
    /// Check every CUDA kernel and training itself on a GPU of this machine: right, and how fast
    GpuCheck(GpuCheckArgs),
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct PlanArgs {
    /// Preset name, a Hugging Face config.json, or a directory that holds one
    #[arg(long)]
    pub(crate) model: PathBuf,
    /// Preset name or a cluster TOML file
    #[arg(long)]
    pub(crate) cluster: PathBuf,
    /// GPUs to use (ranks, on `local`)
    #[arg(long)]
    pub(crate) gpus: Option<u32>,
    /// Tokens a sequence
    #[arg(long)]
    pub(crate) seq_len: u64,
    /// Sequences a step
    #[arg(long)]
    pub(crate) global_batch: u64,
    /// Precision of the matrix products; fp8 has a current scale for each tensor
    /// [default: bf16; fp32 on a CPU cluster]
    #[arg(long, value_parser = flags::one_of(&Precision::ALL, Precision::name))]
    pub(crate) precision: Option<Precision>,
    /// Degrees to pin, e.g. tp=2,cp=1,pp=8,vpp=4,ep=8,etp=1,mbs=1; the rest is searched
    #[arg(long)]
    pub(crate) layout: Option<Placed>,
    /// What will run the plan [default: megatron; moefold on a CPU cluster]
    #[arg(long, value_parser = flags::one_of(&StackName::ALL, StackName::name))]
    pub(crate) stack: Option<StackName>,
    /// Pipeline schedule: auto tries those that the stack has for a layout
    #[arg(long, default_value = "auto", value_parser = flags::one_or_auto(&ScheduleName::ALL, ScheduleName::name))]
    pub(crate) schedule: Auto<ScheduleName>,
    /// Token dispatcher
    #[arg(long, default_value = "auto", value_parser = flags::one_or_auto(&Dispatcher::ALL, Dispatcher::name))]
    pub(crate) dispatcher: Auto<Dispatcher>,
    /// How ranks are numbered, the fastest axis first: tp-cp-ep-dp-pp, tp-cp-ep-pp-dp, or auto, which tries both
    #[arg(long, value_name = "ORDER", default_value = "auto", value_parser = flags::order)]
    pub(crate) rank_order: Auto<Order>,
    /// How attention reaches the keys of other context-parallel ranks: auto tries all that the stack has [default: p2p, or that of --layout]
    #[arg(long, value_parser = flags::one_or_auto(&CpComm::ALL, CpComm::name))]
    pub(crate) cp_comm_type: Option<Auto<CpComm>>,
    /// Of a2a+p2p, the ranks that exchange heads and the ranks of a ring, which together are CP [default: as many exchange
    /// heads as share an NVLink domain and divide them]
    #[arg(long, num_args = 2, value_names = ["RANKS", "RANKS"])]
    pub(crate) hierarchical_context_parallel_sizes: Vec<u32>,
    /// Let each expert take so many times its even share of the tokens of a rank, and drop the rest
    #[arg(long, value_name = "FACTOR")]
    pub(crate) expert_capacity_factor: Option<f64>,
    /// What an expert keeps within its capacity: the largest probabilities, or the first tokens
    #[arg(long, default_value = "probs", value_parser = flags::one_of(&DropPolicy::ALL, DropPolicy::name), requires = "expert_capacity_factor")]
    pub(crate) token_drop_policy: DropPolicy,
    /// Give every expert as many rows as its capacity, so that all sizes are known beforehand
    #[arg(long, requires = "expert_capacity_factor")]
    pub(crate) pad_expert_input_to_capacity: bool,
    /// Recomputation: auto, none, full or modules (core_attn, mla_up_proj, layernorm, moe_act, moe,
    /// mlp, shared_experts), comma separated; or by layer, as 0-3=full/4,5=moe_act+layernorm (moefold)
    #[arg(long, default_value = "auto", value_parser = flags::or_auto::<RecomputePlan>)]
    pub(crate) recompute: Auto<RecomputePlan>,
    /// Modules whose saved tensors rest on the host between the passes: none, auto (the search tries some) or
    /// modules (attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act), comma separated
    #[arg(long, default_value = "none", value_parser = flags::or_auto::<Offload>)]
    pub(crate) offload: Auto<Offload>,
    /// Layers of each stage in Megatron's notation, e.g. 'Et|(tt|)*30mL'
    #[arg(long)]
    pub(crate) pipeline_layout: Option<PipelineLayout>,
    /// Communication that runs beside compute: none, or all that is to, of grad-reduce, param-gather, p2p,
    /// shared-expert, expert-alltoall, delay-wgrad and tp (megatron), comma separated; auto is the first three, on a
    /// CPU none
    #[arg(long, default_value = "auto", value_parser = flags::or_auto::<Overlap>)]
    pub(crate) overlap: Auto<Overlap>,
    /// What CUDA graphs launch at once (megatron): none, full_iteration, or modules of layers, of attn, mamba, mlp, moe,
    /// moe_router and moe_preprocess, comma separated; auto searches all that go with the rest, with their memory
    #[arg(long, default_value = "none", value_parser = flags::or_auto::<Graphs>)]
    pub(crate) cuda_graph: Auto<Graphs>,
    /// Let attention multiply in FP8 (megatron), under a precision that does
    #[arg(long)]
    pub(crate) fp8_attention: bool,
    /// What data parallelism divides: 1, the states of the optimizer; 2, gradients too (megatron); fsdp, weights and gradients
    /// too; hfsdp, the same inside a part of the replicas, and states over all (megatron); or fsdp2, as PyTorch's FSDP2
    /// (megatron, without expert parallelism). All but 1 go without a pipeline
    #[arg(long, default_value = "1", value_parser = flags::one_of(&Zero::ALL, Zero::name))]
    pub(crate) zero: Zero,
    /// Cut replicas into so many parts, each of which divides by itself what --zero says (megatron): hybrid sharding under
    /// fsdp and hfsdp, where each rank's part is reduced across once a step
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) num_distributed_optimizer_instances: u32,
    /// Parameters that a bucket of gradients has at least, where they are reduced beside compute (moefold)
    /// [default: 40 million, or a million for each replica if that is more]
    #[arg(long, value_name = "PARAMETERS")]
    pub(crate) ddp_bucket_size: Option<u64>,
    /// Optimizer
    #[arg(long, default_value = "adam", value_parser = flags::one_of(&Optimizer::ALL, Optimizer::name))]
    pub(crate) optimizer: Optimizer,
    /// What is kept of f32 masters beside bf16 weights: all of them, or the 16 bits that the weights lack
    #[arg(long, default_value = "fp32", value_parser = flags::one_of(&Masters::ALL, Masters::name))]
    pub(crate) masters: Masters,
    /// What weights are that are multiplied in FP8: wide, of bf16 beside FP8 copies; or fp8, without any of bf16 (megatron)
    #[arg(long, default_value = "wide", value_parser = flags::one_of(&PrimaryWeights::ALL, PrimaryWeights::name))]
    pub(crate) primary_weights: PrimaryWeights,
    /// Share of masters and moments that rests on the host, from 0 to 1
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0)]
    pub(crate) optimizer_offload_fraction: f64,
    /// Type of the main gradients (bf16: megatron)
    #[arg(long, default_value = "fp32", value_parser = flags::one_of(&flags::GRAD_DTYPES, flags::grad_dtype))]
    pub(crate) grad_dtype: Dtype,
    /// Expert load: balanced, a run directory whose routing to take, or a JSON histogram of tokens an
    /// expert [default: balanced; with --profile RUN of a run that exchanged no tokens, as it recorded]
    #[arg(long)]
    pub(crate) routing: Option<PathBuf>,
    /// Say also how experts are best placed on the ranks of #1 under --routing, each rank holding so many more than its
    /// share: 0 moves experts, more holds busy ones several times
    #[arg(long, value_name = "COPIES")]
    pub(crate) place_experts: Option<u32>,
    /// Percent of each device's memory that every plan leaves free
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0 * MEMORY_HEADROOM)]
    pub(crate) memory_headroom: f64,
    /// What is best: cost, gpus and goodput try several numbers of GPUs up to --gpus, for the least cost of a token, the
    /// fewest GPUs that train --tokens by the --deadline, and the most tokens a second that failures leave; seq-len is
    /// the longest sequence that fits, --seq-len at least
    #[arg(long, default_value = "throughput", value_parser = flags::one_of(&Goal::ALL, Goal::name))]
    pub(crate) objective: Goal,
    /// Tokens to train on, e.g. 15e12
    #[arg(long, value_name = "N")]
    pub(crate) tokens: Option<f64>,
    /// Days in which --tokens are to be trained
    #[arg(long, value_name = "DAYS")]
    pub(crate) deadline: Option<f64>,
    /// What a GPU costs an hour, for --objective cost [default: what the cluster says]
    #[arg(long, value_name = "USD")]
    pub(crate) usd_per_gpu_hour: Option<f64>,
    /// Hours between two failures of one GPU with its share of the node and the network, on average: a job of as many
    /// GPUs fails as many times as often
    #[arg(long, value_name = "HOURS")]
    pub(crate) gpu_mtbf: Option<f64>,
    /// What a job writes to its storage a second, all ranks together, GB: how long a checkpoint takes
    #[arg(long, value_name = "GB", conflicts_with = "save_time")]
    pub(crate) storage_gb_per_s: Option<f64>,
    /// For how many seconds a checkpoint holds training up, instead of --storage-gb-per-s
    #[arg(long, value_name = "SECONDS")]
    pub(crate) save_time: Option<f64>,
    /// Seconds from a failure until training goes on from the last checkpoint
    #[arg(long, value_name = "SECONDS")]
    pub(crate) restart_time: Option<f64>,
    /// Say also what became of a layout: refused by which rules, ruled out by which bound, or slower than #1 by what
    #[arg(long, value_name = "LAYOUT")]
    pub(crate) why: Option<Placed>,
    /// Search under tighter memory limits too, so that the answer holds the fastest layout for each:
    /// the front of speed against memory that `compare` draws
    #[arg(long)]
    pub(crate) front: bool,
    /// Stop searching after so long, with the best so far. Until then the best split of #1's layers is looked for
    #[arg(long, value_name = "SECONDS")]
    pub(crate) time_limit: Option<f64>,
    /// How many plans to show
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) top: u32,
    /// Profile directory of measured costs; may be given several times
    #[arg(long)]
    pub(crate) profile: Vec<PathBuf>,
    /// Write the best plan here
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The plan
    pub(crate) plan: PathBuf,
    /// What to write: a shell file of flags, YAML, a script for torchrun, or a job of Slurm
    #[arg(long, value_parser = flags::one_of(&settings::Form::ALL, settings::Form::name))]
    pub(crate) to: settings::Form,
    /// The release of Megatron-LM that is to read it
    #[arg(long, default_value = "0.16", value_name = "RELEASE", value_parser = flags::one_of(&Version::ALL, Version::name))]
    pub(crate) megatron: Version,
    /// Put the plan into settings that are there: what they say otherwise is changed, and all else stays
    #[arg(long, value_name = "SETTINGS")]
    pub(crate) base: Option<PathBuf>,
    /// Write it here instead of printing it
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct CheckArgs {
    /// A command line, a shell script or YAML with flags of Megatron-LM
    #[arg(value_name = "SETTINGS")]
    pub(crate) settings: PathBuf,
    /// Preset name or a cluster TOML file
    #[arg(long)]
    pub(crate) cluster: PathBuf,
    /// GPUs they run on
    #[arg(long)]
    pub(crate) gpus: Option<u32>,
    /// The model, where the flags do not describe it: preset name, a Hugging Face config.json, or its directory
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// The release of Megatron-LM that reads them
    #[arg(long, default_value = "main", value_name = "RELEASE", value_parser = flags::one_of(&Version::ALL, Version::name))]
    pub(crate) megatron: Version,
    /// Profile directory of measured costs; may be given several times
    #[arg(long)]
    pub(crate) profile: Vec<PathBuf>,
    /// Write the settings as a plan here
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Write the fastest plan here, to be put into the settings by `export --base`
    #[arg(long)]
    pub(crate) better: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ExecuteArgs {
    /// The plan to run
    pub(crate) plan: PathBuf,
    /// Megatron indexed datasets, PREFIX.bin and PREFIX.idx: prefixes, or a weight before every prefix. The plan
    /// comes before them
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1.., conflicts_with = "text")]
    pub(crate) data: Vec<OsString>,
    /// Plain text files
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) text: Vec<PathBuf>,
    /// Tokenizer of --text: byte, o200k, cl100k, a tokenizer.json or a .tiktoken file
    #[arg(long, default_value = "byte")]
    pub(crate) tokenizer: PathBuf,
    /// Initial weights: random, or a Hugging Face directory with safetensors
    #[arg(long, default_value = "random")]
    pub(crate) init: PathBuf,
    #[command(flatten)]
    pub(crate) train: TrainArgs,
    /// Take samples in the order of the data
    #[arg(long)]
    pub(crate) no_shuffle: bool,
    #[command(flatten)]
    pub(crate) packing: PackingArgs,
    /// Shares of the documents of --data for training, validation and test, e.g. 969,30,1; the last is not
    /// read
    #[arg(long, value_name = "SHARES", conflicts_with_all = ["valid_data", "text"])]
    pub(crate) split: Option<Split>,
    /// Indexed datasets to validate on, as --data
    #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1..)]
    pub(crate) valid_data: Vec<OsString>,
    /// Read all tokens of the datasets first, and hold them to the checksums that `data prepare` wrote
    #[arg(long, conflicts_with = "text")]
    pub(crate) verify_data: bool,
    /// Steps between evaluations on validation data, beside the one at the end [default: 1000]
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) eval_interval: Option<u32>,
    /// Global batches of an evaluation, at most those that the data have [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) eval_iters: Option<u32>,
    /// Walk one rank's step without devices, data or weights: memory, collectives and a trace with
    /// predicted times
    #[arg(long, conflicts_with_all = ["data", "text", "split", "valid_data", "verify_data", "eval_interval", "eval_iters", "init", "resume", "goes_on", "restarts", "save_every", "stop_within", "save_hf", "profile_out", "launch", "device"])]
    pub(crate) dry_run: bool,
    /// The rank that --dry-run walks [default: 0]
    #[arg(long, value_name = "R", requires = "dry_run")]
    pub(crate) rank: Option<u32>,
    /// Where to run
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,
    /// How ranks are started
    #[arg(long, value_enum, default_value_t = Launch::Threads)]
    pub(crate) launch: Launch,
    /// Seconds that a rank which is a process may be silent, as where it is stopped or its machine is gone,
    /// before the run ends
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    pub(crate) heartbeat_s: f64,
    /// Run directory to write [default: the first free of runs/run-1, runs/run-2, ...; of --dry-run
    /// runs/dry-run-rank-R]
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Save a checkpoint into the run directory every N steps and at the end; the last two are kept
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) save_every: Option<u32>,
    /// End at most so many seconds after SIGTERM or SIGINT, with a checkpoint if it can be saved in that time; a second
    /// signal ends the run at once
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub(crate) stop_within: u32,
    /// Go on from a checkpoint, or from the newest of a run directory, under the same layout or another
    #[arg(long, value_name = "RUN", conflicts_with = "init")]
    pub(crate) resume: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) again: AgainArgs,
    /// Write what every op and collective took as a profile directory too; the run directory is one
    #[arg(long, value_name = "DIR")]
    pub(crate) profile_out: Option<PathBuf>,
    /// Write the final weights as a Hugging Face directory
    #[arg(long, value_name = "DIR")]
    pub(crate) save_hf: Option<PathBuf>,
}

/// How a run goes on by itself.
#[derive(Debug, Args)]
pub(crate) struct AgainArgs {
    /// Go on in the directory of --out from its newest checkpoint; without one, begin there as the other flags say.
    /// The same command starts a run and takes it up again
    #[arg(long = "continue", requires = "out")]
    pub(crate) goes_on: bool,
    /// With --launch processes: start the ranks again from the newest checkpoint after one has died or hung, at most N
    /// times
    #[arg(long, value_name = "N", requires = "save_every", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) restarts: Option<u32>,
    /// Plan again for the ranks that are left, and go on with them, once a rank has died DEATHS times at its place
    /// without a checkpoint in between [default: 2; --elastic=1: with every death]
    #[arg(long, value_name = "DEATHS", requires = "restarts", num_args = 0..=1, require_equals = true,
        default_missing_value = "2", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) elastic: Option<u32>,
    /// The plan to run instead, which was made for the ranks that are left
    #[arg(long, value_name = "PLAN", hide = true)]
    pub(crate) replanned: Option<PathBuf>,
}

/// What the documents of a sequence have of their own.
#[derive(Debug, Args)]
#[group(multiple = true)]
pub(crate) struct PackingArgs {
    /// Count positions from the beginning of each document in a sequence
    #[arg(long)]
    pub(crate) reset_position_ids: bool,
    /// Let tokens see those of their own document alone
    #[arg(long)]
    pub(crate) reset_attention_mask: bool,
    /// Take no loss of the last token of a document, whose next one is of another
    #[arg(long)]
    pub(crate) eod_mask_loss: bool,
    /// The id that ends a document for the three above [default: documents end as the data have them]
    #[arg(long, value_name = "ID")]
    pub(crate) eod_token: Option<u32>,
}

/// What training does, beside the plan.
#[derive(Debug, PartialEq, Args)]
pub(crate) struct TrainArgs {
    /// Steps to train; with --resume, those before it included
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) steps: u32,
    /// Peak learning rate
    #[arg(long, default_value_t = 3e-4)]
    pub(crate) lr: f64,
    /// Learning rate after warm-up
    #[arg(long, value_enum, default_value_t = LrSchedule::Constant)]
    pub(crate) lr_schedule: LrSchedule,
    /// Steps of linear warm-up
    #[arg(long, default_value_t = 0)]
    pub(crate) warmup: u32,
    /// Where the learning rate ends [default: a tenth of --lr]
    #[arg(long, value_name = "RATE")]
    pub(crate) min_lr: Option<f64>,
    /// Steps until it is there, warm-up included [default: --steps]
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) lr_decay_steps: Option<u32>,
    /// How it falls in the last steps of the schedule wsd [default: linear]
    #[arg(long, value_enum, value_name = "STYLE")]
    pub(crate) wsd_decay: Option<WsdDecay>,
    /// Those last steps [default: a fifth of the steps after warm-up]
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) wsd_decay_steps: Option<u32>,
    /// First moment decay
    #[arg(long, default_value_t = 0.9)]
    pub(crate) beta1: f64,
    /// Second moment decay
    #[arg(long, default_value_t = 0.95)]
    pub(crate) beta2: f64,
    /// Added to the root of the second moment
    #[arg(long, default_value_t = 1e-8)]
    pub(crate) eps: f64,
    /// Decoupled weight decay, on tensors of two or more dimensions
    #[arg(long, default_value_t = 0.1)]
    pub(crate) weight_decay: f64,
    /// Largest global gradient norm; 0 does not clip
    #[arg(long, default_value_t = 1.0)]
    pub(crate) clip: f64,
    /// Coefficient of the load-balancing loss over a microbatch
    #[arg(long, default_value_t = 0.0)]
    pub(crate) aux_loss_coef: f64,
    /// The same of the loss over each sequence
    #[arg(long, default_value_t = 0.0)]
    pub(crate) seq_aux_loss_coef: f64,
    /// The same of the loss over all data-parallel replicas and the step so far
    #[arg(long, default_value_t = 0.0)]
    pub(crate) global_aux_loss_coef: f64,
    /// Coefficient of the router's z-loss
    #[arg(long, default_value_t = 0.0)]
    pub(crate) z_loss_coef: f64,
    /// What a router's correction bias moves in a step, where it has one; 0 leaves it as it is
    #[arg(long, default_value_t = 1e-3)]
    pub(crate) bias_update_rate: f64,
    /// Weight of the losses of multi-token prediction, the mean over its depths
    #[arg(long, default_value_t = MTP_LOSS_SCALING_FACTOR)]
    pub(crate) mtp_loss_scaling_factor: f64,
    /// Seed of initial weights and shuffling
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

impl Default for TrainArgs {
    /// What they are where no flag is given.
    fn default() -> Self {
        let none = Self::augment_args(clap::Command::new("")).get_matches_from([""]);
        Self::from_arg_matches(&none).expect("every flag has a default")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LrSchedule {
    /// Stays at the peak
    Constant,
    /// Falls along a line
    Linear,
    /// Falls along a cosine
    Cosine,
    /// Falls as one over the square root of the steps
    InverseSquareRoot,
    /// Stays until the last steps, then falls
    Wsd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WsdDecay {
    /// Along a line
    Linear,
    /// Along a cosine
    Cosine,
    /// By halves
    Exponential,
    /// As the square root of the steps
    MinusSqrt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// A GPU where `moefold doctor` finds one usable, else the CPU
    Auto,
    /// CPU, in f32
    Cpu,
    /// CUDA: f32 or bf16, as the plan says
    Cuda,
}

/// What a GPU stores weights and activations in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stored {
    /// bf16, with f32 masters
    Bf16,
    /// f32 throughout
    Fp32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Launch {
    /// Ranks are threads of this process
    Threads,
    /// Ranks are processes of this machine, one a GPU
    Processes,
    /// This process is one rank, started by torchrun or Slurm
    Env,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ProfileArgs {
    /// Measure at the shapes this model needs (preset, config.json or directory) [default: a sweep]
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Measure at the shapes of this plan
    #[arg(long, conflicts_with = "model")]
    pub(crate) plan: Option<PathBuf>,
    /// Tokens a sequence, with --model
    #[arg(long, default_value_t = 256)]
    pub(crate) seq_len: u64,
    /// Ranks that run at the same time [default: on the CPU one a core, or those of the plan; on a GPU
    /// one thread, or a process for every GPU of this machine, or those that a launcher started]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) ranks: Option<u32>,
    /// How ranks are started. Threads share one GPU, and their collectives price nothing; between
    /// processes, a GPU each, they do
    #[arg(long, value_enum, default_value_t = Launch::Threads)]
    pub(crate) launch: Launch,
    /// What to measure
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,
    /// Precision to measure a GPU in; a plan says its own [default: bf16]
    #[arg(long, value_enum, conflicts_with = "plan")]
    pub(crate) precision: Option<Stored>,
    /// Stop adding repetitions after this many seconds; each op is still timed three times
    #[arg(long, default_value_t = 60.0)]
    pub(crate) budget_s: f64,
    /// Profile directory to write
    #[arg(long)]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) course: CourseArgs,
}

/// The tokenizer of text where none is named.
pub(crate) const BYTE: &str = "byte";

/// The training that a profile rehearses.
#[derive(Debug, Args)]
#[command(next_help_heading = "The training that layouts are measured by, on a CPU")]
pub(crate) struct CourseArgs {
    /// Plain text files to train on [default: random tokens, which go to experts more evenly than text]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) text: Vec<PathBuf>,
    /// Tokenizer of --text: byte, o200k, cl100k, a tokenizer.json or a .tiktoken file
    #[arg(long, default_value = BYTE)]
    pub(crate) tokenizer: PathBuf,
    #[command(flatten)]
    pub(crate) train: TrainArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The file, compressed by gzip or not
    pub(crate) source: PathBuf,
    /// What the file is [default: its content says]
    #[arg(long, value_parser = flags::one_of(&Format::ALL, Format::name))]
    pub(crate) format: Option<Format>,
    /// What was measured: a GPU preset, or cpu [default: the file says]
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Profile directory to write
    #[arg(long)]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Plans (plan.json, or the output of `plan --json`) and run directories; right after a plan.json a log of
    /// Megatron-LM that ran it, or a profile directory with its steps
    #[arg(required = true)]
    pub(crate) inputs: Vec<PathBuf>,
    /// Directory to write report.html, plots and tables to
    #[arg(long)]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct CalibrateArgs {
    /// The plan of a measured step; as many times as --measured, in the same order
    #[arg(long, required = true)]
    pub(crate) plan: Vec<PathBuf>,
    /// What its step took: seconds, a run directory, a profile directory with steps, or a Megatron log
    #[arg(long, required = true, value_name = "STEP_S|LOG|DIR")]
    pub(crate) measured: Vec<PathBuf>,
    /// Profile directory of measured costs that plans are priced with; may be given several times
    #[arg(long)]
    pub(crate) profile: Vec<PathBuf>,
    /// Profile directory to write
    #[arg(long)]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ValidateArgs {
    /// Measurements as comma-separated lines, in the format of the shipped ones
    /// [default: the published measurements that ship with the program]
    pub(crate) file: Option<PathBuf>,
    /// Write here what intervals come from: planner/data/calibration.json, after prices have changed
    #[arg(long, hide = true, value_name = "FILE", conflicts_with = "file")]
    pub(crate) calibration: Option<PathBuf>,
    /// Write what is found here too, with every row and its source: a page in Markdown, as docs/published.md is
    #[arg(long, value_name = "FILE")]
    pub(crate) page: Option<PathBuf>,
    /// Directory of a profile, as `import` makes, of a GPU that rows are of: they are priced with what it measured.
    /// Repeatable
    #[arg(long, value_name = "DIR", conflicts_with_all = ["calibration", "page", "here", "tuned"])]
    pub(crate) profile: Vec<PathBuf>,
    /// Judge the loop on this machine's CPU instead: five layouts of a small model are planned, measured,
    /// trained and planned again. Leave the machine alone meanwhile
    #[arg(long, conflicts_with_all = ["file", "calibration", "page"])]
    pub(crate) here: bool,
    /// Search in place of each layout, and say by what the two differ: of FILE all, else those that their
    /// authors tuned by measuring
    #[arg(long, conflicts_with_all = ["here", "calibration", "page"])]
    pub(crate) tuned: bool,
    /// How often each layout is tried
    #[arg(long, default_value_t = 5, requires = "here", value_name = "TIMES", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
    /// Training steps of each run, at least 4: quarters of it are compared
    #[arg(long, default_value_t = 80, requires = "here", value_parser = clap::value_parser!(u32).range(4..))]
    pub(crate) steps: u32,
    /// Seconds to measure for each layout at most: it is rehearsed for as many steps as it is then trained for where
    /// these are enough
    #[arg(long, default_value_t = 20.0, requires = "here")]
    pub(crate) budget_s: f64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataVerb {
    /// Tokenize text into a Megatron indexed dataset, for `execute --data`
    Prepare(PrepareArgs),
}

#[derive(Debug, Args)]
pub(crate) struct PrepareArgs {
    /// Files: of .jsonl and .json each line is a document, any other file is one; .gz is decompressed
    #[arg(required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Prefix of the dataset: PREFIX.bin and PREFIX.idx, which must not exist
    #[arg(long, value_name = "PREFIX")]
    pub(crate) out: PathBuf,
    /// byte, o200k, cl100k, a tokenizer.json or a .tiktoken file (split as o200k does)
    #[arg(long, default_value = "byte")]
    pub(crate) tokenizer: PathBuf,
    /// Key of a JSON line whose value is the text
    #[arg(long, default_value = "text")]
    pub(crate) key: String,
    /// Token that ends every document: its id, or its text, e.g. '<|endoftext|>'
    #[arg(long, value_name = "TOKEN")]
    pub(crate) eod: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A Hugging Face folder with safetensors, a checkpoint, or a run directory, whose newest is taken
    pub(crate) from: PathBuf,
    /// Directory to write, new or empty
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// What to write [default: the other one; with --upcycle hf]
    #[arg(long, value_enum)]
    pub(crate) to: Option<Form>,
    /// Make experts of a dense model's MLPs, so many in each layer
    #[arg(long, value_name = "EXPERTS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) upcycle: Option<u32>,
    /// Experts a token is sent to
    #[arg(long, default_value_t = 2, requires = "upcycle", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) topk: u32,
    /// Slices that the inner width of an MLP is cut into, each an expert
    #[arg(long, default_value_t = 1, requires = "upcycle", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) granularity: u32,
    /// Seed of the routers
    #[arg(long, default_value_t = 0, requires = "upcycle")]
    pub(crate) seed: u64,
    /// Most of the host's memory to use, MiB [default: what is there]
    #[arg(long, value_name = "MIB")]
    pub(crate) memory_mib: Option<u64>,
}

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    /// A Hugging Face folder
    Hf,
    /// A checkpoint, for `execute --resume`
    Checkpoint,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct QuickstartArgs {
    /// Directory to write everything to; must not exist or be empty [default: runs/quickstart, numbered]
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Training steps of each run
    #[arg(long, default_value_t = 60)]
    pub(crate) steps: u32,
    /// Ranks
    #[arg(long, default_value_t = 4)]
    pub(crate) ranks: u32,
    /// Seed
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct GroupsArgs {
    /// Ranks of the job
    #[arg(long)]
    pub(crate) gpus: u32,
    /// Degrees, e.g. tp=2,cp=2,ep=8,etp=1; missing ones are 1
    #[arg(long)]
    pub(crate) layout: String,
}

#[derive(Debug, Args)]
pub(crate) struct ModelsArgs {
    /// Preset name, a config.json, or a directory that holds one
    pub(crate) model: Option<PathBuf>,
    /// Sequence length that FLOPs are counted at
    #[arg(long, default_value_t = 4096)]
    pub(crate) seq_len: u64,
}

#[derive(Debug, Args)]
pub(crate) struct ClustersArgs {
    /// Preset name or a cluster TOML file
    pub(crate) cluster: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchArgs {
    /// Preset name, a Hugging Face config.json, or a directory that holds one
    #[arg(long, default_value = "bench-qwen3-moe")]
    pub(crate) model: PathBuf,
    /// Tokens a sequence
    #[arg(long, default_value_t = 256)]
    pub(crate) seq_len: u64,
    /// Sequences a step
    #[arg(long, default_value_t = 4)]
    pub(crate) global_batch: u64,
    /// Rank threads
    #[arg(long, default_value_t = 1)]
    pub(crate) ranks: u32,
    /// Degrees to pin, e.g. tp=1,ep=4; the rest is what `plan` finds for this machine's cores
    #[arg(long)]
    pub(crate) layout: Option<PartialDegrees>,
    /// Where to run
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,
    /// Threads of each rank on the CPU [default: cores / ranks]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Timed steps
    #[arg(long, default_value_t = 10)]
    pub(crate) steps: u32,
}

#[derive(Debug, Args)]
pub(crate) struct KernelsArgs {
    /// Architectures to compile for, comma separated, e.g. sm_80,sm_90a [default: all]
    #[arg(long, value_delimiter = ',')]
    pub(crate) arch: Vec<String>,
    /// Write a pack here: with MOEFOLD_PACK naming it, `execute` needs no NVRTC
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

/// What a GPU check does beside its own cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// Times of PyTorch at the same shapes
    Torch,
    /// The small cases under compute-sanitizer
    Sanitizer,
    /// Training, profiles and models
    Trials,
}

#[derive(Debug, Args)]
pub(crate) struct GpuCheckArgs {
    /// Folder for gpu-check.json, gpu-check.md and what the trials leave
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Which GPU, as the driver numbers them
    #[arg(long, default_value_t = 0)]
    pub(crate) device: u32,
    /// Only ops and trials (curve, layouts, profile, models) whose name contains one of these, comma
    /// separated
    #[arg(long, value_delimiter = ',', value_name = "TEXT")]
    pub(crate) only: Vec<String>,
    /// Only these of the published models whose sizes are checked, comma separated
    #[arg(long, value_delimiter = ',', value_name = "MODEL", value_parser = checked_models())]
    pub(crate) models: Vec<String>,
    /// Only the small sizes and the shortest trials: right or wrong, no times
    #[arg(long)]
    pub(crate) small: bool,
    /// A Python script that trains the cut models with PyTorch, to be timed beside: it takes --config,
    /// --seq-len, --micro-batch, --steps, --device, --dtype, --experts, --compile and prints JSON with
    /// step_ms
    #[arg(long, value_name = "SCRIPT")]
    pub(crate) beside: Option<PathBuf>,
    /// Leave these out, comma separated
    #[arg(long, value_delimiter = ',', value_name = "PEER")]
    pub(crate) without: Vec<Peer>,
    /// The Python that has PyTorch
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    pub(crate) python: OsString,
    /// Seconds without an answer after which a case counts as hung
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    pub(crate) deadline_s: u64,
    /// Put the CPU in the GPU's place, to try the command itself
    #[arg(long, hide = true)]
    pub(crate) rehearse: bool,
    /// Let the parts of this op abort, in a rehearsal, to try what becomes of the others
    #[arg(long, hide = true, requires = "rehearse", value_name = "OP")]
    pub(crate) dies: Option<String>,
    /// Run one part in this process
    #[arg(long, hide = true, value_name = "JSON")]
    pub(crate) part: Option<String>,
}

/// The models whose sizes `gpu-check` takes.
fn checked_models() -> PossibleValuesParser {
    let sizes = moefold_kernels::check::Sizes::real();
    PossibleValuesParser::new(sizes.into_iter().map(|sizes| sizes.name))
}

/// Seconds that something may take: more than a tenth, at most a day.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok();
    let bounded = seconds.filter(|seconds| (0.1..=86_400.0).contains(seconds));
    bounded.ok_or_else(|| "expected seconds, from 0.1 to 86400".to_owned())
}
