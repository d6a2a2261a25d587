//! What the metrics of a loss are made of: sums and counts, so that the parts of a batch add up.
use super::loss::Clipped;

/// Sums and counts over completions.
#[derive(Clone, Debug, PartialEq)]
pub struct LossStats {
    /// Tokens that counted.
    tokens: usize,
    /// What the clip fractions count: tokens, or completions when the ratio is a completion's (gspo).
    units: usize,
    low: usize,
    high: usize,
    delta: usize,
    cap: usize,
    /// Least fraction of clipped tokens of a completion, and the greatest.
    low_min: f64,
    high_max: f64,
    /// Sum over tokens of log-prob before minus after.
    log_ratio_drop: f64,
    kl: f64,
    kl_loss: f64,
    off_policy_rows: usize,
}

impl Default for LossStats {
    fn default() -> Self {
        Self {
            tokens: 0,
            units: 0,
            low: 0,
            high: 0,
            delta: 0,
            cap: 0,
            low_min: f64::INFINITY,
            high_max: f64::NEG_INFINITY,
            log_ratio_drop: 0.0,
            kl: 0.0,
            kl_loss: 0.0,
            off_policy_rows: 0,
        }
    }
}

/// Counts of one completion.
pub(crate) struct RowStats {
    /// The clips of the completion's own ratio, when the loss has one.
    sequence: Option<Clipped>,
    tokens: usize,
    low: usize,
    high: usize,
    delta: usize,
    cap: usize,
    log_ratio_drop: f64,
}

impl RowStats {
    /// Adds a token: `drop` is its log-prob before minus after.
    pub(crate) fn token(&mut self, drop: f64, clipped: Clipped) {
        self.tokens += 1;
        self.log_ratio_drop += drop;
        self.low += clipped.low as usize;
        self.high += clipped.high as usize;
        self.delta += clipped.delta as usize;
        self.cap += clipped.cap as usize;
    }
}

impl LossStats {
    /// Starts a completion.
    pub(crate) fn row(&self, sequence: Option<Clipped>) -> RowStats {
        RowStats {
            sequence,
            tokens: 0,
            low: 0,
            high: 0,
            delta: 0,
            cap: 0,
            log_ratio_drop: 0.0,
        }
    }

    /// Adds a finished completion.
    pub(crate) fn finish_row(&mut self, mut row: RowStats, off_policy: bool) {
        self.tokens += row.tokens;
        self.log_ratio_drop += row.log_ratio_drop;
        self.off_policy_rows += off_policy as usize;
        let units = match row.sequence {
            Some(clipped) => {
                row.low = clipped.low as usize;
                row.high = clipped.high as usize;
                row.delta = clipped.delta as usize;
                1
            }
            None => row.tokens,
        };
        self.units += units;
        self.low += row.low;
        self.high += row.high;
        self.delta += row.delta;
        self.cap += row.cap;
        if units > 0 {
            self.low_min = self.low_min.min(row.low as f64 / units as f64);
            self.high_max = self.high_max.max(row.high as f64 / units as f64);
        }
    }

    /// Adds the KL of a token and its share of the KL term.
    pub(crate) fn add_kl(&mut self, kl: f64, kl_loss: f64) {
        self.kl += kl;
        self.kl_loss += kl_loss;
    }

    /// Adds completions that were not computed because they carry no gradient: none of their tokens is clipped.
    pub(crate) fn add_without_gradient(&mut self, units: usize) {
        self.units += units;
        if units > 0 {
            self.low_min = self.low_min.min(0.0);
            self.high_max = self.high_max.max(0.0);
        }
    }

    /// Adds the completions of another part.
    pub fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.units += other.units;
        self.low += other.low;
        self.high += other.high;
        self.delta += other.delta;
        self.cap += other.cap;
        self.low_min = self.low_min.min(other.low_min);
        self.high_max = self.high_max.max(other.high_max);
        self.log_ratio_drop += other.log_ratio_drop;
        self.kl += other.kl;
        self.kl_loss += other.kl_loss;
        self.off_policy_rows += other.off_policy_rows;
    }

    /// Fraction clipped at 1 − ε_low (TRL `clip_ratio/low_mean`).
    pub fn clip_low_mean(&self) -> f64 {
        self.fraction(self.low)
    }

    /// The least of that fraction over completions (TRL `clip_ratio/low_min`).
    pub fn clip_low_min(&self) -> f64 {
        if self.low_min.is_finite() { self.low_min } else { 0.0 }
    }

    /// Fraction clipped at 1 + ε_high (TRL `clip_ratio/high_mean`).
    pub fn clip_high_mean(&self) -> f64 {
        self.fraction(self.high)
    }

    /// The greatest of that fraction over completions (TRL `clip_ratio/high_max`).
    pub fn clip_high_max(&self) -> f64 {
        if self.high_max.is_finite() { self.high_max } else { 0.0 }
    }

    /// Fraction clipped on either side (TRL `clip_ratio/region_mean`, verl `actor/pg_clipfrac`).
    pub fn clip_region_mean(&self) -> f64 {
        self.fraction(self.low + self.high)
    }

    /// Fraction clipped at δ (verl `actor/pg_clipfrac_lower`).
    pub fn clip_delta_mean(&self) -> f64 {
        self.fraction(self.delta)
    }

    /// cispo: fraction with A > 0 above the cap (TRL `cispo_clip_ratio`).
    pub fn cispo_clip_ratio(&self) -> f64 {
        self.fraction(self.cap)
    }

    /// Mean over tokens of the log-prob before minus after (verl `actor/ppo_kl`).
    pub fn ppo_kl(&self) -> f64 {
        self.log_ratio_drop / self.tokens.max(1) as f64
    }

    /// Mean over tokens of the KL estimate (TRL `kl`).
    pub fn kl(&self) -> f64 {
        self.kl / self.tokens.max(1) as f64
    }

    /// The KL term before β, aggregated like the loss (verl `actor/kl_loss`).
    pub fn kl_loss(&self) -> f64 {
        self.kl_loss
    }

    /// Completions that the off-policy mask dropped.
    pub fn off_policy_rows(&self) -> usize {
        self.off_policy_rows
    }

    fn fraction(&self, count: usize) -> f64 {
        count as f64 / self.units.max(1) as f64
    }
}
