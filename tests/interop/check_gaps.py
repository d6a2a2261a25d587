#!/usr/bin/env python3
"""Measures the log-prob gaps that `grpo_math gap --export` wrote anew, with transformers and a rounding of its own.

The checkpoint is loaded by transformers, its linears (q, k, v, o; gate, up and down of the experts) are replaced by
fake-quantized ones in float32, written from docs/numerics.md, and the same tokens are scored. Router, norms, embedding and
head stay as they are. Of every pairing of trainer and rollout the mean gap and the tokens' own gaps must agree: two engines
sum in different orders, so that now and then a value falls to the other side of a tie.

usage: check_gaps.py FOLDER...     (the runner beside this file makes the environment)
"""
import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

TOLERANCE = 0.02  # of the mean gap: how far the means may be apart
OF_TOKENS = 0.05  # of the mean gap: how far the gaps of tokens may be apart on average; a wrong recipe leaves 40 to 140 %
NOTHING = 1e-5  # nats: a gap that is only the order of sums
FLT_MAX = torch.finfo(torch.float32).max
SIXTH = torch.tensor(1 / 6, dtype=torch.float32)


# --- NVFP4 and FP8, as values ---


def e2m1(x):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties to the even code, which is the even multiple of the step."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((torch.round(size / step) * step).clamp(max=6), x)


def e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)


def nvfp4(x, encode_scale):
    """Values of x [..., k] after rounding in blocks of 16; `encode_scale` [..., 1] is the outer scale S."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = encode_scale.unsqueeze(-1)
    largest = blocks.abs().amax(-1, keepdim=True)
    block_scale = e4m3((largest * (scale * SIXTH)).clamp(max=FLT_MAX))
    decode = block_scale * (1 / scale)
    inverse = (1 / decode).clamp(max=FLT_MAX)
    return (e2m1(blocks * inverse) * decode).flatten(-2)


def weight_scale(*group):
    """One S for matrices that share it."""
    largest = torch.stack([weight.abs().max() for weight in group]).max()
    # Of a number and a tensor, `/` makes a reciprocal and a product: rounded twice.
    return torch.ones(()) if largest == 0 else torch.div(torch.tensor(2688.0), largest).clamp(max=FLT_MAX)


def row_scale(x):
    """S of each row: a power of two, from the bits of the largest magnitude."""
    largest = x.abs().amax(-1, keepdim=True)
    bits = largest.view(torch.int32)
    exponent, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF
    exponent = torch.where(mantissa > 0x280000, 10 - exponent, 11 - exponent).clamp(-126, 126)
    return torch.where(largest == 0, 1.0, ((exponent + 127) << 23).view(torch.float32))


def fp8(x):
    """One scale for each row."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    return e4m3(x / scale) * scale


# --- the sides of a pairing ---


class Side:
    """What a precision makes of weights and of activations."""

    def __init__(self, precision, masks):
        self.precision = precision
        self.masks = None
        if precision == "w4a4_rac":
            self.kind = "w4a4_rac"
        elif precision.startswith("w4a4_rac(calibrated, "):
            self.kind, self.masks = "w4a4_rac", masks
        elif precision in ("high", "w4a16", "w4a4", "fp8"):
            self.kind = precision
        else:
            sys.exit(f"{precision}: a precision that is not known here")

    def weights(self, *group):
        """Weights [d_out, d_in] whose outer scale is shared, rounded."""
        if self.kind == "high":
            return group
        if self.kind == "fp8":
            return tuple(fp8(weight) for weight in group)
        scale = weight_scale(*group).reshape(1, 1)
        return tuple(nvfp4(weight, scale) for weight in group)

    def product(self, x, weight, mask, bias=None):
        """x · weightᵀ for rows x [..., d_in]."""
        if self.kind in ("high", "w4a16"):
            return linear(x, weight, bias)
        if self.kind == "fp8":
            return linear(fp8(x), weight, bias)
        scale = row_scale(x)
        rounded = nvfp4(x, scale)
        product = linear(rounded, weight, bias)
        if self.kind == "w4a4_rac":
            residual = x - rounded
            if mask is not None:
                residual = residual * mask
            product = product + linear(nvfp4(residual, scale), weight)
        return product


class Linear(nn.Module):
    def __init__(self, side, weight, bias, mask):
        super().__init__()
        self.side, self.weight, self.bias, self.mask = side, weight, bias, mask

    def forward(self, x):
        return self.side.product(x, self.weight, self.mask, self.bias)


class Experts(nn.Module):
    """In the place of transformers' own, whose weights are stacks: gate_up_proj [experts, 2 · ff, d], down_proj."""

    def __init__(self, side, experts, masks):
        super().__init__()
        self.side, self.masks, self.activation = side, masks, experts.act_fn
        stacks = zip(experts.gate_up_proj, experts.down_proj)
        self.matrices = [(side.weights(*gate_up.chunk(2)), side.weights(down)[0]) for gate_up, down in stacks]

    def forward(self, x, chosen, gates):
        output = torch.zeros_like(x)
        for expert, ((gate, up), down) in enumerate(self.matrices):
            token, choice = torch.where(chosen == expert)
            rows = x[token]
            hidden = self.activation(self.side.product(rows, gate, self.masks[0]))
            hidden = hidden * self.side.product(rows, up, self.masks[0])
            result = self.side.product(hidden, down, self.masks[1])
            output.index_add_(0, token, result * gates[token, choice, None])
        return output


