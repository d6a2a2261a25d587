//! Advantages: how much better a completion did than the others of its group (the completions of one prompt).
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::GrpoError;

/// Added to the standard deviation that advantages are divided by (TRL's value).
const STD_EPSILON: f64 = 1e-4;
/// A standard deviation up to this counts as zero (TRL: `isclose` to 0).
const ZERO_STD: f64 = 1e-8;

/// What the difference from the group's mean is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The standard deviation of the group's rewards (GRPO).
    #[default]
    Group,
    /// The standard deviation of all rewards of the batch.
    Batch,
    /// Nothing (Dr. GRPO).
    None,
}

/// Advantages of a batch, with what was noticed on the way.
#[derive(Clone, Debug, PartialEq)]
pub struct Advantages {
    /// One value a row.
    pub values: Vec<f32>,
    /// Fraction of the groups whose rewards are all equal: they teach nothing.
    pub frac_reward_zero_std: f64,
    /// Rows without a reward.
    pub missing_rewards: usize,
}

/// `A = (reward − mean of the group) / (std + 1e-4)`, std with Bessel's correction.
///
/// Row `i` belongs to group `group[i]`; the numbers of groups are free, the order of rows too, but each group must have
/// exactly `group_size` rows: with wrong membership GRPO still runs and silently learns little.
/// A NaN reward is a missing one: its row has advantage 0 and takes no part in means and deviations.
/// A group whose rewards are all equal has advantage exactly 0, under every scaling.
pub fn group_advantages(
    rewards: &[f32],
    group: &[usize],
    group_size: usize,
    scale: ScaleRewards,
) -> Result<Advantages, GrpoError> {
    if group_size < 2 {
        return Err(GrpoError::option(
            "group_size",
            "at least 2 (the advantage compares completions of one prompt)",
            group_size,
        ));
    }
    if group.len() != rewards.len() {
        return Err(GrpoError::batch(
            "group",
            format!("one entry for each of {} rewards", rewards.len()),
            group.len(),
        ));
    }
    if let Some(row) = rewards.iter().position(|reward| reward.is_infinite()) {
        return Err(GrpoError::batch(
            format!("rewards[{row}]"),
            "a finite number, or NaN for a missing reward",
            rewards[row],
        ));
    }
    let mut members = BTreeMap::<usize, Vec<usize>>::new();
    for (row, &group) in group.iter().enumerate() {
        members.entry(group).or_default().push(row);
    }
    for (group, rows) in &members {
        if rows.len() != group_size {
            return Err(GrpoError::batch(
                format!("group {group}"),
                format!("{group_size} rows (group_size)"),
                rows.len(),
            ));
        }
    }

    let scored = |rows: &[usize]| -> Vec<f64> {
        rows.iter()
            .map(|&row| rewards[row] as f64)
            .filter(|reward| !reward.is_nan())
            .collect()
    };
    let all_rows = (0..rewards.len()).collect::<Vec<_>>();
    let (_, batch_std) = mean_and_std(&scored(&all_rows));

    let mut values = vec![0.0; rewards.len()];
    let mut zero_std_groups = 0;
    for rows in members.values() {
        let (mean, std) = mean_and_std(&scored(rows));
        if std <= ZERO_STD {
            zero_std_groups += 1;
            continue;
        }
        let divisor = match scale {
            ScaleRewards::Group => std + STD_EPSILON,
            ScaleRewards::Batch => batch_std + STD_EPSILON,
            ScaleRewards::None => 1.0,
        };
        for &row in rows {
            if !rewards[row].is_nan() {
                values[row] = ((rewards[row] as f64 - mean) / divisor) as f32;
            }
        }
    }
    Ok(Advantages {
        values,
        frac_reward_zero_std: zero_std_groups as f64 / members.len().max(1) as f64,
        missing_rewards: rewards.iter().filter(|reward| reward.is_nan()).count(),
    })
}

