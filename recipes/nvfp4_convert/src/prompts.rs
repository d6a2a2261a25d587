//! Token sequences to calibrate and compare on, from JSON lines.
use anyhow::{Context, Result, bail};
use burn_nvfp4::safetensors_file::{regular_file, strict_json};
use burn_quads::{checkpoint::ModelFolder, text::TextTokenizer};
use serde_json::{Map, Value};
use std::path::Path;

/// More text than calibration can use.
const MAX_BYTES: u64 = 1 << 30;
/// Fields that may hold the text, the first there is counts.
const TEXT: [&str; 4] = ["text", "prompt", "question", "problem"];

/// Reads one sequence a line: `input_ids`, or a text in `text`, `prompt`, `question` or `problem` for the tokenizer of the
/// model's folder. Sequences are cut to `limit` tokens and to what the model has positions for.
///
/// # Errors
/// Names the line: no JSON object, none of the fields, an id that the model does not have. When there is no line.
pub fn read(path: &Path, model: &ModelFolder, limit: usize) -> Result<Vec<Vec<u32>>> {
    let text = regular_file::read_text(path, MAX_BYTES)?;
    let mut tokenizer = None;
    let mut sequences = vec![];
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let sequence = sequence(line, model, &mut tokenizer);
        let mut sequence = sequence.with_context(|| format!("{}, line {}", path.display(), index + 1))?;
        sequence.truncate(limit.min(model.config().max_position_embeddings));
        sequences.push(sequence);
    }
    if sequences.iter().all(Vec::is_empty) {
        bail!("{}: no tokens", path.display());
    }
    Ok(sequences)
}

fn sequence(line: &str, model: &ModelFolder, tokenizer: &mut Option<TextTokenizer>) -> Result<Vec<u32>> {
    let fields = strict_json::parse_object(line.as_bytes()).map_err(anyhow::Error::msg)?;
    let ids = match fields.get("input_ids") {
        Some(ids) => {
            let ids = ids
                .as_array()
                .and_then(|ids| ids.iter().map(id).collect::<Option<Vec<u32>>>());
            ids.context("input_ids: expected a list of token ids")?
        }
        None => {
            let text = text(&fields)?;
            let tokenizer = match tokenizer {
                Some(tokenizer) => tokenizer,
                None => tokenizer.insert(TextTokenizer::open(model.path())?),
            };
            tokenizer.encode(text)?
        }
    };
    let vocabulary = model.config().vocab_size;
    match ids.iter().find(|id| **id as usize >= vocabulary) {
        Some(id) => bail!("token id {id}, and the model has {vocabulary}"),
        None => Ok(ids),
    }
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn text(fields: &Map<String, Value>) -> Result<&str> {
    let Some((name, value)) = TEXT.iter().find_map(|name| Some((name, fields.get(*name)?))) else {
        bail!("expected input_ids, or a text in one of {}", TEXT.join(", "));
    };
    value
        .as_str()
        .with_context(|| format!("{name}: expected a string, found {}", strict_json::kind(value)))
}
