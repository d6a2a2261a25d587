#!/usr/bin/env python3
"""Reads NVFP4 folders that this project wrote with compressed-tensors and transformers, and compares the weights.

usage: check_nvfp4.py PROGRAM FIXTURES EXPORTS OUT
PROGRAM is nvfp4_convert, FIXTURES tests/fixtures, EXPORTS target/tmp/nvfp4_folders (packed models that the tests saved), OUT a
folder for what is made here. The runner beside this file makes the environment.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
program, fixtures, exports, out = (pathlib.Path(path) for path in sys.argv[1:])
shutil.rmtree(out, ignore_errors=True)
out.mkdir(parents=True)
passed = failed = 0
SHARING = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    print("ok  " if ok else "FAIL", what)


def convert(command, source, *options):
    """Runs the program, and gives the folder that it made."""
    target = out / "_".join([source.name, command, *(option.strip("-") for option in options)])
    subprocess.run([program, command, source, target, *options], check=True, stdout=subprocess.DEVNULL)
    return target


def tensors(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def load(folder, **options):
    """The model, and whether every tensor of the files and of the model had its counterpart."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, **options)
    # Dense weights have no use for the scale of activations, which transformers reports and drops.
    unexpected = [name for name in info["unexpected_keys"] if not name.endswith("input_global_scale")]
    return model, not (info["missing_keys"] or unexpected or info["mismatched_keys"])


def packed_modules(weights):
    return [name.removesuffix(".weight_packed") for name in weights if name.endswith(".weight_packed")]


def check_compressed_tensors(folder, dense):
    """A folder in the format of compressed-tensors, and the weights that this project decodes it to."""
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    scheme, = config.config_groups.values()
    weights = tensors(folder)
    modules = packed_modules(weights)
    equal, rounded = True, 0.0
    for module in modules:
        parts = {part: weights[f"{module}.{part}"] for part in ("weight_packed", "weight_scale", "weight_global_scale")}
        rows, half = parts["weight_packed"].shape
        values = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, dtype=torch.float32)
        values = dequantize(values, parts["weight_scale"].float(), args=scheme.weights, dtype=torch.float32,
                            global_scale=parts["weight_global_scale"])
        ours = dense[f"{module}.weight"]
        equal &= torch.equal(values, ours)
        # What the package does by itself: in BF16.
        theirs = NVFP4PackedCompressor.decompress(parts, scheme)["weight"].float()
        rounded = max(rounded, ((theirs - ours).abs() / ours.abs().clamp(min=1e-30)).max().item())
    check(equal and modules, f"{folder.name}: {len(modules)} layers, compressed-tensors decodes them as we do, bit for bit")
    check(rounded < 2**-7, f"{folder.name}: its decompressor, in BF16, within {rounded:.1e}")
    linear = [name.removesuffix(".weight") for name, weight in weights.items()
              if name.endswith("_proj.weight") or name.endswith(("gate.weight", "lm_head.weight"))]
    ignored = {name for name in [*linear, *modules] if any(match_name(name, ignore) for ignore in config.ignore)}
    check(ignored == set(linear), f"{folder.name}: `ignore` lists the linear layers that are not packed, and no other")


def check_transformers(folder, dense):
    """Transformers loads the packed folder. Version 5.24 forgets the global scale of experts, whoever made the file."""
    model, complete = load(folder, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True))
    check(complete, f"{folder.name}: transformers finds every tensor, and none that it does not know")
    weights, loaded = tensors(folder), dict(model.named_parameters())

    def same(loaded, module):
        return torch.allclose(loaded.float(), dense[f"{module}.weight"].float(), rtol=2**-7, atol=0)

    attention = [module for module in packed_modules(weights) if "self_attn" in module]
    check(all(same(loaded[f"{module}.weight"], module) for module in attention),
          f"{folder.name}: transformers decodes {len(attention)} attention weights as we do")
    experts, forgotten = [], 0
    for module in packed_modules(weights):
        if ".experts." not in module:
            continue
        path, expert, projection = module.rsplit(".", 2)
        fused = loaded[f"{path}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"][int(expert)]
        rows = weights[f"{module}.weight_packed"].shape[0]
        part = fused[rows:] if projection == "up_proj" else fused[:rows]
        scale = weights[f"{module}.weight_global_scale"].float()
        experts.append(same(part, module) or same(part.float() / scale, module))
        forgotten += not same(part, module)
    check(experts and all(experts), f"{folder.name}: transformers decodes {len(experts)} experts' weights as we do, "
          f"but for the global scale of {forgotten}")


