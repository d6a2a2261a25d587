//! The command line.
use anyhow::{Result, anyhow, bail};
use burn_nvfp4::Precision;
use clap::{Parser, builder::RangedU64ValueParser};
use serde_json::Value;
use std::{collections::BTreeMap, path::PathBuf};

/// Text from a Qwen3-MoE or OLMoE folder of the Hugging Face Hub, in any precision, on the CPU.
///
/// The text goes to standard output as it is sampled, everything else to standard error.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
pub struct Cli {
    /// The model's folder: config.json, model.safetensors or shards, tokenizer.json.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Goes on with this text.
    #[arg(long, value_name = "TEXT", conflicts_with = "chat", required_unless_present = "chat")]
    pub prompt: Option<String>,
    /// Answers this message, by the model's chat template; without TEXT, one line of standard input after the other, as a
    /// conversation.
    #[arg(long, value_name = "TEXT", num_args = 0..=1)]
    pub chat: Option<Option<String>>,
    /// The system's message, at the start of a chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// A variable of the chat template, such as enable_thinking=false; may be given many times.
    #[arg(long = "template-arg", value_name = "NAME=JSON", requires = "chat", value_parser = template_arg)]
    pub template_args: Vec<(String, Value)>,
    /// What attention projections and experts compute in: high, w4a16, w4a4, w4a4_rac or fp8.
    #[arg(long, default_value = "w4a4_rac", value_parser = precision)]
    pub precision: Precision,
    /// Residual masks of a training run, for compensation of calibrated channels.
    #[arg(long, value_name = "FILE")]
    pub residual_masks: Option<PathBuf>,
    /// Most tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = RangedU64ValueParser::<usize>::new().range(1..=1_000_000))]
    pub max_new_tokens: usize,
    /// 0 takes the most probable token; logits are divided by anything else.
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f32,
    /// Another seed draws other tokens where the temperature is above 0.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Where to compute; this build has cpu.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Says what became of each layer.
    #[arg(short, long)]
    pub verbose: bool,
}

const EXAMPLES: &str = "\
Examples:
  generate --model models/OLMoE-1B-7B-0924 --prompt 'The capital of France is'
  generate --model models/Qwen3-30B-A3B --chat 'What is 17 * 23?' --template-arg enable_thinking=false
  generate --model models/Qwen3-30B-A3B --chat --system 'Answer in one sentence.'
  generate --model models/Qwen3-30B-A3B --chat 'Hi' --precision high --temperature 0.7 --seed 1

Exit code: 0 done, 1 error, 2 wrong arguments.";

impl Cli {
    /// Refuses a device that this build does not have.
    ///
    /// # Errors
    /// Which device, and which there are.
    pub fn check_device(&self) -> Result<()> {
        match self.device.as_str() {
            "cpu" => Ok(()),
            other => bail!("--device {other}: this build has cpu"),
        }
    }

    /// Variables of the chat template.
    pub fn template_variables(&self) -> BTreeMap<String, Value> {
        self.template_args.iter().cloned().collect()
    }
}

fn precision(text: &str) -> Result<Precision> {
    Ok(text.parse()?)
}

fn temperature(text: &str) -> Result<f32> {
    match text.parse() {
        Ok(temperature) if f32::is_finite(temperature) && temperature >= 0.0 => Ok(temperature),
        _ => bail!("expected a number of 0 or more"),
    }
}

fn template_arg(text: &str) -> Result<(String, Value)> {
    let (name, value) = text.split_once('=').ok_or_else(|| anyhow!("expected NAME=JSON"))?;
    // A word that is no JSON is meant as a string.
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((name.into(), value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_cannot_be_sampled_is_a_wrong_argument() {
        let parse =
            |more: &[&str]| Cli::try_parse_from([&["generate", "--model", "m", "--prompt", "p"], more].concat());
        for wrong in [
            ["--max-new-tokens", "0"],
            ["--temperature", "nan"],
            ["--temperature", "inf"],
            ["--temperature", "x"],
        ] {
            assert!(parse(&wrong).is_err(), "{wrong:?}");
        }
        assert!(parse(&["--temperature=-1"]).is_err());
        assert!(parse(&["--temperature", "0.7", "--max-new-tokens", "1"]).is_ok());
    }

    #[test]
    fn variables_of_a_template_are_json_or_words() {
        let parse = |text: &str| template_arg(text).unwrap();
        assert_eq!(parse("enable_thinking=false"), ("enable_thinking".into(), false.into()));
        assert_eq!(parse("date=26 Jul 2026"), ("date".into(), "26 Jul 2026".into()));
        assert!(template_arg("thinking").is_err());
    }
}
