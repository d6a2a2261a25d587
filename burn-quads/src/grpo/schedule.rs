//! Learning-rate schedules: a pure function of the step, so that a resumed run needs no state.
use serde::{Deserialize, Serialize};

use super::GrpoError;

/// Shape of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrShape {
    /// Stays.
    #[default]
    Constant,
    /// Falls in a straight line to 0 at `total_steps`.
    Linear,
    /// Falls along half a cosine to 0 at `total_steps`.
    Cosine,
}

/// A learning rate as a function of the learner's step (one step a batch, however many updates it makes).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LrSchedule {
    /// The greatest learning rate.
    pub learning_rate: f64,
    /// Steps over which it rises in a straight line; the first step has `1 / warmup_steps` of it.
    pub warmup_steps: usize,
    /// Shape afterwards.
    pub shape: LrShape,
    /// Steps of the run; only the falling shapes need it.
    pub total_steps: usize,
}

impl Default for LrSchedule {
    fn default() -> Self {
        Self::constant(1e-6)
    }
}

impl LrSchedule {
    /// One learning rate for ever.
    pub fn constant(learning_rate: f64) -> Self {
        Self {
            learning_rate,
            warmup_steps: 0,
            shape: LrShape::Constant,
            total_steps: 0,
        }
    }

    /// Refuses settings that cannot work.
    pub fn validate(&self) -> Result<(), GrpoError> {
        if !(self.learning_rate >= 0.0 && self.learning_rate.is_finite()) {
            return Err(GrpoError::option(
                "optimizer.schedule.learning_rate",
                "a finite number of at least 0",
                self.learning_rate,
            ));
        }
        if self.shape != LrShape::Constant && self.total_steps <= self.warmup_steps {
            return Err(GrpoError::option(
                "optimizer.schedule.total_steps",
                format!("more than warmup_steps ({}) for a rate that falls", self.warmup_steps),
                self.total_steps,
            ));
        }
        Ok(())
    }

    /// The learning rate of a step, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup_steps {
            return self.learning_rate * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let falling = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = ((step - self.warmup_steps) as f64 / falling).min(1.0);
        let factor = match self.shape {
            LrShape::Constant => 1.0,
            LrShape::Linear => 1.0 - progress,
            LrShape::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.learning_rate * factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(shape: LrShape) -> Vec<f64> {
        let schedule = LrSchedule {
            learning_rate: 1.0,
            warmup_steps: 2,
            shape,
            total_steps: 6,
        };
        (0..8).map(|step| schedule.at(step)).collect()
    }

    #[test]
    fn the_rate_rises_then_follows_its_shape() {
        assert_eq!(rates(LrShape::Constant), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(LrShape::Linear), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        let cosine = rates(LrShape::Cosine);
        let half = 0.5f64.sqrt() / 2.0;
        for (got, expected) in cosine
            .iter()
            .zip([0.5, 1.0, 1.0, 0.5 + half, 0.5, 0.5 - half, 0.0, 0.0])
        {
            assert!((got - expected).abs() < 1e-12);
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        let error = |schedule: LrSchedule| schedule.validate().unwrap_err().to_string();
        assert!(error(LrSchedule::constant(-1.0)).starts_with("optimizer.schedule.learning_rate: expected"));
        assert!(error(LrSchedule::constant(f64::NAN)).starts_with("optimizer.schedule.learning_rate: expected"));
        let falling = LrSchedule {
            shape: LrShape::Cosine,
            warmup_steps: 3,
            total_steps: 3,
            ..LrSchedule::default()
        };
        assert!(error(falling).starts_with("optimizer.schedule.total_steps: expected more than warmup_steps (3)"));
        assert_eq!(LrSchedule::default().validate(), Ok(()));
    }
}
