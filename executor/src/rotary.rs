//! How a model turns queries and keys by their positions.

use std::f64::consts::TAU;

use moefold_kernels::Device;
use moefold_kernels::rope::{self, Rope};
use moefold_planner::model::{Llama3, Mixer, Mla, Model, RopeScaling, Yarn};

/// Frequencies of pairs in radians a position, and the factor on cosines and sines.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rotation {
    pub(crate) frequencies: Vec<f64>,
    pub(crate) amplitude: f64,
}

impl Rotation {
    /// That of a model; where nothing rotates, one whose table nobody reads.
    pub(crate) fn or_unread(model: &Model) -> Self {
        Self::of(model).unwrap_or(Self {
            frequencies: vec![1.0],
            amplitude: 1.0,
        })
    }

    /// Its table for tokens at these positions.
    pub(crate) fn table(
        &self,
        device: &Device,
        positions: &(impl ExactSizeIterator<Item = u32> + Clone),
    ) -> Rope {
        rope::table(device, positions, &self.frequencies, self.amplitude)
    }

    /// That of a model whose layers rotate alike; none where none rotates.
    pub(crate) fn of(model: &Model) -> Option<Self> {
        let mut mixers = model.layers.iter().filter_map(|layer| layer.mixer.as_ref());
        let width = mixers.find_map(Mixer::rotary_dim)? as usize;
        let theta = model.rope_theta?;
        let plain = Self {
            frequencies: rope::frequencies(width, theta),
            amplitude: 1.0,
        };
        Some(match &model.rope_scaling {
            Some(scaling) => plain.scaled(scaling, theta),
            None => plain,
        })
    }

    /// Rescaled by one of the kinds that [`crate::support`] admits.
    fn scaled(self, scaling: &RopeScaling, theta: f64) -> Self {
        match (scaling.factor, &scaling.yarn, &scaling.llama3) {
            (Some(factor), Some(yarn), _) => self.by_yarn(yarn, factor, theta),
            (Some(factor), _, Some(llama3)) => self.by_llama3(llama3, factor),
            _ => self,
        }
    }

    /// As transformers does for Llama 3.1 (`_compute_llama3_parameters`): how much of a frequency is kept rises with
    /// its turns over the original positions, from none at `low_freq_factor` to all at `high_freq_factor`.
    fn by_llama3(self, llama3: &Llama3, factor: f64) -> Self {
        let (low, high) = (llama3.low_freq_factor, llama3.high_freq_factor);
        let slowed = |frequency: f64| {
            let turns = llama3.original_max_position as f64 * frequency / TAU;
            let kept = if turns >= high {
                1.0
            } else {
                ((turns - low) / (high - low)).max(0.0)
            };
            frequency * kept + frequency / factor * (1.0 - kept)
        };
        Self {
            frequencies: self.frequencies.into_iter().map(slowed).collect(),
            ..self
        }
    }

    /// By YaRN (arXiv 2309.00071, equations 17 to 23 of section 3.2; the ends of the ramp as transformers rounds
    /// them).
    fn by_yarn(self, yarn: &Yarn, factor: f64, theta: f64) -> Self {
        let width = 2.0 * self.frequencies.len() as f64;
        // The pair that turns so often over the original positions.
        let pair = |turns: f64| {
            let positions = yarn.original_max_position as f64;
            width * (positions / (turns * TAU)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
        if yarn.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(width - 1.0));
        if low == high {
            high += 0.001;
        }
        let stretched = |(pair, frequency): (usize, f64)| {
            let slowed = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            frequency * (1.0 - slowed) + frequency / factor * slowed
        };
        let frequencies = self.frequencies.into_iter().enumerate();
        Self {
            frequencies: frequencies.map(stretched).collect(),
            amplitude: amplitude(yarn, factor),
        }
    }
}

/// The factor on cosines and sines.
fn amplitude(yarn: &Yarn, factor: f64) -> f64 {
    let stated = |mscale: Option<f64>| mscale.filter(|&mscale| mscale != 0.0);
    match (
        yarn.attention_factor,
        stated(yarn.mscale),
        stated(yarn.mscale_all_dim),
    ) {
        (Some(amplitude), ..) => amplitude,
        (None, Some(mscale), Some(all)) => attention(factor, mscale) / attention(factor, all),
        (None, ..) => attention(factor, 1.0),
    }
}

/// `0.1 mscale ln(factor) + 1` (arXiv 2309.00071, equation 22, with DeepSeek's weight).
fn attention(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        return 1.0;
    }
    0.1 * mscale * factor.ln() + 1.0
}

