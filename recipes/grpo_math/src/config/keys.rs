//! The learner's names of its settings, as the names that users give them.
use burn_quads::grpo::GrpoError;

use super::{ConfigError, Layers};

/// A name of the learner, and the setting that becomes it.
const KEYS: [(&str, &str); 16] = [
    ("group_size", "grpo.group_size"),
    ("minibatches", "grpo.minibatches"),
    ("micro_batch_rows", "trainer.micro_batch"),
    ("max_completion_length", "rollout.max_new_tokens"),
    ("temperature", "rollout.temperature"),
    ("old_log_probs", "grpo.old_log_probs"),
    ("loss.epsilon_low", "grpo.clip_low"),
    ("loss.epsilon_high", "grpo.clip_high"),
    ("loss.delta", "grpo.clip_two_sided"),
    ("loss.beta", "grpo.kl_coefficient"),
    ("optimizer.schedule.learning_rate", "trainer.learning_rate"),
    ("optimizer.schedule.total_steps", "trainer.lr_warmup_steps"),
    ("optimizer.beta_1", "trainer.beta_1"),
    ("optimizer.beta_2", "trainer.beta_2"),
    ("optimizer.epsilon", "trainer.epsilon"),
    ("optimizer.weight_decay", "trainer.weight_decay"),
];

/// The learner's complaint, as one about a setting.
pub(super) fn refuse(layers: &Layers, error: &GrpoError) -> ConfigError {
    if let GrpoError::Option { option, expected, .. } = error
        && let Some((_, key)) = KEYS.iter().find(|(name, _)| name == option)
    {
        // 0 stands for "none" in the settings.
        let expected = expected
            .replace("none: ", "0: ")
            .replace("epsilon_high", "grpo.clip_high");
        return layers.refuse(key, expected);
    }
    layers.refuse("grpo.loss", format!("settings that agree: {error}"))
}

/// Training that diverged. Going on from the last checkpoint would end the same.
#[derive(Debug, thiserror::Error)]
#[error(
    "training diverged at step {step}: {consecutive} updates in a row had a {quantity} that is not finite; start a new run \
     with a lower {learning_rate}"
)]
pub struct Diverged {
    step: usize,
    consecutive: usize,
    quantity: &'static str,
    learning_rate: &'static str,
}

/// An error of a learner's step; a divergence names the setting of its learning rate.
pub fn step_error(error: GrpoError, learning_rate: &'static str) -> anyhow::Error {
    match error {
        GrpoError::Diverged {
            consecutive,
            quantity,
            step,
        } => Diverged {
            step: step + 1,
            consecutive,
            quantity,
            learning_rate,
        }
        .into(),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn every_name_stands_for_a_setting() {
        let layers = Layers::defaults();
        for (_, key) in KEYS {
            assert!(layers.values().any(|(known, _)| known == key), "{key}");
        }
    }

    #[test]
    fn refusals_name_the_users_settings() {
        for (assignments, expected) in [
            (
                &["grpo.clip_low=1"][..],
                "grpo.clip_low = 1.0 (from --set): expected a number in [0, 1)",
            ),
            (
                &["grpo.clip_two_sided=1.1"],
                "grpo.clip_two_sided = 1.1 (from --set): expected 0, or above 1.28 (1 + the upper clip, grpo.clip_high)",
            ),
            (
                &["grpo.clip_two_sided=1.3", "grpo.clip_high=0.3"],
                "grpo.clip_two_sided = 1.3 (from --set): expected 0, or above 1.3 (1 + the upper clip, grpo.clip_high)",
            ),
            (
                &["grpo.clip_two_sided=3", "grpo.loss=cispo"],
                "grpo.clip_two_sided = 3.0 (from --set): expected 0: cispo has no second clip",
            ),
            (
                &["grpo.old_log_probs=rollout", "grpo.correction=tis"],
                "grpo.old_log_probs = \"rollout\" (from --set): expected trainer with a correction",
            ),
            (
                &["grpo.clip_high=1e39"],
                "grpo.clip_high = 1e39 (from --set): expected a number, 0 or more, that f32 can hold",
            ),
            (
                &["grpo.kl_coefficient=1e39"],
                "grpo.kl_coefficient = 1e39 (from --set): expected a number, 0 or more, that f32 can hold",
            ),
            (
                &["rollout.temperature=1e39"],
                "rollout.temperature = 1e39 (from --set): expected a number, above 0, that f32 can hold",
            ),
            (
                &["rollout.temperature=1e-60"],
                "rollout.temperature = 1e-60 (from --set): expected a number, above 0, that f32 can hold",
            ),
            (
                &["trainer.learning_rate=1e300"],
                "trainer.learning_rate = 1e300 (from --set): expected a number, above 0, that f32 can hold",
            ),
            (
                &["warmup.learning_rate=1e39"],
                "warmup.learning_rate = 1e39 (from --set): expected a number, above 0, that f32 can hold",
            ),
            (
                &["trainer.beta_2=0.9999999999"],
                "trainer.beta_2 = 0.9999999999 (from --set): expected a number, 0 or more, less than 1, that f32 can hold",
            ),
            (
                &["trainer.lr_schedule=cosine", "trainer.lr_warmup_steps=150"],
                "trainer.lr_warmup_steps = 150 (from --set): expected fewer than grpo.steps = 150",
            ),
        ] {
            let assignments: Vec<String> = assignments.iter().map(|a| a.to_string()).collect();
            let error = Config::load(None, &assignments).expect_err(expected).to_string();
            assert!(error.starts_with(expected), "{error}\ninstead of {expected}");
        }
    }

    #[test]
    fn all_that_the_learner_may_refuse_is_told_in_the_users_words() {
        use burn_quads::grpo::GrpoConfig;
        let changes: [fn(&mut GrpoConfig); 12] = [
            |c| c.group_size = 1,
            |c| c.minibatches = 0,
            |c| c.micro_batch_rows = Some(0),
            |c| c.max_completion_length = 0,
            |c| c.temperature = f32::INFINITY,
            |c| c.loss.epsilon_low = Some(-0.2),
            |c| c.loss.epsilon_high = Some(f32::NAN),
            |c| c.loss.delta = Some(0.5),
            |c| c.loss.beta = f32::INFINITY,
            |c| c.optimizer.schedule.learning_rate = f64::NAN,
            |c| c.optimizer.beta_1 = 1.0,
            |c| c.optimizer.epsilon = 0.0,
        ];
        for change in changes {
            let mut config = GrpoConfig::default();
            change(&mut config);
            let error = config.validate().unwrap_err();
            let told = refuse(&Layers::defaults(), &error).to_string();
            for name in [
                "epsilon_",
                "delta",
                "loss.",
                "optimizer.",
                "micro_batch_rows",
                "settings that agree",
            ] {
                assert!(!told.contains(name), "{error} became {told}");
            }
        }
    }

    #[test]
    fn a_divergence_names_the_learning_rate_of_its_stage() {
        let error = GrpoError::Diverged {
            consecutive: 11,
            quantity: "loss",
            step: 4,
        };
        assert_eq!(
            step_error(error, "warmup.learning_rate").to_string(),
            "training diverged at step 5: 11 updates in a row had a loss that is not finite; start a new run with a lower \
             warmup.learning_rate"
        );
    }
}
