//! What several rounds have in common.

use serde_json::{Value, json};

/// The middle and the ends of what was measured in several rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    pub(super) fn of(figures: impl Iterator<Item = f64>) -> Self {
        let mut figures: Vec<f64> = figures.collect();
        figures.sort_by(f64::total_cmp);
        let (low, high) = (figures.len().saturating_sub(1) / 2, figures.len() / 2);
        match (figures.first(), figures.get(low), figures.get(high), figures.last()) {
            (Some(&min), Some(low), Some(high), Some(&max)) => {
                Self { median: f64::midpoint(*low, *high), min, max }
            }
            _ => Self::default(),
        }
    }

    pub(super) fn text(self, digits: usize) -> String {
        let Self { median, min, max } = self;
        format!("{median:.digits$} ({min:.digits$}–{max:.digits$})")
    }

    pub(super) fn json(self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn a_spread_has_the_middle_and_the_ends() {
        let of = |figures: &[f64]| Spread::of(figures.iter().copied());
        assert_eq!(of(&[3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(of(&[4.0, 1.0, 3.0, 2.0]), Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(of(&[]).text(1), "0.0 (0.0–0.0)");
    }
}
