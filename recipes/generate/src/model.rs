//! A folder of the Hub, loaded and packed.
use anyhow::{Context, Result, bail};
use burn::backend::Flex;
use burn_nvfp4::{Nvfp4, PackingAudit, Precision};
use burn_quads::{
    checkpoint::{LoadProgress, ModelFolder},
    modules::moe::QuadsMoe,
    modules::residual_masks::ResidualMasks,
    sync::pack_model,
    text::TextTokenizer,
};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::Path;

/// What the model runs on.
pub type Backend = Nvfp4<Flex>;

/// A model with its tokenizer.
pub struct TextModel {
    /// Packed, unless the precision is high.
    pub model: QuadsMoe<Backend>,
    /// What became of each layer.
    pub audit: PackingAudit,
    /// Its tokenizer.
    pub tokenizer: TextTokenizer,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

impl TextModel {
    /// Loads a folder and packs its weights, unless the folder has them packed to NVFP4 already; a bar on standard error
    /// shows how far it is.
    ///
    /// # Errors
    /// When the folder is damaged or of another model, or its sizes do not fit the precision.
    pub fn open(path: &Path, precision: &Precision, residual_masks: Option<&Path>) -> Result<Self> {
        let folder = ModelFolder::open(path)?;
        if *precision == Precision::High && folder.quantization_config().is_some() {
            bail!(
                "{}: the weights are NVFP4, and --precision high asks for dense ones: take w4a16, which has their exact values \
                 and full activations",
                path.display()
            );
        }
        let tokenizer = TextTokenizer::open(path)?;
        let (known, rows) = (tokenizer.vocab_size(), folder.config().vocab_size);
        if known > rows {
            bail!(
                "{}: the tokenizer has {known} tokens, the model only {rows}",
                path.display()
            );
        }
        let masks = residual_masks.map(ResidualMasks::load).transpose()?;
        let bar = ProgressBar::new(0).with_style(
            ProgressStyle::with_template("Loading {wide_bar} {bytes}/{total_bytes}").expect("a valid template"),
        );
        let progress = |progress: LoadProgress<'_>| {
            bar.set_length(progress.total_bytes);
            bar.set_position(progress.bytes);
        };
        let device = Default::default();
        let cannot = || format!("{} cannot run in {precision}", path.display());
        let (model, audit) = match folder.quantization_config() {
            Some(_) => folder
                .load_packed(precision, masks.as_ref(), &device, progress)
                .with_context(cannot)?,
            None => pack_model(folder.load(&device, progress)?, precision, masks.as_ref()).with_context(cannot)?,
        };
        bar.finish_and_clear();
        Ok(Self {
            model,
            audit,
            tokenizer,
            eos_token_ids: folder.eos_token_ids().to_vec(),
        })
    }
}