/// The factor on the scores of latent attention: one over the root of a key's width, times the square of
/// YaRN's factor for all dimensions (DeepSeek-V2's own code, and transformers').
pub(crate) fn latent_scale(mla: &Mla, scaling: Option<&RopeScaling>) -> f64 {
    let width = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) as f64;
    let stretched = scaling.and_then(|scaling| {
        let mscale = scaling.yarn.as_ref()?.mscale_all_dim?;
        (mscale != 0.0).then(|| attention(scaling.factor.unwrap_or(1.0), mscale))
    });
    stretched.unwrap_or(1.0).powi(2) / width.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use moefold_planner::model::presets;

    fn model(name: &str) -> Model {
        presets::load(name).expect("a preset")
    }

    /// By the definition of section 3.2, in words: the ratio of the original positions to a pair's wave length
    /// is how often it turns; from 32 turns on it is kept, up to one turn it is slowed by the factor.
    #[test]
    fn law_pairs_that_turn_often_are_kept_and_slow_ones_are_stretched() {
        for name in ["deepseek-v2-lite", "deepseek-v3"] {
            let model = model(name);
            let rotation = Rotation::of(&model).expect("it rotates");
            let plain = rope::frequencies(64, 10_000.0);
            assert_eq!(rotation.frequencies.len(), 32);
            assert_eq!(rotation.amplitude, 1.0, "{name}: both weights are equal");
            for (found, plain) in rotation.frequencies.iter().zip(plain) {
                let turns = 4096.0 * plain / TAU;
                assert!(*found <= plain && *found >= plain / 40.0 * (1.0 - 1e-12));
                if turns > 64.0 {
                    assert_eq!(*found, plain, "{name}: {turns} turns");
                }
                if turns < 0.5 {
                    assert!((found / (plain / 40.0) - 1.0).abs() < 1e-12, "{turns}");
                }
            }
            let kept = rotation.frequencies.windows(2).all(|two| two[0] > two[1]);
            assert!(kept, "{name}: frequencies fall");
        }
    }

    /// By the definition of transformers, in words: a wave as long as the original positions or longer is stretched by
    /// the factor, one of a quarter of them or shorter is kept.
    #[test]
    fn law_llama_3_1_stretches_long_waves_and_keeps_short_ones() {
        let model = model("llama-3.1-8b");
        let rotation = Rotation::of(&model).expect("it rotates");
        let plain = rope::frequencies(128, 500_000.0);
        assert_eq!(rotation.amplitude, 1.0);
        let (mut kept, mut stretched) = (0, 0);
        for (found, plain) in rotation.frequencies.iter().zip(plain) {
            let wave = TAU / plain;
            if wave <= 2048.0 {
                assert_eq!(*found, plain);
                kept += 1;
            } else if wave >= 8192.0 {
                assert_eq!(*found, plain / 8.0);
                stretched += 1;
            } else {
                assert!(plain / 8.0 < *found && *found < plain, "a wave of {wave}");
            }
        }
        assert!(kept > 0 && stretched > 0 && kept + stretched < 64);
    }

    #[test]
    fn golden_the_scale_of_latent_attention() {
        // 192^-0.5 times the square of 1 + 0.1 ln 40.
        let v3 = model("deepseek-v3");
        let Some(Mixer::Mla(mla)) = &v3.layers[0].mixer else {
            panic!("latent attention")
        };
        let scale = latent_scale(mla, v3.rope_scaling.as_ref());
        assert!((scale - 0.135_233_778_860_880_1).abs() < 1e-15, "{scale}");
        assert!((latent_scale(mla, None) - 192_f64.powf(-0.5)).abs() < 1e-15);
    }
}
