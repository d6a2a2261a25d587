#!/usr/bin/env python3
"""Times cuBLAS BF16 and cuBLASLt FP8 on the shapes of kernel_bench, by the same protocol, and prints JSON.

(t(250) - t(50)) / 200, both queued behind a spinning kernel, the median of seven; weights rotate over 256 MiB. FP8 takes 16
rows at least.
"""
import json
import statistics
import sys
import time

import torch

LONG, SHORT, ROTATION = 250, 50, 256 << 20
SHAPES = [(m, n, n) for n in (8192, 4096) for m in (1, 4, 8, 16)] + [(m, 4096, 4096) for m in (64, 512, 4096)]


def run(call, count, spin_cycles):
    torch.cuda.synchronize()
    start = time.perf_counter()
    if spin_cycles:
        torch.cuda._sleep(spin_cycles)
    for i in range(count):
        call(i)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def microseconds(call):
    run(call, SHORT, 0)
    # The clock is at most 2 GHz.
    spin = int((1.5 * run(call, LONG, 0) + 1e-3) * 2e9)
    differences = []
    for _ in range(7):
        short = run(call, SHORT, spin)
        differences.append(run(call, LONG, spin) - short)
    return statistics.median(differences) * 1e6 / (LONG - SHORT)


def bf16(m, n, k):
    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(max(2, ROTATION // (2 * n * k)))]
    x, y = torch.randn(m, k, device="cuda").bfloat16(), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return microseconds(lambda i: torch.mm(x, weights[i % len(weights)].t(), out=y))


def fp8(m, n, k):
    kind, one = torch.float8_e4m3fn, torch.ones((), device="cuda")
    weights = [torch.randn(n, k, device="cuda").to(kind) for _ in range(max(2, ROTATION // (n * k)))]
    x, y = torch.randn(m, k, device="cuda").to(kind), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    call = lambda i: torch._scaled_mm(
        x, weights[i % len(weights)].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, out=y
    )
    return microseconds(call)


def main():
    result = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "bf16": [], "fp8": []}
    for m, n, k in SHAPES:
        for name, call in (("bf16", bf16), ("fp8", fp8)):
            if name == "fp8" and m < 16:
                continue
            us = call(m, n, k)
            result[name].append({"tokens": m, "rows": n, "k": k, "us": us})
            print(f"{name} {m} x {n} x {k}: {us:.2f} us", file=sys.stderr)
    print(json.dumps(result))


main()
