//! Losses, gradients, advantages and corrections against TRL (tests/fixtures/grpo, made by TRL's own code in f64).
use burn_quads::grpo::{
    Correction, CorrectionMode, LossBatch, LossConfig, LossKind, Normalizer, ScaleRewards, group_advantages,
};
use serde_json::Value;

const TOLERANCE: f64 = 1e-6;

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/grpo/golden.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Numbers of an array or an array of arrays, null as NaN.
fn flat(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(items) => items.iter().flat_map(flat).collect(),
        Value::Null => vec![f32::NAN],
        number => vec![number.as_f64().unwrap() as f32],
    }
}

fn assert_close(name: &str, got: impl IntoIterator<Item = f64>, expected: &Value) {
    let got = got.into_iter().collect::<Vec<_>>();
    let expected = flat(expected);
    assert_eq!(got.len(), expected.len(), "{name}");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected as f64).abs();
        assert!(
            error <= TOLERANCE * (1.0 + expected.abs() as f64),
            "{name}[{index}]: {got} {expected}"
        );
    }
}

fn widen(values: &[f32]) -> impl Iterator<Item = f64> + '_ {
    values.iter().map(|&value| value as f64)
}

struct Inputs {
    lengths: Vec<usize>,
    mask: Vec<bool>,
    log_probs: Vec<f32>,
    old: Vec<f32>,
    reference: Vec<f32>,
    rollout: Vec<f32>,
}

fn inputs(golden: &Value) -> Inputs {
    let of = |name: &str| flat(&golden["inputs"][name]);
    let rows = golden["inputs"]["mask"].as_array().unwrap();
    Inputs {
        lengths: rows.iter().map(|row| row.as_array().unwrap().len()).collect(),
        mask: of("mask").iter().map(|&value| value == 1.0).collect(),
        log_probs: of("logps"),
        old: of("old_logps"),
        reference: of("ref_logps"),
        rollout: of("sampling_logps"),
    }
}

fn scale(name: &str) -> ScaleRewards {
    serde_json::from_value(Value::from(name)).unwrap()
}

fn advantages(golden: &Value, name: &str) -> Vec<f32> {
    let rewards = flat(&golden["inputs"]["rewards"]);
    let size = golden["num_generations"].as_u64().unwrap() as usize;
    let group = (0..rewards.len()).map(|row| row / size).collect::<Vec<_>>();
    group_advantages(&rewards, &group, size, scale(name)).unwrap().values
}

fn correction(golden: &Value, mode: &str) -> Correction {
    let bound = |name: &str| golden["is_ratio"][mode][name].as_f64().map(|value| value as f32);
    Correction {
        // The names of TRL are aliases of ours.
        mode: serde_json::from_value::<CorrectionMode>(Value::from(mode)).unwrap(),
        clip_min: bound("clip_min"),
        clip_max: bound("clip_max"),
    }
}

/// The name of a loss and what is left of its settings.
fn loss(settings: &Value) -> LossConfig {
    let number = |name: &str| settings[name].as_f64().map(|value| value as f32);
    let kind = match (
        settings["level"].as_str().unwrap(),
        settings["loss_type"].as_str().unwrap(),
    ) {
        ("sequence", "grpo") => LossKind::Gspo,
        ("token", name) => serde_json::from_value(Value::from(name)).unwrap(),
        other => panic!("no such loss: {other:?}"),
    };
    assert_eq!(number("top_entropy_quantile"), Some(1.0));
    LossConfig {
        kind,
        epsilon_low: number("eps_low"),
        epsilon_high: number("eps_high"),
        delta: number("delta"),
        beta: number("beta").unwrap(),
        kl_times_ratio: settings["kl_times_ratio"].as_bool().unwrap(),
        off_policy_mask_threshold: number("off_policy_mask_threshold"),
    }
}

#[test]
fn advantages_of_every_scaling() {
    let golden = golden();
    for name in ["group", "batch", "none"] {
        let values = advantages(&golden, name);
        assert_close(name, widen(&values), &golden["advantages"][name]);
        assert_eq!(values[4..8], [0.0; 4], "{name}: group 1 has no variance");
        assert_eq!(values[14], 0.0, "{name}: row 14 has no reward");
    }
}

#[test]
fn correction_weights_of_every_mode() {
    let golden = golden();
    let inputs = inputs(&golden);
    for (mode, expected) in golden["is_ratio"].as_object().unwrap() {
        let weights = correction(&golden, mode).weights(&inputs.old, &inputs.rollout, &inputs.mask, &inputs.lengths);
        assert_eq!(weights.unscored_tokens, 1, "{mode}: one sampling log-prob is NaN");
        let rows = expected["ratio"].as_array().unwrap();
        let width = inputs.lengths[0];
        for (row, expected) in rows.iter().enumerate() {
            let expected = flat(expected);
            for t in 0..width {
                let (got, expected) = (weights.values[row * width + t], expected[t % expected.len()]);
                assert!(
                    (got - expected).abs() < 1e-6,
                    "{mode} row {row} token {t}: {got} {expected}"
                );
            }
        }
    }
}

#[test]
fn losses_gradients_and_metrics_of_every_case() {
    let golden = golden();
    let inputs = inputs(&golden);
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 22);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let settings = &case["settings"];
        let config = loss(settings);
        config.validate().unwrap();
        let advantages = advantages(&golden, settings["scale_rewards"].as_str().unwrap());
        let weights = settings["is_mode"].as_str().map(|mode| {
            correction(&golden, mode)
                .weights(&inputs.old, &inputs.rollout, &inputs.mask, &inputs.lengths)
                .values
        });
        let batch = LossBatch {
            lengths: &inputs.lengths,
            mask: &inputs.mask,
            advantages: &advantages,
            log_probs: &inputs.log_probs,
            old_log_probs: settings["use_old"].as_bool().unwrap().then_some(&inputs.old),
            reference_log_probs: Some(&inputs.reference),
            rollout_log_probs: weights.is_some().then_some(&inputs.rollout),
            weights: weights.as_deref(),
        };
        let max_completion_length = settings["max_completion_length"].as_u64().unwrap() as usize;
        let output = config.evaluate(&batch, &Normalizer::of(&batch, max_completion_length));

        assert_close(name, [output.loss], &case["loss"]);
        assert_close(name, widen(&output.gradient), &case["dloss_dlogps"]);
        assert_close(name, widen(&output.per_token_loss), &case["per_token_loss"]);
        if config.beta > 0.0 {
            assert_close(name, widen(&output.per_token_kl), &case["per_token_kl"]);
        }
        for (metric, expected) in case["metrics"].as_object().unwrap() {
            let stats = &output.stats;
            let got = match metric.as_str() {
                "kl" => stats.kl(),
                "clip_ratio/low_mean" => stats.clip_low_mean(),
                "clip_ratio/low_min" => stats.clip_low_min(),
                "clip_ratio/high_mean" => stats.clip_high_mean(),
                "clip_ratio/high_max" => stats.clip_high_max(),
                "clip_ratio/region_mean" => stats.clip_region_mean(),
                "cispo_clip_ratio" => stats.cispo_clip_ratio(),
                other => panic!("{name}: unknown metric {other}"),
            };
            assert_close(&format!("{name} {metric}"), [got], expected);
        }
    }
}
