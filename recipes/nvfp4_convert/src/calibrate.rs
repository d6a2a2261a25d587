//! Static activation scales for W4A4: the largest magnitude of each layer's input on given text.
use anyhow::{Context, Result};
use burn::backend::Flex;
use burn_nvfp4::Nvfp4;
use burn_quads::{checkpoint::ModelFolder, input_ranges::InputRanges};
use std::path::Path;

use crate::prompts;

/// Sequences that go through the model at once.
const BATCH: usize = 8;

/// Runs the text of `file` through the dense model in `folder`, all of which is loaded in f32.
///
/// # Errors
/// When the model is no Qwen3-MoE or OLMoE, or the text cannot be read.
pub fn calibrate(folder: &Path, file: &Path, limit: usize) -> Result<InputRanges> {
    let folder = ModelFolder::open(folder)?;
    let sequences = prompts::read(file, &folder, limit)?;
    let model = folder.load::<Nvfp4<Flex>>(&Default::default(), |_| {})?;
    InputRanges::measure(&model, &sequences, BATCH).with_context(|| format!("{}", file.display()))
}

/// What a W4A4 export should be known for.
pub fn remarks(ranges: &InputRanges) -> String {
    let mut text = String::from(
        "note: engines such as vLLM quantize all tokens' activations by one static scale for a layer, and have no residual \
         compensation, so their W4A4 is not the rollout of this project\n",
    );
    if !ranges.unseen.is_empty() {
        text.push_str(&format!(
            "note: {} expert(s) had no token; the activation scale of their down_proj is the largest of their layer: {}\n",
            ranges.unseen.len(),
            ranges.unseen.join(", ")
        ));
    }
    text
}
