//! Colours: one for each category of time and class of memory, the same in every plot.
//!
//! Families carry the meaning and survive colour blindness through lightness: compute is blue and
//! green, communication orange to pink, waiting and overhead grey, extra work purple. Neighbours in a
//! stacked bar always differ in lightness. Base hues follow Okabe and Ito, "Color Universal Design"
//! (2008).

use moefold_profiles::{Category, TensorClass};

/// What a shape is painted with. The named ones follow the page's light or dark theme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Paint {
    /// Text and marks.
    Ink,
    /// Secondary text.
    Muted,
    /// Grid lines.
    Grid,
    /// The background.
    Paper,
    /// A limit that must not be crossed.
    Limit,
    /// A fixed colour, `0xRRGGBB`.
    Rgb(u32),
}

impl Paint {
    /// The colour on a light background.
    pub(crate) fn rgb(self) -> (u8, u8, u8) {
        let hex = match self {
            Self::Ink => 0x1a_1f_29,
            Self::Muted => 0x5b_65_75,
            Self::Grid => 0xe2_e6_ec,
            Self::Paper => 0xff_ff_ff,
            Self::Limit => 0xb3_1d_28,
            Self::Rgb(hex) => hex,
        };
        ((hex >> 16) as u8, (hex >> 8) as u8, hex as u8)
    }

    /// The class that lets a page restyle it.
    pub(crate) fn class(self) -> Option<&'static str> {
        match self {
            Self::Ink => Some("ink"),
            Self::Muted => Some("muted"),
            Self::Grid => Some("grid"),
            Self::Paper => Some("paper"),
            Self::Limit => Some("limit"),
            Self::Rgb(_) => None,
        }
    }

    /// Ink that reads on top of this colour: by relative luminance, WCAG 2.1.
    pub(crate) fn text_on(self) -> Self {
        let (r, g, b) = self.rgb();
        let linear = |channel: u8| {
            let c = f64::from(channel) / 255.0;
            if c <= 0.040_45 {
                c / 12.92
            } else {
                ((c + 0.055) / 1.055).powf(2.4)
            }
        };
        let luminance = 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
        // Equal contrast with black and white is at sqrt(1.05 * 0.05) - 0.05.
        if luminance > 0.179 {
            Self::Rgb(0x1a_1f_29)
        } else {
            Self::Rgb(0xff_ff_ff)
        }
    }
}

/// The colour of a category of time.
pub(crate) fn category(category: Category) -> Paint {
    Paint::Rgb(match category {
        Category::Attention => 0x1f_4e_8c,
        Category::Experts => 0x56_a5_e8,
        Category::Dense => 0x0f_7a_6c,
        Category::RouterPermute => 0x8c_d4_be,
        Category::TpComm => 0xb8_4a_0e,
        Category::CpComm => 0xff_d4_4f,
        Category::EpComm => 0xf0_86_1f,
        Category::PpComm => 0x8a_1f_4d,
        Category::DpComm => 0xe7_8a_b8,
        Category::Bubble => 0xc9_ce_d6,
        Category::Waiting => 0xe3_b7_a0,
        Category::Recompute => 0x6a_3d_9a,
        Category::Offload => 0xc5_ac_e0,
        Category::Optimizer => 0x6b_71_2a,
        Category::Host => 0x7c_85_93,
    })
}

/// A category in words.
pub(crate) fn category_label(category: Category) -> &'static str {
    match category {
        Category::Attention => "attention",
        Category::Experts => "experts",
        Category::Dense => "dense, embedding, loss",
        Category::RouterPermute => "router, permute",
        Category::TpComm => "TP communication",
        Category::CpComm => "CP communication",
        Category::EpComm => "EP dispatch, combine",
        Category::PpComm => "PP communication",
        Category::DpComm => "DP communication",
        Category::Bubble => "pipeline bubble",
        Category::Waiting => "waiting for others",
        Category::Recompute => "recompute",
        Category::Offload => "offload",
        Category::Optimizer => "optimizer",
        Category::Host => "host",
    }
}

/// The colour of a class of memory.
pub(crate) fn memory(class: TensorClass) -> Paint {
    Paint::Rgb(match class {
        TensorClass::Weights => 0x1f_4e_8c,
        TensorClass::Gradients => 0x8c_d4_be,
        TensorClass::Optimizer => 0x6b_71_2a,
        TensorClass::Activations => 0xf0_86_1f,
        TensorClass::Transient => 0xe7_8a_b8,
        TensorClass::Logits => 0x6a_3d_9a,
        TensorClass::Overhead => 0xc9_ce_d6,
    })
}

/// Colours of series that have no meaning of their own (runs, layouts); they repeat.
pub(crate) const SERIES: [Paint; 8] = [
    Paint::Rgb(0x00_72_b2),
    Paint::Rgb(0xd5_5e_00),
    Paint::Rgb(0x00_9e_73),
    Paint::Rgb(0xcc_79_a7),
    Paint::Rgb(0x8a_6d_00),
    Paint::Rgb(0x56_b4_e9),
    Paint::Rgb(0x7a_3e_9d),
    Paint::Rgb(0x7c_85_93),
];

/// What was predicted, where it stands beside what was measured.
pub(crate) const PREDICTED: Paint = Paint::Rgb(0xe6_9f_00);
/// What was measured.
pub(crate) const MEASURED: Paint = Paint::Rgb(0x00_72_b2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_every_category_has_its_own_colour() {
        let mut seen: Vec<(u8, u8, u8)> =
            Category::ALL.iter().map(|&c| category(c).rgb()).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), Category::ALL.len());
    }

    #[test]
    fn law_every_class_of_memory_has_its_own_colour() {
        let mut seen = TensorClass::ALL.map(|class| memory(class).rgb()).to_vec();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), TensorClass::ALL.len());
    }

    #[test]
    fn text_is_dark_on_light_and_light_on_dark() {
        assert_eq!(Paint::Rgb(0xff_ff_ff).text_on(), Paint::Rgb(0x1a_1f_29));
        assert_eq!(Paint::Rgb(0x1f_4e_8c).text_on(), Paint::Rgb(0xff_ff_ff));
    }
}
