//! From ids to text, as they are sampled.
use anyhow::{Result, bail};
use burn_quads::rollout::{FinishReason, RolloutEngine, SamplingParams};
use std::{
    fmt,
    io::Write,
    time::{Duration, Instant},
};

use crate::model::{Backend, TextModel};

/// What was said, and how fast.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The text, without the token that ended it.
    pub text: String,
    /// Whether it was cut off.
    pub finish: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens sampled, the ending one included.
    pub tokens: usize,
    /// From the start to the first token.
    pub first: Duration,
    /// From the first token to the last.
    pub rest: Duration,
}

impl TextModel {
    /// Answers `prompt`, writing the text to `out` piece by piece.
    ///
    /// # Errors
    /// When the prompt is empty or too long, the model diverges, or `out` refuses.
    pub fn answer(&self, prompt: &[u32], sampling: &SamplingParams, out: &mut impl Write) -> Result<Answer> {
        let max_seq_len = prompt.len() + sampling.max_new_tokens;
        let positions = self.model.config().max_position_embeddings;
        if max_seq_len > positions {
            bail!(
                "{} tokens of prompt and --max-new-tokens {}: the model has {positions} positions",
                prompt.len(),
                sampling.max_new_tokens
            );
        }
        let mut engine = RolloutEngine::<Backend>::new(1, max_seq_len)?;
        let mut stream = self.tokenizer.stream();
        let mut text = String::new();
        let mut written = Ok(());
        let start = Instant::now();
        let (mut first, mut last) = (None, start);
        let observe = |sampled: burn_quads::rollout::SampledToken| {
            last = Instant::now();
            first.get_or_insert(last);
            if written.is_ok() && !sampling.eos_token_ids.contains(&sampled.token) {
                written = write_piece(stream.push(sampled.token).map_err(Into::into), &mut text, out);
            }
        };
        let completions = engine.generate_observed(&self.model, &[prompt.to_vec()], sampling, observe)?;
        written?;
        write_piece(stream.finish().map_err(Into::into), &mut text, out)?;
        let first = first.unwrap_or(last);
        Ok(Answer {
            text,
            finish: completions[0].finish,
            prompt_tokens: prompt.len(),
            tokens: completions[0].tokens.len(),
            first: first - start,
            rest: last - first,
        })
    }
}

fn write_piece(piece: Result<String>, text: &mut String, out: &mut impl Write) -> Result<()> {
    let piece = piece?;
    if !piece.is_empty() {
        out.write_all(piece.as_bytes())?;
        out.flush()?;
        text.push_str(&piece);
    }
    Ok(())
}

/// Two lines: what was sampled, and how fast.
impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ending = match self.finish {
            FinishReason::Eos => "to its end",
            FinishReason::Length => "cut off by --max-new-tokens",
        };
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        let (prompt, tokens) = (self.prompt_tokens, self.tokens);
        writeln!(f, "{tokens} tokens, {ending}")?;
        write!(f, "prompt: {prompt} tokens, {:.1} tokens/s; ", rate(prompt, self.first))?;
        match self.tokens {
            0 | 1 => write!(f, "answer: too short to time"),
            _ => write!(f, "answer: {:.1} tokens/s", rate(tokens - 1, self.rest)),
        }
    }
}