/// Mean and sample standard deviation; a deviation of fewer than two values is 0: there is nothing to compare.
fn mean_and_std(values: &[f64]) -> (f64, f64) {
    if values.len() < 2 {
        return (values.first().copied().unwrap_or(0.0), 0.0);
    }
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, variance.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALES: [ScaleRewards; 3] = [ScaleRewards::Group, ScaleRewards::Batch, ScaleRewards::None];

    fn advantages(rewards: &[f32], group: &[usize], scale: ScaleRewards) -> Vec<f32> {
        group_advantages(rewards, group, 2, scale).unwrap().values
    }

    #[test]
    fn a_pair_is_scaled_by_its_own_deviation_the_batch_or_nothing() {
        let rewards = [1.0, 0.0, 3.0, 1.0];
        let group = [0, 0, 1, 1];
        let expected = 0.5 / (0.5f64.sqrt() + 1e-4);
        let values = advantages(&rewards, &group, ScaleRewards::Group);
        assert!((values[0] as f64 - expected).abs() < 1e-6 && (values[1] as f64 + expected).abs() < 1e-6);
        assert_eq!(advantages(&rewards, &group, ScaleRewards::None), [0.5, -0.5, 1.0, -1.0]);
        // Deviation of 1, 0, 3, 1 about 1.25: sqrt(4.75 / 3).
        let expected = 0.5 / ((4.75f64 / 3.0).sqrt() + 1e-4);
        assert!((advantages(&rewards, &group, ScaleRewards::Batch)[0] as f64 - expected).abs() < 1e-6);
    }

    #[test]
    fn zero_variance_group_has_advantage_exactly_zero_and_is_counted() {
        // 0.1 is not exact: (0.1 + 0.1 + 0.1) / 3 differs from 0.1 in the last bit, and a division would amplify that.
        let rewards = [0.1, 0.1, 0.1, 1.0, 0.0, 0.0];
        for scale in SCALES {
            let result = group_advantages(&rewards, &[7, 7, 7, 2, 2, 2], 3, scale).unwrap();
            assert_eq!(result.values[..3], [0.0; 3], "{scale:?}");
            assert!(result.values[3] > 0.0 && result.values[4] < 0.0);
            assert_eq!(result.frac_reward_zero_std, 0.5);
        }
    }

    #[test]
    fn missing_reward_has_advantage_zero_and_leaves_mean_and_std() {
        let with = group_advantages(&[1.0, f32::NAN, 0.0], &[0; 3], 3, ScaleRewards::Group).unwrap();
        let without = advantages(&[1.0, 0.0], &[0; 2], ScaleRewards::Group);
        assert_eq!(with.values, [without[0], 0.0, without[1]]);
        assert_eq!(with.missing_rewards, 1);
        for scale in SCALES {
            let lonely = group_advantages(&[1.0, f32::NAN, f32::NAN, f32::NAN], &[0, 0, 1, 1], 2, scale).unwrap();
            assert_eq!(
                lonely.values, [0.0; 4],
                "{scale:?}: one reward alone compares with nothing"
            );
            assert_eq!(lonely.frac_reward_zero_std, 1.0);
        }
    }

    #[test]
    fn rows_of_a_group_need_not_be_neighbours() {
        let values = advantages(&[1.0, 5.0, 0.0, 5.0], &[4, 9, 4, 9], ScaleRewards::None);
        assert_eq!(values, [0.5, 0.0, -0.5, 0.0]);
    }

    #[test]
    fn wrong_groups_and_rewards_are_refused_by_name() {
        let error = |rewards: &[f32], group: &[usize], size| {
            group_advantages(rewards, group, size, ScaleRewards::Group)
                .unwrap_err()
                .to_string()
        };
        assert!(error(&[1.0], &[0], 1).starts_with("group_size: expected at least 2"));
        assert_eq!(
            error(&[1.0, 0.0, 1.0, 0.0], &[0, 0, 0, 1], 2),
            "group 0: expected 2 rows (group_size), got 3"
        );
        assert!(error(&[1.0, 0.0], &[0], 2).starts_with("group: expected one entry"));
        assert!(error(&[1.0, f32::INFINITY], &[0, 0], 2).starts_with("rewards[1]: expected a finite"));
    }

    #[test]
    fn an_empty_batch_has_no_groups() {
        let result = group_advantages(&[], &[], 8, ScaleRewards::Group).unwrap();
        assert!(result.values.is_empty());
        assert_eq!(result.frac_reward_zero_std, 0.0);
    }
}
