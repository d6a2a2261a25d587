//! Text from a Qwen3-MoE or OLMoE folder. The parts are in the library beside.
use anyhow::Result;
use burn_quads::{
    rollout::SamplingParams,
    text::{ChatMessage, ChatTemplate},
};
use clap::Parser;
use generate::{cli::Cli, model::TextModel};
use std::{
    io::{BufRead, Write, stdin, stdout},
    process::ExitCode,
};

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", burn_quads::explain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    cli.check_device()?;
    // Before the weights: an answer that cannot be given should not take a minute to refuse.
    let template = cli.chat.is_some().then(|| ChatTemplate::open(&cli.model)).transpose()?;
    let model = TextModel::open(&cli.model, &cli.precision, cli.residual_masks.as_deref())?;
    eprintln!(
        "{}: {} of {} weights packed in {}",
        cli.model.display(),
        model.audit.packed(),
        model.audit.layers.len(),
        cli.precision
    );
    if cli.verbose {
        eprint!("{}", model.audit);
    }
    let sampling = SamplingParams {
        temperature: cli.temperature,
        max_new_tokens: cli.max_new_tokens,
        eos_token_ids: model.eos_token_ids.clone(),
        seed: cli.seed,
        record_routing: false,
    };
    match (template, &cli.prompt) {
        (Some(template), _) => chat(cli, &model, &template, &sampling),
        (None, Some(prompt)) => {
            write!(stdout(), "{prompt}")?;
            say(&model, &model.tokenizer.encode(prompt)?, &sampling).map(drop)
        }
        (None, None) => unreachable!("the command line asks for one of them"),
    }
}

/// Answers on standard output, and gives the text.
fn say(model: &TextModel, prompt: &[u32], sampling: &SamplingParams) -> Result<String> {
    stdout().flush()?;
    let answer = model.answer(prompt, sampling, &mut stdout())?;
    writeln!(stdout())?;
    eprintln!("{answer}");
    Ok(answer.text)
}

fn chat(cli: &Cli, model: &TextModel, template: &ChatTemplate, sampling: &SamplingParams) -> Result<()> {
    let variables = cli.template_variables();
    let mut messages: Vec<ChatMessage> = cli.system.iter().map(|text| ChatMessage::new("system", text)).collect();
    let mut turn = |text: &str| -> Result<()> {
        messages.push(ChatMessage::new("user", text));
        let rendered = template.render(&messages, true, &variables)?;
        let answer = say(model, &model.tokenizer.encode_rendered(&rendered)?, sampling)?;
        messages.push(ChatMessage::new("assistant", answer));
        Ok(())
    };
    if let Some(Some(text)) = &cli.chat {
        return turn(text);
    }
    for line in stdin().lock().lines() {
        let line = line?;
        if !line.trim().is_empty() {
            turn(&line)?;
        }
    }
    Ok(())
}
