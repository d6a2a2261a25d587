//! `results.json`: all that the tables, plots and pages are made of.
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// All series that were run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// How to run it again.
    pub command: String,
    /// Whether it is the short run (`--quick`), which shows that the recipe works and little else.
    pub quick: bool,
    /// What it ran on.
    pub machine: Machine,
    /// In the order in which they are declared.
    pub series: Vec<Series>,
}

/// What depends on the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Name of the processor, where the system tells.
    pub processor: Option<String>,
    /// Processors that the run could use.
    pub processors: usize,
    /// `cpu`, `cuda:0` or `vulkan`.
    pub device: String,
    /// Sum of the arms' and warm-ups' wall times, in seconds.
    pub total_s: f64,
}

/// Arms under the same declared settings, for some seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Its name: `calm`, `stress`, …
    pub name: String,
    /// What it is for, in a sentence.
    pub about: String,
    /// Settings of `grpo_math` that differ from its defaults, the same for every arm.
    pub settings: BTreeMap<String, String>,
    /// By seed.
    pub seeds: Vec<Seed>,
}

/// The arms that started from one warm-up checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seed {
    /// `run.seed`
    pub seed: u64,
    /// Steps of the warm-up.
    pub warmup_steps: usize,
    /// Gaps of all arms' precisions at the warm-up checkpoint, on the same tokens.
    pub gaps: Vec<Gap>,
    /// In the order of the table of arms.
    pub arms: Vec<ArmRun>,
}

/// |Δ log-prob| between an arm's trainer and its rollout, over the same completions for all arms, in nats.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gap {
    /// Letter of the arm.
    pub arm: String,
    /// Tokens measured.
    pub tokens: usize,
    /// Mean |δ|.
    pub mean: f64,
    /// 99th percentile of |δ|.
    pub p99: f64,
    /// Largest |δ|.
    pub max: f64,
    /// Mean |δ_weight|; absent where no precision has the rollout's weights with the trainer's activations.
    pub weight: Option<f64>,
    /// Mean |δ_act|.
    pub activation: Option<f64>,
    /// Mean |δ_num|.
    pub numerics: Option<f64>,
    /// Largest |δ_weight + δ_act + δ_num − δ| of a token.
    pub residue: Option<f64>,
}

/// One arm from one warm-up checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmRun {
    /// Letter of the arm.
    pub arm: String,
    /// The policy at the start.
    pub start: Evaluation,
    /// The policy after the last step that was taken.
    pub end: Evaluation,
    /// Steps taken; fewer than asked for where the arm could not go on.
    pub steps: usize,
    /// Why it could not go on.
    pub stopped: Option<String>,
    /// Updates left out for gradients that were not finite.
    pub skipped_updates: usize,
    /// Whether, when and by which rule it collapsed.
    pub collapse: Option<Collapse>,
    /// What was measured on the way.
    pub curve: Curve,
    /// Errors of activations by layer, at the end.
    pub layers: Vec<LayerError>,
    /// Wall time, in seconds.
    pub wall_s: f64,
}

/// Held-out problems answered by a policy in several precisions, one sample a problem, the same random numbers for all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// In the precision of the arm's rollout.
    pub own: Answers,
    /// In the precision of the arm's trainer.
    pub trainer: Answers,
    /// In high precision.
    pub high: Answers,
    /// In W4A4, without compensation.
    pub w4a4: Answers,
}

/// Which problems were answered right, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answers(pub Vec<bool>);

/// Why an arm counts as collapsed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Collapse {
    /// GRPO step at which the rule was first met.
    pub step: usize,
    /// Name of the rule.
    pub rule: String,
}

/// Numbers by step, under the names of `metrics.jsonl`; `None` where a number was not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// GRPO steps.
    pub step: Vec<usize>,
    /// One list a name, as long as `step`.
    pub columns: BTreeMap<String, Vec<Option<f64>>>,
}

/// How well a layer's activations survive their rounding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerError {
    /// Path of the layer, or of the group of layers with the same input.
    pub layer: String,
    /// Relative error (root of the summed squares) of W4A4 activations without compensation.
    pub w4a4: f64,
    /// The same under the arm's rollout precision.
    pub own: f64,
    /// Largest over median root-mean-square of a channel.
    pub channel_ratio: f64,
    /// Share of the squared residual that the calibrated half of the channels captures.
    pub captured: f64,
}
