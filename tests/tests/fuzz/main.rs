//! Fuzz targets: what strangers' files and sampled texts may hold must end in a value or in an error that names the file.
//!
//! A target is a reader, a corpus in `tests/fixtures/fuzz_corpus/<target>`, and mutations of its files, the same ones in
//! every run. `QUADS_FUZZ_RUNS` sets how many mutations each file of the corpus gets. For every input:
//!
//! - no panic and no end of the process;
//! - an error names the file it is about;
//! - time is bounded (10 ms for the reward of a text of up to 64 KiB);
//! - memory is bounded by a small multiple of the input's size, and a constant.
//!
//! Every file of the corpus is also known to be accepted or refused. An input that fails is written to the target folder
//! and named in the failure; copied into the corpus, it stays a test.
mod allocations;
mod harness;
mod mutate;

mod chat_template;
mod dataset;
mod model_config;
mod nvfp4_weights;
mod reward;
mod safetensors_header;
mod tokenizer;
