//! [`TensorClass`]: what memory holds, and [`ByClass`]: a value for each class.
//!
//! The account of a device, the planner's memory model, plans, runs and reports all count by these
//! classes and write them under the same keys.

use std::fmt;
use std::iter::Sum;
use std::marker::PhantomData;
use std::ops::{Add, Index, IndexMut};

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde::{Serialize, Serializer};

crate::named! {
    /// What memory of a device holds; the keys of `memory_gib` in a plan, in the order of plans and
    /// reports.
    pub enum TensorClass {
        /// Model weights.
        Weights = "weights",
        /// Main gradients.
        Gradients = "gradients",
        /// Optimizer moments and master weights.
        Optimizer = "optimizer",
        /// Kept between a forward and its backward, or flowing between ops.
        Activations = "activations",
        /// Communication staging, products of backward passes and workspaces: the working set of the
        /// op that peaks.
        Transient = "transient",
        /// Logits of the head, their gradient and loss buffers.
        Logits = "logits",
        /// What is taken beside tensors: context, libraries, communicators. No tensor has it.
        Overhead = "overhead",
    }
}

/// A value for each [`TensorClass`]. In JSON an object with every class as a key; `overhead` may be
/// absent and is then the default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ByClass<T>([T; TensorClass::ALL.len()]);

impl<T> ByClass<T> {
    /// What `of` says of each class.
    pub fn from_fn(of: impl FnMut(TensorClass) -> T) -> Self {
        Self(TensorClass::ALL.map(of))
    }

    /// The same classes with every value mapped.
    pub fn map<U>(self, of: impl FnMut(T) -> U) -> ByClass<U> {
        ByClass(self.0.map(of))
    }

    /// Classes and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (TensorClass, &T)> {
        TensorClass::ALL.into_iter().zip(&self.0)
    }
}

impl<T: Copy + Sum> ByClass<T> {
    /// The sum over all classes.
    pub fn total(&self) -> T {
        self.0.iter().copied().sum()
    }
}

impl<T> Index<TensorClass> for ByClass<T> {
    type Output = T;
    fn index(&self, class: TensorClass) -> &T {
        &self.0[class as usize]
    }
}

impl<T> IndexMut<TensorClass> for ByClass<T> {
    fn index_mut(&mut self, class: TensorClass) -> &mut T {
        &mut self.0[class as usize]
    }
}

impl<T: Copy + Add<Output = T>> Add for ByClass<T> {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self::from_fn(|class| self[class] + other[class])
    }
}

impl<T: Serialize> Serialize for ByClass<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de, T: Deserialize<'de> + Default> Deserialize<'de> for ByClass<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Classes(PhantomData))
    }
}

struct Classes<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Default> Visitor<'de> for Classes<T> {
    type Value = ByClass<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object with a value for each class of memory")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ByClass<T>, A::Error> {
        let mut found = ByClass::from_fn(|_| None);
        while let Some((class, value)) = map.next_entry::<TensorClass, T>()? {
            if found[class].replace(value).is_some() {
                return Err(A::Error::duplicate_field(class.name()));
            }
        }
        let absent = TensorClass::ALL
            .into_iter()
            .find(|&class| class != TensorClass::Overhead && found[class].is_none());
        match absent {
            Some(class) => Err(A::Error::missing_field(class.name())),
            None => Ok(found.map(Option::unwrap_or_default)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    fn powers() -> ByClass<Bytes> {
        ByClass::from_fn(|class| Bytes(1 << class as u64))
    }

    #[test]
    fn golden_keys_are_those_of_the_contract() {
        assert_eq!(
            serde_json::to_string(&powers()).expect("serializes"),
            r#"{"weights":1,"gradients":2,"optimizer":4,"activations":8,"transient":16,"logits":32,"overhead":64}"#
        );
    }

    #[test]
    fn law_the_total_is_the_sum_of_the_classes() {
        assert_eq!(powers().total(), Bytes(127));
        assert_eq!((powers() + powers()).total(), Bytes(254));
    }

    #[test]
    fn law_values_round_trip_and_overhead_may_be_absent() {
        let text = serde_json::to_string(&powers()).expect("serializes");
        let back: ByClass<Bytes> = serde_json::from_str(&text).expect("parses");
        assert_eq!(back, powers());
        let without: ByClass<Bytes> =
            serde_json::from_str(&text.replace(r#","overhead":64"#, "")).expect("parses");
        assert_eq!(without.total(), Bytes(63));
    }

    #[test]
    fn unknown_missing_and_repeated_keys_are_refused_by_name() {
        let text = serde_json::to_string(&powers()).expect("serializes");
        for (text, word) in [
            (text.replace("weights", "wieghts"), "wieghts"),
            (text.replace(r#""logits":32,"#, ""), "logits"),
            (text.replace("logits", "gradients"), "gradients"),
        ] {
            let error = serde_json::from_str::<ByClass<Bytes>>(&text).expect_err("refused");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
