"""Compiles the shipped launches for GPUs that need not be there; run as a program by test_aot.py.

    python tests/kernels/ahead_of_time.py [--arch 90] [--only NAME] [--processes 2]

Prints one JSON object per compiled launch: name, arch, registers, stack bytes, shared memory,
whether the SASS contains HGMMA. A process of its own, because Triton decides at import whether @jit
interprets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NOUNS = ("layer_norm", "attention", "feed_forward")


def specialise(launch):
    """Signature, constants and attributes that a real launch with these arguments would compile."""
    import torch

    names = {
        torch.float32: "*fp32",
        torch.float16: "*fp16",
        torch.bfloat16: "*bf16",
        torch.int32: "*i32",
        torch.int64: "*i64",
        torch.uint8: "*u8",
    }
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = names[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def cuobjdump(option, cubin):
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), option, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_one(job):
    """Compiles launch number `index` of `noun` for `arch`; a dictionary of what came out."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    noun, index, arch = job
    launch = list(importlib.import_module(f"fastbert.kernels.{noun}").shipped_launches())[index]
    signature, constants, attributes = specialise(launch)
    result = {"name": launch.name, "index": index, "arch": arch, "warps": launch.num_warps}
    result["dtype"] = next(iter(sorted(set(signature.values()) & {"*fp16", "*bf16"})), "*fp32")
    result["constants"] = {
        key: value
        for key, value in constants.items()
        if isinstance(value, (bool, int, str)) and not key.startswith("stride")
    }
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = cuobjdump("-res-usage", cubin)
        result["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
        result["stack"] = int(re.search(r"STACK:(\d+)", usage)[1])
        result["shared"] = compiled.metadata.shared
        result["hgmma"] = arch == 90 and "HGMMA" in cuobjdump("--dump-sass", cubin)
        result["tf32"] = "tf32" in compiled.asm["ptx"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, nargs="*", default=[80, 90, 100])
    parser.add_argument("--noun", nargs="*", default=list(NOUNS))
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("TRITON_INTERPRET: got 1, allowed: unset, nothing compiles in the interpreter")
    jobs = []
    for noun in options.noun:
        launches = importlib.import_module(f"fastbert.kernels.{noun}").shipped_launches()
        for index, launch in enumerate(launches):
            if options.only in launch.name:
                jobs += [(noun, index, arch) for arch in options.arch]
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for result in pool.imap(compile_one, jobs):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
