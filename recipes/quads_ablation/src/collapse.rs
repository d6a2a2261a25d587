//! When an arm counts as collapsed. The rules were written down before the first run, and look at nothing but the curve.
//!
//! 1. **accuracy**: held-out pass@1 in the arm's own rollout precision is below 70 % of its running maximum at 20
//!    evaluations in a row. The step of the twentieth counts.
//! 2. **skipped**: more than 5 % of the updates so far were left out because loss or gradient was not finite. Counted from
//!    step 20 on, so that one bad update at the beginning does not decide.
//! 3. **gap**: the largest |Δ log-prob| rises while the reward falls, over the last third of the steps so far and not less
//!    than 30: Spearman's rank correlation with the step is at least +0.5 for the largest |Δ| and at most −0.5 for the
//!    reward, both as means over 5 steps that do not overlap, and the last mean of the reward is below 90 % of the
//!    window's first.
//!
//! The earliest step counts; at the same step the first rule of this list. An evaluation or a number that is missing
//! (`null`) breaks nothing: rules go on with those that there are.
use crate::results::{Collapse, Curve};

/// Share of the running maximum below which pass@1 counts as fallen.
pub const FALLEN: f64 = 0.7;
/// Evaluations in a row.
pub const EVALUATIONS: usize = 20;
/// Share of skipped updates.
pub const SKIPPED: f64 = 0.05;
/// Step from which skipped updates are counted.
pub const SKIPPED_FROM: usize = 20;
/// Rank correlation that is a rise, or with a minus a fall.
pub const CORRELATION: f64 = 0.5;
/// Fewest steps of the window of the third rule.
pub const WINDOW: usize = 30;
/// Steps of one mean in it.
pub const BIN: usize = 5;
/// Share of the window's first reward below which its last one counts as fallen.
pub const REWARD_FALLEN: f64 = 0.9;

/// The names of the curve that the rules look at.
pub const PASS_AT_1: &str = "eval/pass@1";
const SKIPPED_UPDATES: &str = "skipped_steps";
const UPDATES: &str = "actor/updates";
const GAP: &str = "sampling/sampling_logp_difference/max";
const REWARD: &str = "reward/mean";

/// Looks for the first collapse in a curve.
pub fn find(curve: &Curve) -> Option<Collapse> {
    let rules = [
        (accuracy(curve), "accuracy"),
        (skipped(curve), "skipped"),
        (gap(curve), "gap"),
    ];
    let met = rules.into_iter().filter_map(|(step, rule)| {
        Some(Collapse {
            step: step?,
            rule: rule.into(),
        })
    });
    met.min_by_key(|collapse| collapse.step)
}

/// Steps with the numbers that were measured.
fn column<'a>(curve: &'a Curve, name: &str) -> impl Iterator<Item = (usize, f64)> + 'a {
    let values = curve.columns.get(name).map_or(&[][..], |values| values);
    let steps = curve.step.iter().copied().zip(values);
    steps.filter_map(|(step, value)| Some((step, (*value)?)))
}

fn accuracy(curve: &Curve) -> Option<usize> {
    let (mut maximum, mut fallen) = (0.0f64, 0);
    for (step, value) in column(curve, PASS_AT_1) {
        maximum = maximum.max(value);
        fallen = if value < FALLEN * maximum { fallen + 1 } else { 0 };
        if fallen == EVALUATIONS {
            return Some(step);
        }
    }
    None
}

fn skipped(curve: &Curve) -> Option<usize> {
    let mut applied = 0.0;
    let updates = column(curve, UPDATES).zip(column(curve, SKIPPED_UPDATES));
    for ((step, updates), (_, skipped)) in updates {
        applied += updates;
        if step >= SKIPPED_FROM && skipped > SKIPPED * (applied + skipped) {
            return Some(step);
        }
    }
    None
}

fn gap(curve: &Curve) -> Option<usize> {
    let (gap, reward) = (bins(curve, GAP), bins(curve, REWARD));
    let bins = gap.len().min(reward.len());
    (WINDOW / BIN..=bins).find_map(|end| {
        let window = end - (end / 3).max(WINDOW / BIN)..end;
        let values = |bins: &[(usize, f64)]| bins[window.clone()].iter().map(|bin| bin.1).collect::<Vec<_>>();
        let (gaps, rewards) = (values(&gap), values(&reward));
        let fell = rewards[rewards.len() - 1] < REWARD_FALLEN * rewards[0];
        let met = fell && rank_correlation(&gaps) >= CORRELATION && rank_correlation(&rewards) <= -CORRELATION;
        met.then(|| reward[end - 1].0)
    })
}

/// Means over [`BIN`] steps, with the last step of each; without what is left at the end.
fn bins(curve: &Curve, name: &str) -> Vec<(usize, f64)> {
    let values: Vec<_> = column(curve, name).collect();
    let mean = |bin: &[(usize, f64)]| bin.iter().map(|(_, value)| value).sum::<f64>() / BIN as f64;
    let bins = values.chunks_exact(BIN);
    bins.map(|bin| (bin[BIN - 1].0, mean(bin))).collect()
}

