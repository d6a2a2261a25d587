//! What a handful of seeds can tell: means with standard errors, and paired differences with bootstrap intervals.
//!
//! Two arms of one seed start from the same policy, are trained on the same problems in the same order, and answer the same
//! held-out problems with the same random numbers. So they are compared problem by problem, and seeds are drawn as wholes:
//! a resample draws seeds with replacement, then for each seed its problems with replacement, pairs kept. The interval holds
//! the middle 95 % of the differences of [`RESAMPLES`] such resamples (percentile bootstrap, hierarchical).
//!
//! **How far to trust it with 5 seeds.** It answers "how much would this difference move with other seeds like these and other
//! problems like these". Where seeds agree, only problems move it, there are many, and the interval is rather too long: the
//! resampled seeds bring the problems' noise in a second time. Where seeds differ much (an arm that collapses in two seeds of
//! five), five seeds say little about the seeds that were not run, and the interval is too short: resampled means of n seeds
//! spread √((n − 1) / n) of what they should, and its ends take no account of how uncertain that spread is. In the simulation
//! among the tests it holds the true difference in 99 % of the cases where seeds agree, and in 82 % where they differ far more
//! than problems do. With 3 such seeds its ends are those of the seeds (all of a resample are the lowest one in 1 of 27 cases), which
//! is 75 %; with one seed it knows problems alone. So the number of seeds above and below zero always stands beside it: if an arm made no difference, all
//! of five seeds would be on one side in 1 of 16 comparisons.
use anyhow::{Result, bail};
use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use std::fmt;

use crate::results::{Answers, Seed, Series, Side};

/// Resamples of an interval.
pub const RESAMPLES: usize = 10_000;
/// What an interval means, for those who read tables.
pub const READING: &str = "Intervals are paired 95 % percentile bootstrap intervals: 10,000 resamples draw seeds with \
    replacement, then each seed's problems, both arms' answers to a problem staying together. With 5 seeds they are rather too \
    long where seeds agree (99 % of simulated intervals held the true difference) and too short where seeds differ much more \
    than problems do (82 %); with 3 such seeds they are no more than the range of the seeds (75 %), and with one they know nothing \
    of other seeds. So read them with the seeds above and below zero that stand beside: without any effect all of 5 \
    seeds are on one side in 1 of 16 comparisons.";
/// Of the resamples; the same data have the same interval.
const SEED: u64 = 95;

/// A number measured once a seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Over the seeds.
    pub mean: f64,
    /// Of the mean; absent with one seed.
    pub standard_error: Option<f64>,
    /// Smallest.
    pub low: f64,
    /// Median.
    pub median: f64,
    /// Largest.
    pub high: f64,
    /// How many.
    pub seeds: usize,
}

impl Spread {
    /// Of some values; `None` without values, or when one is NaN.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        if values.is_empty() || values.iter().any(|value| value.is_nan()) {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let number = count as f64;
        let mean = values.iter().sum::<f64>() / number;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Some(Self {
            mean,
            standard_error: (count > 1).then(|| (squares / (number - 1.0) / number).sqrt()),
            low: values[0],
            median: 0.5 * (values[(count - 1) / 2] + values[count / 2]),
            high: values[count - 1],
            seeds: count,
        })
    }
}

/// A difference of two arms' pass@1.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Over the seeds, each weighing the same.
    pub mean: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// By seed, in their order.
    pub by_seed: Vec<f64>,
}

impl Difference {
    /// Seeds above, at and below zero.
    pub fn signs(&self) -> [usize; 3] {
        let count = |holds: fn(f64) -> bool| self.by_seed.iter().filter(|d| holds(**d)).count();
        [count(|d| d > 0.0), count(|d| d == 0.0), count(|d| d < 0.0)]
    }

    /// Whether the interval leaves zero out.
    pub fn is_clear(&self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}

/// In points: `-1.2 [-3.4, +0.5]`.
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [mean, low, high] = [self.mean, self.low, self.high].map(points);
        write!(f, "{mean} [{low}, {high}]")
    }
}

