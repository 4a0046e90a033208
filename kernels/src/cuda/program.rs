//! What is launched: a [`Program`] (source and defines), its [`Grid`] and its arguments.
//!
//! Nothing here touches a device. A program is compiled for an [`Architecture`] by whoever runs it,
//! with the prelude's headers beside it and `ARCH` defined as the number of the architecture.

use std::fmt;
use std::str::FromStr;

use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;

use crate::cuda::platform::Address;

/// Text of one `.cu` file, named by its stem.
#[derive(Clone, Copy)]
pub struct Source {
    /// The file's name, less `.cu`.
    pub stem: &'static str,
    /// What it says.
    pub text: &'static str,
}

impl Source {
    /// The program of this source with these defines.
    pub fn with(self, defines: &[Define]) -> Program {
        Program {
            source: self,
            defines: defines.to_vec(),
        }
    }
}

// A stem names one file of the crate, so it stands for the text.
impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        self.stem == other.stem
    }
}

impl Eq for Source {}

impl std::hash::Hash for Source {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.stem.hash(state);
    }
}

/// The [`Source`] of the `.cu` file of this stem, given relative to the file that asks.
macro_rules! source {
    ($stem:literal) => {
        source!($stem, concat!($stem, ".cu"))
    };
    ($stem:literal, $path:expr) => {
        $crate::cuda::program::Source {
            stem: $stem,
            text: include_str!($path),
        }
    };
}
pub(crate) use source;

/// One `-DNAME=VALUE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Define {
    /// Its name.
    pub name: &'static str,
    /// What it stands for.
    pub value: Value,
}

/// What a define stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Value {
    /// A number.
    Int(i64),
    /// A name of the sources: a type.
    Name(&'static str),
}

impl Define {
    /// A number.
    pub fn int(name: &'static str, value: usize) -> Self {
        let value = Value::Int(value as i64);
        Self { name, value }
    }

    /// A flag, 0 or 1.
    pub fn flag(name: &'static str, value: bool) -> Self {
        Self::int(name, usize::from(value))
    }

    /// The C++ type of elements of `dtype`.
    ///
    /// # Panics
    /// When no kernel stores that type.
    pub fn dtype(name: &'static str, dtype: Dtype) -> Self {
        let value = match dtype {
            Dtype::F32 => "float",
            Dtype::Bf16 => "bf16",
            Dtype::I32 => "i32",
            Dtype::Fp8 | Dtype::Fp4 => panic!("no kernel stores {dtype}"),
        };
        Self {
            name,
            value: Value::Name(value),
        }
    }
}

impl fmt::Display for Define {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => value.fmt(f),
            Self::Name(value) => value.fmt(f),
        }
    }
}

/// A source with everything that is fixed when it is compiled, but for the architecture.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// The file.
    pub source: Source,
    /// What is fixed in it.
    pub defines: Vec<Define>,
}

impl Program {
    /// What a define of this name stands for.
    pub(crate) fn define(&self, name: &str) -> Option<Value> {
        let define = self.defines.iter().find(|define| define.name == name)?;
        Some(define.value)
    }

    /// The number that a define of this name stands for.
    pub(crate) fn int(&self, name: &str) -> Option<i64> {
        match self.define(name)? {
            Value::Int(value) => Some(value),
            Value::Name(_) => None,
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.cu", self.source.stem)?;
        for define in &self.defines {
            write!(f, " -D{define}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A generation of GPUs, by compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture {
    /// Compute capability, first part.
    pub major: u32,
    /// Compute capability, second part.
    pub minor: u32,
}

impl Architecture {
    /// A100: the oldest that kernels are written for.
    pub const SM80: Self = Self { major: 8, minor: 0 };
    /// H100, H200.
    pub const SM90: Self = Self { major: 9, minor: 0 };
    /// B200.
    pub const SM100: Self = Self {
        major: 10,
        minor: 0,
    };

    /// Whether it multiplies matrices by warpgroups (`wgmma`, only Hopper).
    pub fn has_wgmma(self) -> bool {
        self.major == 9
    }

    /// Shared memory that a block may ask for ("Technical Specifications per Compute Capability" of the
    /// CUDA C++ Programming Guide).
    pub fn shared_per_block(self) -> Bytes {
        let kib = match self.number() {
            86 | 89 | 120.. => 99,
            ..90 => 163,
            _ => 227,
        };
        Bytes(kib << 10)
    }

    /// The one that code is compiled for to run on this: code of the first of a generation runs on
    /// its others, except that which uses what is one architecture's alone (from Hopper on).
    pub(crate) fn code(self) -> Self {
        match self.major {
            8 => Self::SM80,
            _ => self,
        }
    }

    /// The number that sources know as `ARCH`.
    pub fn number(self) -> u32 {
        10 * self.major + self.minor
    }
}

/// The compiler's name of it: `sm_80`, `sm_90a`. From Hopper on with what is this architecture's
/// alone.
impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = if self.major >= 9 { "a" } else { "" };
        write!(f, "sm_{}{own}", self.number())
    }
}

/// Reads `sm_90a`, `sm_90` or `90`.
impl FromStr for Architecture {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix("sm_").unwrap_or(text);
        let number = number.strip_suffix('a').unwrap_or(number);
        let architecture = number.parse().ok().map(|number: u32| Self {
            major: number / 10,
            minor: number % 10,
        });
        architecture
            .filter(|&architecture| architecture >= Self::SM80)
            .ok_or_else(|| format!("{text}: expected an architecture from sm_80 on, e.g. sm_90a"))
    }
}

/// How many threads run an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block: a multiple of 32.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

impl Grid {
    /// `blocks` blocks in a row.
    ///
    /// # Panics
    /// When they are more than a grid holds.
    pub fn linear(blocks: usize, threads: u32, shared: usize) -> Self {
        let blocks = u32::try_from(blocks).expect("a grid has fewer than 2^31 blocks");
        Self {
            blocks: [blocks, 1, 1],
            threads,
            shared: u32::try_from(shared).expect("shared memory of a block is small"),
        }
    }