def check_recipe(folder, dense):
    """A folder made by `--recipe compressed-tensors` from dense weights in F32: the package's own functions make the same."""
    weights = tensors(folder)
    arguments = QuantizationArgs(**NVFP4["weights"].model_dump())
    equal = True
    for module in packed_modules(weights):
        parent, name = module.rsplit(".", 1)
        sharing = next((group for group in SHARING if name in group), [name])
        scales = [generate_gparam(*torch.aminmax(dense[f"{parent}.{member}.weight"])) for member in sharing]
        scale, weight = torch.stack(scales).min().reshape(1), dense[f"{module}.weight"]
        blocks = weight.unflatten(-1, (-1, 16))
        block_scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=scale)
        codes = quantize_and_pack_fp4(weight, block_scales, global_scale=scale, zero_point=None, group_size=16)
        equal &= torch.equal(scale, weights[f"{module}.weight_global_scale"])
        equal &= torch.equal(block_scales.to(torch.float8_e4m3fn).view(torch.uint8),
                             weights[f"{module}.weight_scale"].view(torch.uint8))
        equal &= torch.equal(codes, weights[f"{module}.weight_packed"])
    check(equal, f"{folder.name}: compressed-tensors packs the F32 weights to the same bytes")


def check_modelopt(folder):
    """A folder in ModelOpt's format: compressed-tensors' converter makes of it what ours does."""
    quantization = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    converter = ModelOptNvfp4Converter(targets=["re:.*proj$"], ignore=quantization["exclude_modules"])
    theirs = converter.validate(tensors(folder))
    ours = convert("convert", folder, "--to", "compressed-tensors")
    weights = tensors(ours)
    names = sorted(weights) == sorted(theirs)
    equal = names and all(torch.equal(weights[name].view(torch.uint8).flatten(), theirs[name].reshape(weights[name].shape)
                                      .view(torch.uint8).flatten()) for name in weights)
    check(equal, f"{folder.name}: compressed-tensors' converter from ModelOpt gives what ours does, byte for byte")
    return ours


def check_dense(folder, reference):
    model, complete = load(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(reference["input_ids"].long(), use_cache=False).logits
    difference = (logits - reference["weight_only.logits"]).abs().max().item()
    check(complete and difference <= 1e-4, f"{folder.name}: as dense weights in transformers, logits differ by {difference:.1e}")


in_f32 = out / "tiny_f32"
in_f32.mkdir()
shutil.copy(fixtures / "qwen3moe_tiny/config.json", in_f32)
shutil.copy(fixtures / "qwen3moe_tiny/model.safetensors", in_f32)
check_recipe(convert("quantize", in_f32, "--recipe", "compressed-tensors"), tensors(in_f32))

source = out / "tiny"
source.mkdir()
shutil.copy(fixtures / "qwen3moe_tiny/config.json", source)
shutil.copy(fixtures / "qwen3moe_tiny/model_bf16.safetensors", source / "model.safetensors")
calibration = fixtures / "nvfp4_checkpoints/calibration.jsonl"
folders = {
    "te": convert("quantize", source, "--recipe", "te"),
    "compressed-tensors": convert("quantize", source, "--recipe", "compressed-tensors"),
    "modelopt": convert("quantize", source, "--recipe", "modelopt"),
    "excluded": convert("quantize", source, "--exclude", "model.layers.0.self_attn"),
    "saved": exports / "export_compressed-tensors",
    "saved for modelopt": exports / "export_modelopt",
}
w4a4 = out / "w4a4"
subprocess.run([program, "quantize", source, w4a4, "--calibrate", calibration], check=True, stdout=subprocess.DEVNULL)
folders["w4a4"] = w4a4
for name, folder in folders.items():
    dense = convert("dequantize", folder, "--dtype", "f32")
    if (folder / "hf_quant_config.json").exists():
        converted = check_modelopt(folder)
        check_compressed_tensors(converted, tensors(convert("dequantize", converted, "--dtype", "f32")))
    else:
        check_compressed_tensors(folder, tensors(dense))
        check_transformers(folder, tensors(dense))
    reference = {"compressed-tensors": "compressed_tensors/w4a16", "modelopt": "modelopt/w4a4"}.get(name)
    if reference:
        check_dense(dense, load_file(fixtures / "nvfp4_checkpoints" / reference / "reference.safetensors"))
print(f"compressed-tensors {compressed_tensors.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0 or passed == 0)
