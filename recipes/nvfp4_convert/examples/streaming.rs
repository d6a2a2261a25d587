//! Memory and speed of `nvfp4_convert quantize`, and of loading what it made, on a synthetic Qwen3-MoE of 2 GB.
//!
//! ```sh
//! cargo run --release -p nvfp4_convert --example streaming -- [FOLDER]
//! ```
//!
//! Needs 5 GB of disk under FOLDER (the system's folder for temporary files by default), which it gives back. Each figure
//! is of the same run: a loop that reads the shards, writes them and waits for the disk, 1 MiB at a time; then the program; then a
//! process that loads the result into `QuadsMoe`. Memory is the largest `RssAnon` of the process, looked at every two
//! milliseconds. It fails when a figure is beyond what this project promises. Linux only.
use anyhow::{Context, Result, ensure};
use burn::backend::Flex;
use burn_nvfp4::{
    Precision,
    safetensors_file::{Dtype, SafetensorsWriter, TensorSpec},
};
use burn_quads::{QuadsMoeConfig, checkpoint::ModelFolder};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

const SHARDS: usize = 4;
/// Each figure is the median of so many.
const ROUNDS: usize = 3;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--load", folder] => return load(Path::new(folder)),
        [] | [_] => {}
        _ => anyhow::bail!("usage: streaming [FOLDER]"),
    }
    let base = arguments.first().map_or_else(std::env::temp_dir, PathBuf::from);
    let base = base.join(format!("nvfp4_streaming_{}", std::process::id()));
    fs::create_dir_all(&base)?;
    let measured = measure(&base);
    fs::remove_dir_all(&base)?;
    measured
}

/// Shapes of a model with 1 billion parameters, 0.3 billion of them active for a token.
fn config() -> QuadsMoeConfig {
    QuadsMoeConfig::new(32_768, 1024, 18, 16, 4, 128, 32, 6, 512)
        .with_norm_topk_prob(true)
        .with_max_position_embeddings(4096)
        .with_tie_word_embeddings(true)
}

fn measure(base: &Path) -> Result<()> {
    let (input, output) = (base.join("dense"), base.join("packed"));
    let bytes = write_checkpoint(&input)?;
    println!("a Qwen3-MoE of {:.2} GB in {SHARDS} shards", bytes as f64 / 1e9);
    let (mut copies, mut quantizations, mut memory) = (vec![], vec![], 0);
    for _ in 0..ROUNDS {
        copies.push(copy_seconds(&input, &base.join("copy"))?);
        let program = std::env::current_exe()?;
        let program = program.ancestors().nth(2).context("no folder")?.join("nvfp4_convert");
        ensure!(program.exists(), "{}: build the workspace first", program.display());
        let _ = fs::remove_dir_all(&output);
        let (seconds, peak) = run(Command::new(program).arg("quantize").args([&input, &output]))?;
        quantizations.push(seconds);
        memory = memory.max(peak);
    }
    let (copy, quantize) = (median(&mut copies), median(&mut quantizations));
    println!(
        "read, write, fsync, 1 MiB at a time: {copy:.2} s, {:.2} GB/s",
        bytes as f64 / 1e9 / copy
    );
    println!(
        "quantize: {quantize:.2} s, {:.2} GB/s, {:.2} of that",
        bytes as f64 / 1e9 / quantize,
        copy / quantize
    );
    println!("quantize: at most {:.0} MB of anonymous memory", memory as f64 / 1e6);

    let folder = ModelFolder::open(&output)?;
    let on_disk: u64 = folder.files().tensors().map(|tensor| tensor.bytes.len() as u64).sum();
    let mut command = Command::new(std::env::current_exe()?);
    let (seconds, peak) = run(command.arg("--load").arg(&output))?;
    println!(
        "load packed: {seconds:.2} s, at most {:.0} MB of anonymous memory, {:.2} of the {:.0} MB on disk",
        peak as f64 / 1e6,
        peak as f64 / on_disk as f64,
        on_disk as f64 / 1e6
    );
    ensure!(
        memory < 600_000_000,
        "quantize: 600 MB of anonymous memory are promised"
    );
    ensure!(quantize <= 2.0 * copy, "quantize: half the speed of a copy is promised");
    ensure!(
        peak as f64 <= 1.2 * on_disk as f64,
        "load packed: 1.2 times the size on disk is promised"
    );
    Ok(())
}

/// What the child process does.
fn load(folder: &Path) -> Result<()> {
    let folder = ModelFolder::open(folder)?;
    let (model, audit) = folder.load_packed::<Flex>(&Precision::W4A16, None, &Default::default(), |_| {})?;
    println!(
        "in memory {:.0} MB, {} weights packed",
        audit.bytes_after() as f64 / 1e6,
        audit.packed()
    );
    drop(model);
    Ok(())
}