    /// Whether there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.blocks.contains(&0)
    }
}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Arg {
    /// An address in device memory.
    Address(Address),
    /// A whole number of four bytes.
    I32(i32),
    /// A whole number of eight bytes.
    U64(u64),
    /// An f32.
    F32(f32),
    /// A tensor map.
    Map(EncodedMap),
}

impl Arg {
    /// A size or a count.
    ///
    /// # Panics
    /// When it is no i32.
    pub fn size(value: usize) -> Self {
        Self::I32(i32::try_from(value).expect("a size handed to a kernel is an i32"))
    }
}

/// A tensor map as a kernel takes it: 128 bytes, aligned to 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct EncodedMap(pub [u64; 16]);

/// Tiles of a tensor in device memory, as the bulk copy engine sees them. Dims and boxes innermost
/// first, as the hardware has them.
#[derive(Debug, Clone)]
pub struct TensorMap {
    /// First element: aligned to 16 bytes.
    pub address: Address,
    /// Of its elements.
    pub dtype: Dtype,
    /// Elements of each dim: 2 to 5.
    pub dims: Vec<u64>,
    /// Bytes from one entry to the next, of every dim but the innermost: multiples of 16.
    pub strides: Vec<u64>,
    /// Elements of a tile in each dim: at most 256.
    pub tile: Vec<u32>,
    /// How a tile lies in shared memory.
    pub swizzle: Swizzle,
}

/// How a tile's 16-byte pieces are mixed in shared memory so that columns of it spread over banks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    /// Not at all.
    None,
    /// Rows of 32 bytes.
    B32,
    /// Rows of 64 bytes.
    B64,
    /// Rows of 128 bytes.
    B128,
}

/// A program that ops launch, where, and what it may use: what is compiled ahead and checked.
#[derive(Clone)]
pub struct Listed {
    /// The program.
    pub program: Program,
    /// The oldest architecture it is for, and whether for that alone.
    pub needs: Needs,
    /// Its kernels.
    pub entries: Vec<Entry>,
}

/// Which architectures a program is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Every one from sm_80 on.
    Sm80,
    /// Every one from sm_80 on, but only for what published models rarely ask for: views that start
    /// anywhere, rows of no whole 16 bytes, types mixed. No pack has it; it is compiled when it is
    /// first launched.
    Odd,
    /// Hopper alone.
    Wgmma,
}

impl Needs {
    /// Whether a program runs on this architecture.
    pub fn includes(self, architecture: Architecture) -> bool {
        match self {
            Self::Sm80 | Self::Odd => architecture >= Architecture::SM80,
            Self::Wgmma => architecture.has_wgmma(),
        }
    }

    /// The architectures that a program is checked on.
    pub fn architectures(self) -> &'static [Architecture] {
        match self {
            Self::Sm80 | Self::Odd => {
                &[Architecture::SM80, Architecture::SM90, Architecture::SM100]
            }
            Self::Wgmma => &[Architecture::SM90],
        }
    }
}

/// One kernel of a program and its limits. No kernel may spill.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// Registers of a thread, at most.
    pub registers: u32,
    /// Bytes of dynamic shared memory that a launch asks for, at most.
    pub shared: u32,
    /// Instructions that its machine code must show, by the start of their names (`HGMMA`).
    pub shows: &'static [&'static str],
}

impl Entry {
    /// An entry that is about no instruction in particular; `shared` in bytes.
    pub fn plain(name: &'static str, registers: u32, shared: usize) -> Self {
        Self {
            name,
            registers,
            shared: shared as u32,
            shows: &[],
        }
    }
}
