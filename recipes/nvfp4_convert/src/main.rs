//! The commands; their parts are in the library beside.
use anyhow::{Context, Result};
use clap::Parser;
use nvfp4_convert::{
    calibrate::{calibrate, remarks},
    cli::{Cli, Command, ConvertArgs, DequantizeArgs, InspectArgs, QuantizeArgs, VerifyArgs},
    convert::Convert,
    dequantize::Dequantize,
    inspect::inspect,
    logits_gap,
    quantize::Quantize,
    shards::{self, Conversion, Converted},
    source::Source,
    table::bytes,
    verify::verify,
};
use serde_json::{Value, json};
use std::{io::Write, path::Path, process::ExitCode, time::Instant};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Quantize(arguments) => quantize(&arguments),
        Command::Dequantize(arguments) => dequantize(&arguments),
        Command::Convert(arguments) => convert(&arguments),
        Command::Inspect(arguments) => show(&arguments),
        Command::Verify(arguments) => compare(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", burn_quads::explain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn quantize(arguments: &QuantizeArgs) -> Result<()> {
    let source = Source::open(&arguments.input)?;
    let format = arguments.format.unwrap_or(arguments.recipe.format());
    // What takes no time is checked first.
    let exclude = arguments.exclude.iter().cloned();
    let mut quantize = Quantize::new(&source, arguments.recipe, format, exclude)?;
    let mut settings = json!({
        "command": "quantize",
        "recipe": arguments.recipe,
        "format": format.to_string(),
        "exclude": arguments.exclude,
    });
    let mut notes = String::new();
    if let Some(file) = &arguments.calibrate {
        let ranges = calibrate(&arguments.input, file, arguments.max_tokens)?;
        notes = remarks(&ranges);
        settings["input_amax"] = json!(ranges.amax);
        quantize = quantize.with_input_amax(ranges.amax);
    }
    write(&source, &arguments.output, settings, &quantize)?;
    print(&notes)
}

fn dequantize(arguments: &DequantizeArgs) -> Result<()> {
    let source = Source::open(&arguments.input)?;
    let settings = json!({"command": "dequantize", "dtype": arguments.dtype});
    write(
        &source,
        &arguments.output,
        settings,
        &Dequantize::new(&source, arguments.dtype)?,
    )
}

fn convert(arguments: &ConvertArgs) -> Result<()> {
    let source = Source::open(&arguments.input)?;
    let settings = json!({"command": "convert", "format": arguments.to.to_string()});
    write(
        &source,
        &arguments.output,
        settings,
        &Convert::new(&source, arguments.to)?,
    )
}

fn write(source: &Source, output: &Path, settings: Value, conversion: &impl Conversion) -> Result<()> {
    let start = Instant::now();
    let Converted {
        bytes_read,
        bytes_written,
        shards,
        resumed,
    } = shards::convert(source, output, settings, conversion)?;
    let resumed = match resumed {
        0 => String::new(),
        count => format!(", {count} of them from an earlier run"),
    };
    print(&format!(
        "{}: {} from {}, {shards} file(s){resumed}, in {:.1} s\n",
        output.display(),
        bytes(bytes_written),
        bytes(bytes_read),
        start.elapsed().as_secs_f64()
    ))
}

fn show(arguments: &InspectArgs) -> Result<()> {
    let source = Source::open(&arguments.input)?;
    let original = arguments.original.as_deref().map(Source::open).transpose()?;
    print(&inspect(&source, original.as_ref(), arguments.each)?)
}

fn compare(arguments: &VerifyArgs) -> Result<()> {
    let (source, original) = (Source::open(&arguments.input)?, Source::open(&arguments.original)?);
    let verified = verify(&source, &original, arguments.tolerance)?;
    print(&format!(
        "{} packed layers: relative error {:.4}, at most {:.4} ({})\n{} other tensors equal the original's\n",
        verified.layers, verified.error, verified.worst.1, verified.worst.0, verified.equal
    ))?;
    let Some(file) = &arguments.prompts else { return Ok(()) };
    let gap = logits_gap::measure(
        &arguments.input,
        &arguments.original,
        file,
        arguments.max_tokens,
        &arguments.precision,
    )?;
    print(&format!(
        "logits in {} over {} tokens: mean difference {:.4}, at most {:.3}; same likeliest token {:.1} %\n\
         log-probability of the next token: mean difference {:.4}; KL divergence {:.5} nats\n",
        arguments.precision,
        gap.tokens,
        gap.mean,
        gap.max,
        100.0 * gap.same_top,
        gap.log_prob,
        gap.divergence
    ))
}

/// To standard output; a reader that has seen enough is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("standard output"),
    }
}
