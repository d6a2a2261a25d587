#!/usr/bin/env python3
"""Lets PyTorch's wheel run on a CPU without its 3 GB of CUDA packages.

usage: cuda_stubs.py SITE_PACKAGES OUT_DIR      then LD_LIBRARY_PATH=OUT_DIR python …

The wheel names CUDA's libraries as dependencies even where no GPU is ever used. This makes an empty stand-in for each
that is missing, in which every symbol exists that PyTorch asks for.
"""
import pathlib
import re
import subprocess
import sys

site, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)


def result(name):
    """What a stand-in returns: there is no device (100), except where PyTorch asks without one."""
    if re.search(r"Error(String|Name)", name):
        return '"this CUDA is a stand-in"'
    # Kernels are registered while PyTorch is loaded; no graph is ever being captured.
    quiet = name.startswith("__cuda") or name == "cudaStreamIsCapturing"
    return f"(const void *){0 if quiet else 100}"


libraries = sorted((site / "torch" / "lib").glob("*.so"))


def readelf(option, path):
    return subprocess.run(["readelf", "-W", option, str(path)], check=True, capture_output=True, text=True).stdout


ours = {path.name for path in libraries}
system = re.compile(r"ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp|gfortran|quadmath)(-[0-9a-f]+)?\.so")
missing = set()
# Library -> version -> symbols; those without a version may come from any library, and the first one gets them.
symbols, unversioned = {}, set()
for path in libraries:
    missing |= {name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", path)) if not system.match(name)}
    library, home = None, {}
    for file, version in re.findall(r"File: (\S+)|Name: (\S+)", readelf("-V", path)):
        library = file or library
        home.setdefault(version, library)
    undefined = readelf("--dyn-syms", path)
    for name, version in re.findall(r" UND (\S+?)@(\S+)", undefined):
        symbols.setdefault(home.get(version), {}).setdefault(version, set()).add(name)
    unversioned |= set(re.findall(r" UND ((?:cu|nccl|nv)\w+)$", undefined, re.M))

for soname in sorted(missing - ours):
    versions = symbols.get(soname, {})
    names = unversioned.union(*versions.values())
    unversioned = set()
    lines = [f"const void *{name}(void) {{ return {result(name)}; }}" for name in sorted(names)]
    (out / "stub.c").write_text("\n".join(lines) + "\n")
    script = "".join(f"{v} {{ global: {' '.join(n + ';' for n in sorted(names))} }};\n" for v, names in versions.items())
    (out / "stub.map").write_text(script)
    command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", "-o", str(out / soname), str(out / "stub.c")]
    subprocess.run(command + ([f"-Wl,--version-script={out / 'stub.map'}"] if script else []), check=True)