def load(folder, side):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    wrong = {kind: sorted(keys) for kind, keys in info.items() if keys}
    if wrong:
        sys.exit(f"{folder}: {wrong}")
    for number, layer in enumerate(model.model.layers):
        def mask(name):
            return None if side.masks is None else side.masks[f"layers.{number}.{name}"].to(torch.float32)

        attention = layer.self_attn
        for names, shared in (("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("o_proj",), "o_proj"):
            linears = [getattr(attention, name) for name in names]
            weights = side.weights(*(linear.weight for linear in linears))
            for name, before, weight in zip(names, linears, weights):
                setattr(attention, name, Linear(side, weight, before.bias, mask(f"self_attn.{shared}")))
        masks = mask("mlp.experts.gate_up_proj"), mask("mlp.experts.down_proj")
        layer.mlp.experts = Experts(side, layer.mlp.experts, masks)
    return model


def score(model, completions, temperature):
    """Log-probs of the completions' tokens, one after the other."""
    log_probs = []
    for start in range(0, len(completions), 128):
        batch = completions[start:start + 128]
        rows = [torch.tensor(c["prompt"] + c["completion"]) for c in batch]
        # Padding comes after everything that counts, and attention looks back.
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        table = (model(ids, use_cache=False).logits / temperature).log_softmax(-1)
        for c, row, tokens in zip(batch, table, rows):
            first = len(c["prompt"])
            log_probs.append(row[first - 1:len(tokens) - 1].gather(1, tokens[first:, None])[:, 0])
    return torch.cat(log_probs).double()


def flat(rows):
    """The f32 that the text stands for."""
    return torch.tensor([x for row in rows for x in row], dtype=torch.float32).double()


def check(folder):
    """Compares the pairings of one folder; how many agree and how many do not."""
    gap = json.loads((folder / "gap.json").read_text())
    if gap["routing_replay"]:
        sys.exit(f"{folder}: measured with routing replay, which is not repeated here")
    masks = load_file(folder / "residual_masks.safetensors")
    completions, pairings = gap["completions"], gap["pairings"]
    theirs = {}
    for precision in sorted({pairing[side] for pairing in pairings for side in ("trainer", "rollout")}):
        model = load(folder / "model", Side(precision, masks))
        theirs[precision] = score(model, completions, gap["temperature"])
    tokens = len(flat(pairings[0]["trainer_log_probs"]))
    print(f"\n{folder}: {len(completions)} completions, {tokens} tokens; all in nats")
    passed = failed = 0
    print(f"     {'log-probs of a side':36} {'differ by: mean':>16} {'largest':>10} {'over 0.001':>12}")
    for precision, log_probs in theirs.items():
        ours = next(flat(pairing[f"{side}_log_probs"]) for pairing in pairings for side in ("trainer", "rollout")
                    if pairing[side] == precision)
        apart = (ours - log_probs).abs()
        mark = "    "
        if Side(precision, masks).kind in ("high", "w4a16"):
            # Nothing is rounded on the way, so no last bit can become a step of a rounding.
            ok = apart.mean().item() <= NOTHING
            mark, passed, failed = "ok  " if ok else "FAIL", passed + ok, failed + (not ok)
        print(f"{mark} {precision:36} {apart.mean():16.1e} {apart.max():10.1e} {100 * (apart > 1e-3).double().mean():10.2f} %")
    print(f"     {'gap of a pairing':28} {'ours':>10} {'theirs':>10} {'means differ':>14} {'tokens differ':>14}")
    for pairing in pairings:
        ours = flat(pairing["rollout_log_probs"]) - flat(pairing["trainer_log_probs"])
        other = theirs[pairing["rollout"]] - theirs[pairing["trainer"]]
        apart = (ours - other).abs()
        mean, other_mean = ours.abs().mean().item(), other.abs().mean().item()
        if abs(mean - pairing["mean"]) > 1e-12 + 1e-9 * mean:
            sys.exit(f"{folder}: {pairing['pairing']}: mean {pairing['mean']}, but its log-probs say {mean}")
        if pairing["trainer"] == pairing["rollout"]:
            ok = max(mean, other_mean, apart.mean().item()) <= NOTHING
            shares = "", ""
        else:
            shares = [abs(other_mean - mean) / (mean or 1), apart.mean().item() / (mean or 1)]
            # Next to no gap is no measurement.
            ok = shares[0] <= TOLERANCE and shares[1] <= OF_TOKENS and mean > 100 * NOTHING
            shares = [f"{100 * share:.3f} %" for share in shares]
        passed, failed = passed + ok, failed + (not ok)
        print(f"{'ok  ' if ok else 'FAIL'} {pairing['pairing']:28} {mean:10.6f} {other_mean:10.6f} {shares[0]:>14} {shares[1]:>14}")
    return passed, failed


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        counts = [check(pathlib.Path(folder)) for folder in sys.argv[1:]]
    passed, failed = (sum(count) for count in zip(*counts)) if counts else (0, 0)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0 or passed == 0)


main()
