//! [`Tape`]: what a pass takes and gives back, in order.
//!
//! A stack that knows its runtime step by step writes a pass down as the runtime does it: a tensor is
//! taken where an op allocates it and given back where its last handle drops. Played once, the tape says
//! what is alive at the end and how much was alive at most, by class, byte for byte.

use std::ops::{Add, Mul, Sub};

use moefold_profiles::units::{Bytes, GIB};
use moefold_profiles::{ByClass, Dtype, TensorClass};

/// Bytes alive by class, above an instant that is said where there is one; negative below it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Level(ByClass<i64>);

impl Level {
    /// Bytes of one class.
    pub fn of(class: TensorClass, bytes: Bytes) -> Self {
        let mut level = Self::default();
        level.0[class] = bytes.0 as i64;
        level
    }

    /// Bytes of one class.
    pub fn get(self, class: TensorClass) -> i64 {
        self.0[class]
    }

    /// Bytes of each class, where that is as many as there are.
    ///
    /// # Panics
    /// Below the instant that the level is above.
    pub fn bytes(self) -> ByClass<Bytes> {
        self.0
            .map(|bytes| Bytes(u64::try_from(bytes).expect("bytes are there or not")))
    }

    /// Bytes of all classes.
    pub fn total(self) -> i64 {
        self.0.total()
    }

    /// Bytes of all classes, in GiB.
    pub fn gib(self) -> f64 {
        self.total() as f64 / GIB as f64
    }

    /// The one with more bytes, this where they have as many.
    #[must_use]
    pub fn higher(self, other: Self) -> Self {
        if other.total() > self.total() {
            other
        } else {
            self
        }
    }
}

impl Add for Level {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl Sub for Level {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + other * -1
    }
}

impl Mul<i64> for Level {
    type Output = Self;
    fn mul(self, times: i64) -> Self {
        Self(self.0.map(|bytes| bytes * times))
    }
}

/// A tensor on a tape. Not `Clone`: what is given back is given once.
#[derive(Debug)]
#[must_use = "a tensor is kept, handed on or given back"]
pub struct Held {
    class: TensorClass,
    dtype: Dtype,
    elements: u64,
}

impl Held {
    /// One that was there before the tape began, or has no memory of its own where `elements` is 0.
    pub fn given(class: TensorClass, dtype: Dtype, elements: u64) -> Self {
        Self {
            class,
            dtype,
            elements,
        }
    }

    /// Elements of the tensor.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// Their type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn level(&self) -> Level {
        Level::of(self.class, self.dtype.bytes(self.elements))
    }
}

/// See the module's documentation. Levels are above what was alive when it began.
#[derive(Debug, Default)]
pub struct Tape {
    live: Level,
    peak: Level,
}

impl Tape {
    /// Allocates a tensor.
    pub fn take(&mut self, class: TensorClass, dtype: Dtype, elements: u64) -> Held {
        let held = Held::given(class, dtype, elements);
        self.live = self.live + held.level();
        self.peak = self.peak.higher(self.live);
        held
    }

    /// Drops the last handle on a tensor.
    #[expect(clippy::needless_pass_by_value, reason = "it is gone after this")]
    pub fn give(&mut self, held: Held) {
        self.live = self.live - held.level();
    }

    /// Memory that an op takes to work in and gives back before it returns.
    pub fn work_in(&mut self, dtype: Dtype, elements: u64) {
        let held = self.take(TensorClass::Transient, dtype, elements);
        self.give(held);
    }

    /// What is alive now.
    pub fn live(&self) -> Level {
        self.live
    }

    /// What was alive at most; the first such instant where there are several.
    pub fn peak(&self) -> Level {
        self.peak
    }
}