/// Seconds and largest anonymous memory of a command.
fn run(command: &mut Command) -> Result<(f64, u64)> {
    let start = Instant::now();
    let mut child = command.stdin(Stdio::null()).spawn()?;
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        if let Some(exit) = child.try_wait()? {
            ensure!(exit.success(), "the command failed");
            return Ok((start.elapsed().as_secs_f64(), peak));
        }
        let anonymous = fs::read_to_string(&status).ok().and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        });
        peak = peak.max(1024 * anonymous.unwrap_or(0));
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn copy_seconds(input: &Path, copy: &Path) -> Result<f64> {
    let mut buffer = vec![0; 1 << 20];
    let mut seconds = 0.0;
    for entry in fs::read_dir(input)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let start = Instant::now();
        let (mut from, mut to) = (File::open(path)?, File::create(copy)?);
        loop {
            match from.read(&mut buffer)? {
                0 => break,
                read => to.write_all(&buffer[..read])?,
            }
        }
        to.sync_all()?;
        seconds += start.elapsed().as_secs_f64();
        fs::remove_file(copy)?;
    }
    Ok(seconds)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Writes the checkpoint in BF16, each layer's tensors in one shard, and gives the bytes of its tensors.
fn write_checkpoint(folder: &Path) -> Result<u64> {
    fs::create_dir_all(folder)?;
    let config = config();
    fs::write(
        folder.join("config.json"),
        config.to_json().replace("float32", "bfloat16"),
    )?;
    let mut shards: Vec<Vec<TensorSpec>> = vec![vec![]; SHARDS];
    let mut add = |shard: usize, name: String, shape: &[usize]| {
        let shape = shape.to_vec();
        shards[shard].push(TensorSpec {
            name,
            dtype: Dtype::BF16,
            shape,
        });
    };
    let hidden = config.hidden_size;
    add(0, "model.embed_tokens.weight".into(), &[config.vocab_size, hidden]);
    add(SHARDS - 1, "model.norm.weight".into(), &[hidden]);
    for layer in 0..config.num_hidden_layers {
        let shard = layer * SHARDS / config.num_hidden_layers;
        let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
        let (q, kv) = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        );
        add(shard, name("self_attn.q_proj"), &[q, hidden]);
        add(shard, name("self_attn.k_proj"), &[kv, hidden]);
        add(shard, name("self_attn.v_proj"), &[kv, hidden]);
        add(shard, name("self_attn.o_proj"), &[hidden, q]);
        add(shard, name("self_attn.q_norm"), &[config.head_dim]);
        add(shard, name("self_attn.k_norm"), &[config.head_dim]);
        add(shard, name("input_layernorm"), &[hidden]);
        add(shard, name("post_attention_layernorm"), &[hidden]);
        add(shard, name("mlp.gate"), &[config.num_experts, hidden]);
        for expert in 0..config.num_experts {
            let name = |rest: &str| name(&format!("mlp.experts.{expert}.{rest}"));
            add(shard, name("gate_proj"), &[config.moe_intermediate_size, hidden]);
            add(shard, name("up_proj"), &[config.moe_intermediate_size, hidden]);
            add(shard, name("down_proj"), &[hidden, config.moe_intermediate_size]);
        }
    }
    let mut weight_map = BTreeMap::new();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut total = 0;
    for (index, specs) in shards.into_iter().enumerate() {
        let file = format!("model-{:05}-of-{SHARDS:05}.safetensors", index + 1);
        let mut writer = SafetensorsWriter::create(&folder.join(&file), specs.clone(), BTreeMap::new())?;
        for TensorSpec { name, shape, .. } in specs {
            let elements = shape.iter().product();
            // Norms near 1, matrices with a deviation of 1/√d_in.
            let (mean, deviation) = match shape.len() {
                1 => (1.0, 0.1),
                _ => (0.0, 1.0 / (shape[1] as f32).sqrt()),
            };
            let bytes = random.normal(elements, mean, deviation);
            writer.write(&name, &bytes)?;
            total += bytes.len() as u64;
            weight_map.insert(name, file.clone());
        }
        writer.finish()?;
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string())?;
    Ok(total)
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// BF16 values, nearly normal: sums of four bytes.
    fn normal(&mut self, elements: usize, mean: f32, deviation: f32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(2 * elements);
        while bytes.len() < 2 * elements {
            for half in self.next().to_le_bytes().as_chunks::<4>().0 {
                let sum: u32 = half.iter().map(|byte| u32::from(*byte)).sum();
                // Each byte has mean 127.5 and deviation 73.9.
                let value = mean + deviation * (sum as f32 - 510.0) / 147.8;
                bytes.extend_from_slice(&half::bf16::from_f32(value).to_le_bytes());
            }
        }
        bytes.truncate(2 * elements);
        bytes
    }
}