/// A difference of shares in percentage points, with one digit and its sign.
pub fn points(difference: f64) -> String {
    let text = format!("{:+.1}", 100.0 * difference);
    match text.as_str() {
        "+0.0" | "-0.0" => "0.0".into(),
        _ => text,
    }
}

/// Difference of the final pass@1 of two arms over the seeds that have both; `None` where no seed has.
///
/// # Errors
/// When the arms of a seed answered other numbers of problems.
pub fn final_difference(series: &Series, one: &str, other: &str, side: Side) -> Result<Option<Difference>> {
    let pair = |seed: &Seed| {
        let [one, other] = [one, other].map(|arm| seed.arm(arm).map(|arm| arm.end.side(side).clone()));
        Some((one?, other?))
    };
    let pairs: Vec<(Answers, Answers)> = series.seeds.iter().filter_map(pair).collect();
    match pairs.is_empty() {
        true => Ok(None),
        false => paired_difference(&pairs, SEED).map(Some),
    }
}

/// Difference of the shares of right answers (first less second), with its interval: one pair of answers a seed.
///
/// # Errors
/// Without pairs, without problems, or when the two of a pair have other numbers of problems.
pub fn paired_difference(pairs: &[(Answers, Answers)], seed: u64) -> Result<Difference> {
    if pairs.is_empty() {
        bail!("no seed has both arms");
    }
    let mut by_seed = Vec::with_capacity(pairs.len());
    let mut resampled = Vec::with_capacity(pairs.len());
    for (one, other) in pairs {
        let problems = one.0.len();
        if problems == 0 || problems != other.0.len() {
            bail!("{problems} answers to be compared with {}", other.0.len());
        }
        let count = |won: bool| {
            one.0
                .iter()
                .zip(&other.0)
                .filter(|(a, b)| **a == won && **b != won)
                .count()
        };
        let (won, lost) = (count(true), count(false));
        by_seed.push((won as f64 - lost as f64) / problems as f64);
        resampled.push(ResampledSum::new(won, lost, problems));
    }
    let number = pairs.len() as f64;
    let mean = by_seed.iter().sum::<f64>() / number;
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut draws: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let draw = |_| resampled[random.random_range(0..pairs.len())].draw(random.random());
            (0..pairs.len()).map(draw).sum::<f64>() / number
        })
        .collect();
    draws.sort_by(f64::total_cmp);
    Ok(Difference {
        mean,
        low: quantile(&draws, 0.025),
        high: quantile(&draws, 0.975),
        by_seed,
    })
}

/// Between the two nearest of sorted values.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = share * (sorted.len() - 1) as f64;
    let (below, part) = (at as usize, at.fract());
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + part * (sorted[above] - sorted[below])
}

/// The mean difference of one seed when its problems are drawn with replacement: its exact distribution, so that a resample
/// is one number and not one a problem.
struct ResampledSum {
    problems: usize,
    /// Chance of a sum of `i − problems` or less.
    cumulative: Vec<f64>,
}

impl ResampledSum {
    /// Every draw adds 1 with chance `won / problems`, −1 with chance `lost / problems`.
    fn new(won: usize, lost: usize, problems: usize) -> Self {
        let chance = |count: usize| count as f64 / problems as f64;
        let one = vec![chance(lost), chance(problems - won - lost), chance(won)];
        // The distribution of a sum of independent draws is a convolution; its power by squaring.
        let (mut power, mut square, mut left) = (vec![1.0], one, problems);
        while left > 0 {
            if !left.is_multiple_of(2) {
                power = convolve(&power, &square);
            }
            left /= 2;
            if left > 0 {
                square = convolve(&square, &square);
            }
        }
        let mut sum = 0.0;
        for chance in &mut power {
            sum += *chance;
            *chance = sum;
        }
        Self {
            problems,
            cumulative: power,
        }
    }

