//! The command line.
use burn_nvfp4::{Precision, checkpoint::CheckpointFormat};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

use crate::{dequantize::DenseType, quantize::Recipe};

/// Quantizes checkpoints to NVFP4, converts them between formats, and checks the result.
///
/// A checkpoint is a folder as on the Hugging Face Hub: config.json, and model.safetensors or its shards. Input is never
/// changed; output is written aside (OUTPUT.partial) and renamed when it is whole; an interrupted run goes on when it is
/// repeated.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  nvfp4_convert quantize Qwen3-30B-A3B Qwen3-30B-A3B-NVFP4
  nvfp4_convert quantize IN OUT --recipe modelopt --exclude model.layers.0.self_attn
  nvfp4_convert inspect OUT --original IN
  nvfp4_convert quantize IN OUT --calibrate prompts.jsonl
  nvfp4_convert verify OUT --original IN --prompts prompts.jsonl
  nvfp4_convert convert OUT OUT-modelopt --to modelopt
  nvfp4_convert dequantize OUT DENSE --dtype f32

Exit code: 0 done, 1 error, 2 wrong arguments.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Packs the projections of attention and MLP or experts; embedding, head, routers and norms stay as they are.
    Quantize(QuantizeArgs),
    /// Writes dense weights from a quantized model.
    Dequantize(DequantizeArgs),
    /// Writes a quantized model in the other format, with the same codes and block scales.
    Convert(ConvertArgs),
    /// Prints a table of a model's layers.
    Inspect(InspectArgs),
    /// Compares a quantized model with its original.
    Verify(VerifyArgs),
}

/// Options of `quantize`.
#[derive(Args, Debug)]
pub struct QuantizeArgs {
    /// Folder of a dense model.
    pub input: PathBuf,
    /// Folder to make.
    pub output: PathBuf,
    /// Whose formulas to use. They differ in few bytes; `te` gives the weights that rollouts of this project have.
    #[arg(long, value_enum, default_value_t)]
    pub recipe: Recipe,
    /// Format of the output: compressed-tensors or modelopt. By default that of the recipe, compressed-tensors for te.
    #[arg(long)]
    pub format: Option<CheckpointFormat>,
    /// Exact path of a module that stays dense, with all inside it; may be given many times.
    #[arg(long, value_name = "MODULE")]
    pub exclude: Vec<String>,
    /// Also writes static activation scales, measured on these JSON lines (input_ids, text, prompt, question or problem):
    /// engines then run W4A4. Without it the result is weight-only (W4A16). Loads the whole model in f32.
    #[arg(long, value_name = "FILE")]
    pub calibrate: Option<PathBuf>,
    /// Tokens of each line to use.
    #[arg(long, value_name = "N", default_value_t = 512, requires = "calibrate")]
    pub max_tokens: usize,
}

/// Options of `dequantize`.
#[derive(Args, Debug)]
pub struct DequantizeArgs {
    /// Folder of a quantized model.
    pub input: PathBuf,
    /// Folder to make.
    pub output: PathBuf,
    /// Type of the dense weights: bf16 rounds them, f32 does not.
    #[arg(long, value_enum, default_value_t)]
    pub dtype: DenseType,
}

/// Options of `convert`.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// Folder of a quantized model.
    pub input: PathBuf,
    /// Folder to make.
    pub output: PathBuf,
    /// The other format: compressed-tensors or modelopt.
    #[arg(long)]
    pub to: CheckpointFormat,
}

/// Options of `inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// Folder of a model.
    pub input: PathBuf,
    /// Folder of the model it was made from, to show the error of each layer.
    #[arg(long)]
    pub original: Option<PathBuf>,
    /// One line for each expert.
    #[arg(long)]
    pub each: bool,
}

/// Options of `verify`.
#[derive(Args, Debug)]
pub struct VerifyArgs {
    /// Folder of a quantized model.
    pub input: PathBuf,
    /// Folder of the model it was made from.
    #[arg(long)]
    pub original: PathBuf,
    /// Largest relative error of a layer; beyond it the command fails. NVFP4 has about 0.095 on Gaussian weights.
    #[arg(long, default_value_t = 0.2, value_parser = tolerance)]
    pub tolerance: f64,
    /// Also compares the logits on these JSON lines (input_ids, text, prompt, question or problem). Loads both models.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Tokens of each line to use.
    #[arg(long, value_name = "N", default_value_t = 512, requires = "prompts")]
    pub max_tokens: usize,
    /// Precision of the packed model there: w4a16, w4a4 or w4a4_rac.
    #[arg(long, default_value = "w4a16", requires = "prompts")]
    pub precision: Precision,
}

/// Anything else would let every layer pass, or none.
fn tolerance(text: &str) -> Result<f64, String> {
    let tolerance = text.parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0);
    tolerance.ok_or_else(|| "expected a number, at least 0".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_tolerance_is_a_number() {
        let tolerance = |text: &str| {
            let cli =
                Cli::try_parse_from(["x", "verify", "a", "--original", "b", &format!("--tolerance={text}")]).ok()?;
            match cli.command {
                Command::Verify(arguments) => Some(arguments.tolerance),
                _ => panic!(),
            }
        };
        assert_eq!((tolerance("0"), tolerance("0.3")), (Some(0.0), Some(0.3)));
        for text in ["nan", "inf", "-0.1", "1e999", "x", ""] {
            assert_eq!(tolerance(text), None, "{text}");
        }
    }

    #[test]
    fn formats_and_recipes_have_the_names_of_their_makers() {
        let cli = Cli::parse_from([
            "x",
            "quantize",
            "a",
            "b",
            "--recipe",
            "compressed-tensors",
            "--format",
            "modelopt",
        ]);
        let Command::Quantize(arguments) = cli.command else {
            panic!()
        };
        assert_eq!(arguments.recipe, Recipe::CompressedTensors);
        assert_eq!(arguments.format, Some(CheckpointFormat::ModelOpt));
        assert!(Cli::try_parse_from(["x", "convert", "a", "b", "--to", "awq"]).is_err());
    }
}
