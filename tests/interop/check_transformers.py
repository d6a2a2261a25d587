#!/usr/bin/env python3
"""Loads the folders that `hf_folder` wrote with transformers, and compares what they compute with the references.

usage: check_transformers.py FOLDER     (target/tmp/hf_interop; the runner beside this file makes the environment)
"""
import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
passed = failed = 0
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    reference = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        logits = model(reference["input_ids"].long(), use_cache=False).logits
    difference = (logits - reference["logits"]).abs().max().item()
    keys = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    ok = difference <= 1e-4 and not keys
    passed, failed = passed + ok, failed + (not ok)
    dtype = json.loads((folder / "config.json").read_text())
    dtype = dtype.get("dtype", dtype.get("torch_dtype"))
    print(f"{'ok  ' if ok else 'FAIL'} {folder.name}: {type(model).__name__}, {dtype}, logits differ by {difference:.1e}", keys or "")
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0 or passed == 0)
