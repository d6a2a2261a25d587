//! Which charts a run has, and what is in them.
use crate::{
    metrics::{HELD_OUT, HELD_OUT_GREEDY, MetricsLine, Position, VALIDATION},
    plots::{Chart, Series},
};

/// The charts that these metrics can fill.
pub fn charts(lines: &[MetricsLine]) -> Vec<Chart> {
    let series = |name, field: &str, scale: f64, marked| {
        let points = lines
            .iter()
            .filter_map(|line| Some((line.grpo_step()? as f64, scale * line.get(field)?)));
        Series::new(name, points, marked)
    };
    let line = |name, field: &str| series(name, field, 1.0, false);
    let percent = |name, field: &str, marked| series(name, field, 100.0, marked);
    let step = "GRPO step";
    let mut charts = vec![
        Chart {
            file: "accuracy",
            title: "Held-out accuracy",
            y_label: "right answers, %",
            x_label: step,
            series: vec![
                percent("sampled", HELD_OUT, true),
                percent("greedy", HELD_OUT_GREEDY, true),
            ],
            caption: "Problems that were never trained on, in the rollout's precision.",
        },
        Chart {
            file: "reward",
            title: "Reward",
            y_label: "right answers, %",
            x_label: step,
            series: vec![
                percent("completions", "reward/mean", false),
                percent("groups of one reward", "frac_reward_zero_std", false),
            ],
            caption: "Share of sampled completions that were right, and of groups that were all right or all wrong: these teach nothing.",
        },
        Chart {
            file: "gap",
            title: "Gap of rollout and trainer",
            y_label: "mean |Δ log-prob|, nats",
            x_label: step,
            series: vec![
                line("all of it", "sampling/sampling_logp_difference/mean"),
                series("weights", "mismatch/delta_weight/mean", 1.0, true),
                series("activations", "mismatch/delta_act/mean", 1.0, true),
                series("numerics", "mismatch/delta_num/mean", 1.0, true),
            ],
            caption: "How differently the two sides see the sampled tokens, and where the difference comes from.",
        },
        Chart {
            file: "gap_tail",
            title: "Tail of the gap",
            y_label: "|Δ log-prob|, nats",
            x_label: step,
            series: vec![
                line("largest", "sampling/sampling_logp_difference/max"),
                line("99th percentile", "sampling/sampling_logp_difference/p99"),
            ],
            caption: "The tokens on which the two sides agree least.",
        },
        Chart {
            file: "entropy",
            title: "Entropy",
            y_label: "nats a token",
            x_label: step,
            series: vec![line("entropy", "actor/entropy")],
            caption: "How undecided the policy is. At zero it has nothing left to explore.",
        },
        Chart {
            file: "grad_norm",
            title: "Gradient norm",
            y_label: "global L2 norm",
            x_label: step,
            series: vec![line("gradient norm", "actor/grad_norm")],
            caption: "Before clipping, mean over the minibatches of a step.",
        },
        Chart {
            file: "response_length",
            title: "Length of completions",
            y_label: "tokens",
            x_label: step,
            series: vec![line("mean length", "response_length/mean")],
            caption: "With the end of sequence.",
        },
        Chart {
            file: "clipping",
            title: "Clipped tokens",
            y_label: "tokens, %",
            x_label: step,
            series: vec![percent("ratio clipped", "actor/pg_clipfrac", false)],
            caption: "Tokens whose ratio of current to old policy left the trust region.",
        },
    ];
    charts.push(warmup_chart(lines));
    charts.push(Chart {
        file: "speed",
        title: "Speed",
        y_label: "tokens per second",
        x_label: step,
        series: vec![
            line("sampled", "perf/rollout_tokens_per_s"),
            line("trained on", "perf/train_tokens_per_s"),
        ],
        caption: "On this machine; the only chart that another run of the same seed does not repeat.",
    });
    charts.retain(|chart| chart.series.iter().any(|series| !series.points().is_empty()));
    charts
}

fn warmup_chart(lines: &[MetricsLine]) -> Chart {
    let points = lines.iter().filter_map(|line| match line.position {
        Position::Warmup(step) => Some((step as f64, 100.0 * line.get(VALIDATION)?)),
        Position::Grpo(_) => None,
    });
    Chart {
        file: "warmup",
        title: "Warm-up",
        y_label: "right answers, %",
        x_label: "warm-up step",
        series: vec![Series::new("validation problems", points, true)],
        caption: "Supervised learning, stopped on validation problems of its own.",
    }
}
