//! [`Level`]: bytes alive by class, and [`Account`]: how high they were.

use std::ops::{Add, Mul, Sub};

use moefold_profiles::units::{Bytes, GIB};
use moefold_profiles::{ByClass, TensorClass};

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
}

/// Something that memory is told in: [`Level`]s, or bytes of all classes.
pub trait Height: Copy + Default + Add<Output = Self> + Sub<Output = Self> {
    /// The one with more bytes, this where they have as many.
    #[must_use]
    fn higher(self, other: Self) -> Self;
}

impl Height for Level {
    fn higher(self, other: Self) -> Self {
        if other.total() > self.total() {
            other
        } else {
            self
        }
    }
}

impl Height for i64 {
    fn higher(self, other: Self) -> Self {
        self.max(other)
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

/// What is alive, above an instant that is said where there is one, and was at most since then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    live: Level,
    peak: Level,
}

impl Account {
    /// A tensor is allocated.
    pub fn take(&mut self, class: TensorClass, bytes: Bytes) {
        self.live.0[class] += bytes.0 as i64;
        self.peak = self.peak.higher(self.live);
    }

    /// The last handle on a tensor is dropped; it may have been there before.
    pub fn give(&mut self, class: TensorClass, bytes: Bytes) {
        self.live.0[class] -= bytes.0 as i64;
    }

    /// What another account tells comes after.
    pub fn append(&mut self, next: &Self) {
        self.peak = self.peak.higher(self.live + next.peak);
        self.live = self.live + next.live;
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
