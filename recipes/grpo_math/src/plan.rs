//! What a run will do, in words: printed before it starts, and kept in its report.
use burn_nvfp4::Precision;
use kernels_cubecl::{Granularity, Selection};

use crate::{config::Config, problems::Problems, session::model_config};

/// The plan: a name and a sentence a row.
pub fn rows(config: &Config, problems: &Problems, parameters: usize) -> Vec<(String, String)> {
    let model = &model_config(config, problems);
    let learner = &config.learner;
    let example = &problems.held_out[0];
    let row = |name: &str, text: String| (name.to_string(), text);
    vec![
        row(
            "task",
            format!(
                "{}, for instance {}{}; {} training problems, {} held out",
                problems.names(),
                one_line(&problems.language.example(example)),
                if config.data.is_none() {
                    config.task.notation()
                } else {
                    ""
                },
                thousands(problems.training.len()),
                thousands(problems.held_out.len())
            ),
        ),
        row(
            "model",
            format!(
                "mixture of experts, {} parameters: {} {}, hidden {}, {} experts of which a token uses {}",
                thousands(parameters),
                model.num_hidden_layers,
                if model.num_hidden_layers == 1 {
                    "layer"
                } else {
                    "layers"
                },
                model.hidden_size,
                model.num_experts,
                model.num_experts_per_tok
            ),
        ),
        row("warm-up", warm_up(config)),
        row(
            "GRPO",
            format!(
                "{} steps of {} prompts × {} completions, {} updates a step",
                thousands(learner.steps),
                learner.prompts_per_step,
                learner.grpo.group_size,
                learner.grpo.minibatches
            ),
        ),
        row("rollout", describe(&config.rollout.precision)),
        row("trainer", describe(&learner.precision)),
        row("seed", config.run.seed.to_string()),
    ]
}

fn warm_up(config: &Config) -> String {
    if let Some(data) = &config.data {
        return format!("none: the model of {}", data.model.display());
    }
    if let Some(from) = &config.warmup.from {
        return format!("that of {}", from.display());
    }
    format!(
        "supervised, in f32, until {:.0} % of {} validation problems are right (at most {} steps)",
        100.0 * config.warmup.target_accuracy,
        thousands(config.warmup.validation_problems),
        thousands(config.warmup.max_steps)
    )
}

/// Marks that turn the direction of what follows, to the end of the line and beyond.
const TEXT_DIRECTION: [char; 12] = [
    '\u{200e}', '\u{200f}', '\u{61c}', '\u{202a}', '\u{202b}', '\u{202c}', '\u{202d}', '\u{202e}', '\u{2066}',
    '\u{2067}', '\u{2068}', '\u{2069}',
];

/// The beginning of a text, in one line. What would command a terminal is written out.
fn one_line(text: &str) -> String {
    const MOST: usize = 100;
    let words: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut text = String::with_capacity(words.len());
    for c in words.chars() {
        match c.is_control() || TEXT_DIRECTION.contains(&c) {
            true => text.extend(c.escape_unicode()),
            false => text.push(c),
        }
    }
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Parameters of a run's model.
pub fn parameters(config: &Config, problems: &Problems) -> usize {
    let parameters = model_config(config, problems).num_params();
    parameters.map_or(usize::MAX, |parameters| parameters as usize)
}

/// A precision with what it means.
pub fn describe(precision: &Precision) -> String {
    match precision {
        Precision::High => "high: f32".into(),
        Precision::W4A16 => "w4a16: NVFP4 weights, activations in f32".into(),
        Precision::W4A4 => "w4a4: NVFP4 weights and activations".into(),
        Precision::Fp8 => "fp8: E4M3 weights and activations".into(),
        Precision::W4A4Rac(rac) => {
            let unit = match rac.granularity {
                Granularity::Channel => "channels",
                Granularity::Block16 => "blocks of 16 channels",
                Granularity::Block64 => "blocks of 64 channels",
            };
            let share = 100.0 * rac.fraction;
            let what = match rac.selection {
                Selection::All => "all of it".to_string(),
                Selection::PerToken => format!("the worst {share:.0} % of each token's {unit}"),
                Selection::Calibrated => format!("a fixed {share:.0} % of the {unit}"),
            };
            format!("w4a4_rac: NVFP4 weights and activations, the activations' residual compensated ({what})")
        }
    }
}

/// Minutes that the default run takes on two cores.
const DEFAULT_MINUTES: f64 = 2.0;

/// A rough word on how long a run takes: the default's time, scaled by tokens and parameters.
pub fn expected_time(config: &Config, problems: &Problems, parameters: usize) -> String {
    let tokens = problems.expected_tokens(config.rollout.max_new_tokens);
    // Most of the time goes into GRPO's forward and backward passes.
    let work =
        |steps: usize, rows: usize, tokens: usize, parameters: usize| (steps * rows * tokens * parameters) as f64;
    let share = work(config.learner.steps, config.learner.rows(), tokens, parameters) / work(150, 256, 14, 152_000);
    let minutes = DEFAULT_MINUTES * share;
    match minutes {
        short if short < 1.0 => "less than a minute of GRPO on two cores, and the warm-up".into(),
        long if long > 90.0 => format!("about {:.0} hours on two cores", long / 60.0),
        _ => format!("about {} minutes on two cores", minutes.round()),
    }
}

/// A count with its thousands apart.
pub fn thousands(count: usize) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_cannot_command_the_terminal() {
        assert_eq!(one_line("a\n\tb  c"), "a b c");
        let text = one_line("\u{1b}]0;title\u{7}\u{9b}2J\u{202e}x");
        assert_eq!(text, "\\u{1b}]0;title\\u{7}\\u{9b}2J\\u{202e}x");
        assert_eq!(one_line(&"é".repeat(200)), format!("{}…", "é".repeat(100)));
    }

    #[test]
    fn thousands_are_apart() {
        assert_eq!(
            [0, 999, 1_000, 1_234_567].map(thousands),
            ["0", "999", "1,000", "1,234,567"]
        );
    }
}
