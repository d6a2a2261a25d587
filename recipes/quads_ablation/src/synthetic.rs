//! Results that nobody measured, for the tests of what is made of results: **synthetic**, drawn from a random generator
//! with the shapes that real ones have. Nothing of it may enter the documentation.
use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use std::collections::BTreeMap;

use crate::results::*;

/// An arm: letter, pass@1 at the end, mean gap.
type Arm = (&'static str, f64, f64);

/// All arms; the naive one collapses in every second seed.
pub const ARMS: [Arm; 11] = [
    ("A", 0.83, 3e-7),
    ("B", 0.55, 0.19),
    ("C", 0.82, 0.029),
    ("D", 0.68, 0.11),
    ("E", 0.76, 0.055),
    ("E+", 0.81, 0.008),
    ("F", 0.66, 4e-7),
    ("F'", 0.70, 4e-7),
    ("G", 0.63, 0.17),
    ("H", 0.71, 0.09),
    ("I", 0.58, 0.15),
];

/// A series with so many seeds, steps and held-out problems.
pub fn series(name: &str, arms: &[Arm], [seeds, steps, problems]: [usize; 3]) -> Series {
    let mut random = ChaCha8Rng::seed_from_u64(name.len() as u64);
    Series {
        name: name.into(),
        about: "Synthetic: drawn, not measured.".into(),
        settings: BTreeMap::from([("grpo.steps".into(), steps.to_string())]),
        choice: None,
        seeds: (1..=seeds)
            .map(|seed| Seed {
                seed: seed as u64,
                warmup_steps: 300 + 10 * seed,
                gaps: arms.iter().map(|arm| gap(arm, &mut random)).collect(),
                arms: arms
                    .iter()
                    .map(|arm| run(arm, seed, steps, problems, &mut random))
                    .collect(),
            })
            .collect(),
    }
}

fn gap(&(arm, _, size): &Arm, random: &mut ChaCha8Rng) -> Gap {
    let mean = size * random.random_range(0.95..1.05);
    let qat = ["D", "E", "E+", "F", "F'"].contains(&arm);
    Gap {
        arm: arm.into(),
        tokens: 2048,
        mean,
        p99: 6.0 * mean,
        max: 20.0 * mean,
        weight: (arm != "C").then_some(if qat { 0.0 } else { 0.4 * mean }),
        activation: (arm != "C").then_some(0.9 * mean),
        numerics: (arm != "C").then_some(1e-7),
        residue: (arm != "C").then_some(3e-7),
    }
}

fn run(&(arm, share, gap): &Arm, seed: usize, steps: usize, problems: usize, random: &mut ChaCha8Rng) -> ArmRun {
    let collapses = arm == "B" && seed.is_multiple_of(2);
    let end = if collapses {
        0.1
    } else {
        share + 0.02 * seed as f64 - 0.06
    };
    // The same random numbers for all arms of a seed, as in a real evaluation.
    let answers = |share: f64, what: u64| -> Answers {
        let mut random = ChaCha8Rng::seed_from_u64(1000 * seed as u64 + what);
        (0..problems).map(|_| random.random::<f64>() < share).collect()
    };
    let evaluation = |own: f64, what| Evaluation {
        own: answers(own, what),
        trainer: answers(own + 0.01, what),
        high: answers(own + 0.015, what),
        w4a4: answers(own - 0.05, what),
    };
    let start = 0.36;
    let mut curve = Curve::default();
    let mut push = |name: &str, value: Option<f64>| curve.columns.entry(name.into()).or_default().push(value);
    for step in 0..=steps {
        let part = step as f64 / steps as f64;
        let noise = |random: &mut ChaCha8Rng| random.random_range(-0.02..0.02);
        let rising = start + (share - start) * (1.0 - (-4.0 * part).exp());
        let now = if collapses && part > 0.5 {
            rising * (2.2 - 2.0 * part) * 0.6
        } else {
            rising
        };
        let measured = step > 0;
        curve.step.push(step);
        push("eval/pass@1", (step % 10 == 0).then(|| now + noise(random)));
        push("reward/mean", measured.then(|| now + noise(random)));
        let tail = 1.0 + 2.0 * part * f64::from(u8::from(arm == "B"));
        push(
            "sampling/sampling_logp_difference/mean",
            measured.then(|| gap * tail * random.random_range(0.9..1.1)),
        );
        push(
            "sampling/sampling_logp_difference/max",
            measured.then(|| 20.0 * gap * tail * random.random_range(0.5..1.5)),
        );
        push(
            "sampling/sampling_logp_difference/p99",
            measured.then_some(6.0 * gap * tail),
        );
        push(
            "actor/entropy",
            measured.then(|| 0.9 * (1.0 - 0.7 * part) + noise(random)),
        );
        push(
            "actor/grad_norm",
            measured.then(|| 0.5 + 2.0 * gap + random.random_range(0.0..0.4)),
        );
        push("perf/rollout_tokens_per_s", measured.then_some(1e4));
    }
    ArmRun {
        arm: arm.into(),
        start: evaluation(start, 7),
        end: evaluation(end, 8),
        steps,
        stopped: None,
        skipped_updates: 0,
        collapse: collapses.then(|| Collapse {
            step: steps / 2 + 10,
            rule: "accuracy".into(),
        }),
        curve,
        layers: vec![LayerError {
            layer: "layers.0.mlp".into(),
            w4a4: 0.095,
            own: 0.065,
            channel_ratio: 3.1,
            captured: 0.68,
        }],
        wall_s: 61.25,
        host: None,
    }
}

/// A learning rate that arm A chose.
pub fn choice() -> Chosen {
    let tried = |value: &str, pass_at_1| Tried {
        value: value.into(),
        pass_at_1,
    };
    Chosen {
        rule: "the highest mean over the seeds".into(),
        key: "trainer.learning_rate".into(),
        arm: "A".into(),
        seeds: vec![101, 102],
        tried: vec![tried("1e-4", vec![0.81, 0.79]), tried("3e-4", vec![0.625, 0.5])],
        chosen: "1e-4".into(),
    }
}

/// Two series of all arms, a learning-rate sweep and a scaling.
pub fn results() -> Results {
    let pick = |letters: &[&str]| -> Vec<Arm> { ARMS.into_iter().filter(|arm| letters.contains(&arm.0)).collect() };
    let mut all = vec![
        series("calm", &ARMS, [5, 150, 256]),
        series("stress", &ARMS, [5, 250, 256]),
    ];
    let mut member = |name: &str, setting: &str, value: f64, arms: &[Arm]| {
        let mut series = series(&format!("{name}-{value}"), arms, [3, 20, 128]);
        series.settings.insert(setting.into(), value.to_string());
        all.push(series);
    };
    for rate in [1e-4, 3e-4, 1e-3] {
        member("rate", "trainer.learning_rate", rate, &pick(&["A", "B", "E"]));
    }
    for size in [64.0, 128.0, 256.0] {
        member("size", "model.hidden_size", size, &pick(&["A", "B", "E", "E+"]));
    }
    Results {
        command: "cargo run --release -p quads_ablation".into(),
        quick: false,
        machine: Machine {
            processor: Some("a synthetic processor".into()),
            processors: 2,
            device: "cpu".into(),
            total_s: 5_432.1,
        },
        series: all,
    }
}