/// Spearman's rank correlation of values with their order; equal values share their mean rank. 0 where nothing varies.
fn rank_correlation(values: &[f64]) -> f64 {
    let rank = |value: f64| {
        let below = values.iter().filter(|other| **other < value).count();
        let equal = values.iter().filter(|other| **other == value).count();
        below as f64 + (equal as f64 - 1.0) / 2.0
    };
    let mean = (values.len() as f64 - 1.0) / 2.0;
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for (index, value) in values.iter().enumerate() {
        let (x, y) = (index as f64 - mean, rank(*value) - mean);
        (xx, yy, xy) = (xx + x * x, yy + y * y, xy + x * y);
    }
    if yy == 0.0 { 0.0 } else { xy / (xx * yy).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name, and the number at a step.
    type Column<'a> = (&'a str, &'a dyn Fn(usize) -> Option<f64>);

    fn curve(steps: usize, columns: &[Column<'_>]) -> Curve {
        let step: Vec<_> = (0..=steps).collect();
        let column = |of: &dyn Fn(usize) -> Option<f64>| step.iter().map(|step| of(*step)).collect();
        Curve {
            columns: columns
                .iter()
                .map(|(name, of)| (name.to_string(), column(*of)))
                .collect(),
            step,
        }
    }

    #[test]
    fn a_fall_below_seventy_percent_counts_after_twenty_evaluations() {
        // Every second step is evaluated; 0.8 until step 40, then 0.55 (0.56 is 70 %).
        let fallen = |to: f64| {
            curve(
                120,
                &[(PASS_AT_1, &move |step| {
                    step.is_multiple_of(2).then_some(if step <= 40 { 0.8 } else { to })
                })],
            )
        };
        let collapse = find(&fallen(0.55)).unwrap();
        assert_eq!((collapse.step, collapse.rule.as_str()), (42 + 2 * 19, "accuracy"));
        assert_eq!(find(&fallen(0.57)), None);
        // One evaluation above the bound begins the count anew.
        let mut interrupted = fallen(0.55);
        interrupted.columns.get_mut(PASS_AT_1).unwrap()[60] = Some(0.6);
        assert_eq!(find(&interrupted).unwrap().step, 62 + 2 * 19);
    }

    #[test]
    fn the_maximum_is_that_so_far() {
        // Below what comes later is no fall.
        let rising = curve(100, &[(PASS_AT_1, &|step| Some(if step < 50 { 0.3 } else { 0.9 }))]);
        assert_eq!(find(&rising), None);
    }

    #[test]
    fn one_skipped_update_in_twenty_is_the_bound() {
        let skipping = |every: usize| {
            curve(
                60,
                &[
                    (UPDATES, &move |step| {
                        (step > 0).then_some(if step.is_multiple_of(every) { 3.0 } else { 4.0 })
                    }),
                    (SKIPPED_UPDATES, &move |step| (step > 0).then(|| (step / every) as f64)),
                ],
            )
        };
        // One of four updates every fourth step: 6.25 %; every sixth step 4.2 %.
        let collapse = find(&skipping(4)).unwrap();
        assert_eq!((collapse.step, collapse.rule.as_str()), (20, "skipped"));
        assert_eq!(find(&skipping(6)), None);
    }

    #[test]
    fn a_rising_gap_with_a_falling_reward_is_a_collapse_and_either_alone_is_not() {
        let up = |step: usize| (step > 0).then_some(0.1 + step as f64 / 100.0);
        let down = |step: usize| (step > 0).then_some(0.9 - step as f64 / 100.0);
        let flat = |step: usize| (step > 0).then_some(0.5 + 0.01 * (step % 2) as f64);
        let of = |gap: &dyn Fn(usize) -> Option<f64>, reward: &dyn Fn(usize) -> Option<f64>| {
            find(&curve(60, &[(GAP, gap), (REWARD, reward)]))
        };
        let collapse = of(&up, &down).unwrap();
        assert_eq!((collapse.step, collapse.rule.as_str()), (30, "gap"));
        assert_eq!(of(&up, &up), None);
        assert_eq!(of(&down, &down), None);
        assert_eq!(of(&flat, &down), None);
        // A reward that trembles downwards by less than a tenth is none either.
        let tremble = |step: usize| (step > 0).then_some(0.9 - step as f64 / 2000.0);
        assert_eq!(of(&up, &tremble), None);
        // A fall that comes late is found in the last third.
        let late = |step: usize| {
            (step > 0).then_some(if step <= 120 {
                0.8
            } else {
                0.8 - (step - 120) as f64 / 100.0
            })
        };
        let late = find(&curve(180, &[(GAP, &up), (REWARD, &late)])).unwrap();
        assert!((130..=160).contains(&late.step), "{late:?}");
    }

    #[test]
    fn rank_correlation_is_spearmans() {
        assert_eq!(rank_correlation(&[1.0, 5.0, 7.0]), 1.0);
        assert_eq!(rank_correlation(&[3.0, 2.0, -1.0]), -1.0);
        assert_eq!(rank_correlation(&[2.0, 2.0]), 0.0);
        // 1 - 6 · (1 + 1) / (4 · 15)
        assert!((rank_correlation(&[2.0, 1.0, 3.0, 4.0]) - 0.8).abs() < 1e-12);
    }

    #[test]
    fn nothing_measured_is_no_collapse() {
        assert_eq!(find(&Curve::default()), None);
        assert_eq!(find(&curve(100, &[(PASS_AT_1, &|_| None), (REWARD, &|_| None)])), None);
    }
}