    /// The mean at a uniform number in [0, 1).
    fn draw(&self, uniform: f64) -> f64 {
        // The chances add up to 1 but for rounding.
        let last = self.cumulative.len() - 1;
        let at = uniform * self.cumulative[last];
        let index = self.cumulative.partition_point(|chance| *chance <= at).min(last);
        (index as f64 - self.problems as f64) / self.problems as f64
    }
}

fn convolve(one: &[f64], other: &[f64]) -> Vec<f64> {
    let mut sums = vec![0.0; one.len() + other.len() - 1];
    for (at, factor) in one.iter().enumerate() {
        // Most sums are out of reach.
        if *factor > 1e-18 {
            for (sum, value) in sums[at..].iter_mut().zip(other) {
                *sum += factor * value;
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `won` problems only the first solves, `lost` only the second, of `problems`.
    fn pair(won: usize, lost: usize, problems: usize) -> (Answers, Answers) {
        let first = (0..problems).map(|at| at < won).collect();
        let second = (0..problems).map(|at| (won..won + lost).contains(&at)).collect();
        (first, second)
    }

    #[test]
    fn a_spread_is_that_of_the_textbook() {
        let spread = Spread::of([0.8, 0.4, 0.6]).unwrap();
        assert!((spread.mean - 0.6).abs() < 1e-15);
        // Standard deviation 0.2, over the root of 3.
        assert!((spread.standard_error.unwrap() - 0.2 / 3f64.sqrt()).abs() < 1e-15);
        assert_eq!(
            (spread.low, spread.median, spread.high, spread.seeds),
            (0.4, 0.6, 0.8, 3)
        );
        assert_eq!(Spread::of([1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(Spread::of([0.5]).unwrap().standard_error, None);
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([f64::NAN]), None);
    }

    #[test]
    fn arms_that_answer_alike_differ_by_exactly_nothing() {
        let answers: Answers = (0..100).map(|at| at % 3 == 0).collect();
        let pairs = vec![(answers.clone(), answers); 5];
        let difference = paired_difference(&pairs, 1).unwrap();
        assert_eq!((difference.mean, difference.low, difference.high), (0.0, 0.0, 0.0));
        assert_eq!(difference.signs(), [0, 5, 0]);
        assert!(!difference.is_clear());
        assert_eq!(difference.to_string(), "0.0 [0.0, 0.0]");
    }

    #[test]
    fn one_seed_has_the_interval_of_the_normal_approximation() {
        for (won, lost, problems) in [(120, 60, 1024), (300, 310, 1024), (40, 20, 256)] {
            let difference = paired_difference(&[pair(won, lost, problems)], 2).unwrap();
            let n = problems as f64;
            let mean = (won as f64 - lost as f64) / n;
            let deviation = (((won + lost) as f64 / n - mean * mean) / n).sqrt();
            assert!((difference.mean - mean).abs() < 1e-12);
            for (found, expected) in [
                (difference.low, mean - 1.96 * deviation),
                (difference.high, mean + 1.96 * deviation),
            ] {
                // One problem is the resolution, and 10,000 resamples know a quantile to 2 % of the deviation.
                let slack = 1.0 / n + 0.06 * deviation;
                assert!((found - expected).abs() < slack, "{found} instead of {expected}");
            }
        }
    }

    #[test]
    fn seeds_that_differ_for_certain_have_the_interval_of_the_seeds_alone() {
        // Every problem won in one seed, none in the other: a resample is 0, ½ or 1, with chances ¼, ½ and ¼.
        let difference = paired_difference(&[pair(64, 0, 64), pair(0, 0, 64)], 3).unwrap();
        assert_eq!((difference.mean, difference.low, difference.high), (0.5, 0.0, 1.0));
        assert_eq!(difference.signs(), [1, 1, 0]);
    }

    #[test]
    fn the_resampled_sum_has_the_chances_of_drawing_one_by_one() {
        let sum = ResampledSum::new(1, 1, 4);
        // All four draws win: (1/4)^4. The sum is 0: 1/2^4 + 12·(1/4·1/4·1/2·1/2) + 6·(1/4)^4.
        let zero = 1.0 / 16.0 + 12.0 / 64.0 + 6.0 / 256.0;
        let chance = |sum_at: usize| sum.cumulative[sum_at] - sum.cumulative[sum_at - 1];
        assert!((chance(8) - 1.0 / 256.0).abs() < 1e-15);
        assert!((chance(4) - zero).abs() < 1e-15);
        assert!((sum.cumulative[8] - 1.0).abs() < 1e-12);
        assert_eq!((sum.draw(0.0), sum.draw(0.999_999)), (-1.0, 1.0));
    }

    #[test]
    fn the_same_answers_have_the_same_interval() {
        let pairs = vec![pair(30, 10, 128), pair(20, 25, 128)];
        assert_eq!(
            paired_difference(&pairs, 4).unwrap(),
            paired_difference(&pairs, 4).unwrap()
        );
    }

    #[test]
    fn swapped_arms_have_the_mirrored_interval() {
        let pairs = vec![pair(30, 10, 256), pair(20, 25, 256), pair(50, 12, 256)];
        let swapped: Vec<_> = pairs.iter().cloned().map(|(a, b)| (b, a)).collect();
        let [one, other] = [&pairs, &swapped].map(|pairs| paired_difference(pairs, 5).unwrap());
        assert_eq!(one.mean, -other.mean);
        assert!((one.low + other.high).abs() < 0.01 && (one.high + other.low).abs() < 0.01);
    }

    /// How often the interval of so many seeds holds the true difference of 0.05, the seeds' own differences spread
    /// normally by `between`, the problems' answers drawn by chance.
    fn coverage(seeds: usize, between: f64) -> f64 {
        let mut random = ChaCha8Rng::seed_from_u64(6);
        let (trials, problems) = (300, 128);
        let mut held = 0;
        for trial in 0..trials {
            let pairs: Vec<_> = (0..seeds)
                .map(|_| {
                    // Twelve uniform numbers less six: normal enough.
                    let normal = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
                    let difference = 0.05 + between * normal;
                    let [first, second] = [0.5 + difference / 2.0, 0.5 - difference / 2.0];
                    let mut answers = |share: f64| (0..problems).map(|_| random.random::<f64>() < share).collect();
                    (answers(first), answers(second))
                })
                .collect();
            let found = paired_difference(&pairs, trial).unwrap();
            held += usize::from(found.low <= 0.05 && 0.05 <= found.high);
        }
        held as f64 / trials as f64
    }

    #[test]
    fn the_interval_holds_the_truth_as_often_as_the_module_says() {
        let agreeing = coverage(5, 0.0);
        assert!((0.96..=1.0).contains(&agreeing), "seeds that agree: {agreeing}");
        let differing = coverage(5, 0.3);
        assert!((0.76..=0.90).contains(&differing), "seeds that differ: {differing}");
        let few = coverage(3, 0.3);
        assert!((0.68..=0.82).contains(&few), "three seeds that differ: {few}");
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        for (pairs, expected) in [
            (vec![], "no seed has both arms"),
            (
                vec![(Answers(vec![true; 3]), Answers(vec![true; 4]))],
                "3 answers to be compared with 4",
            ),
            (
                vec![(Answers(vec![]), Answers(vec![]))],
                "0 answers to be compared with 0",
            ),
        ] {
            assert_eq!(paired_difference(&pairs, 0).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn points_have_a_sign_unless_they_are_none() {
        assert_eq!(
            [0.0123, -0.2, 0.0, -0.0001].map(points),
            ["+1.2", "-20.0", "0.0", "0.0"]
        );
    }
}
