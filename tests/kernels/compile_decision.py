"""Compile the kernels of the decision message for sm_90a, without a GPU, and print facts of the code as JSON.

A program of its own: Triton's interpreter, which the tests run under, is chosen when Triton is imported.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from baton.kernels.sampling import decision
from baton.tests.kernels.compile_kv_move import CUOBJDUMP

TARGET = GPUTarget("cuda", 90, 32)


def facts(kernel, pointers, constants, num_warps):
    """Of the binary for these pointers' types; nothing else is specialized on."""
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, pointers.get(name.rstrip("_0123456789"), "i32"))
        for name in kernel.arg_names
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, {}),
        target=TARGET,
        options={"num_warps": num_warps},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {
        "specializations": len(specializations(kernel, signature, list(constants.values()))),
        "target": re.findall(r"\.target (\S+)", compiled.asm["ptx"])[0],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "registers": int(re.findall(r"REG:(\d+)", usage.stdout + usage.stderr)[0]),
        "barriers": len(re.findall(r"\bBAR\.SYNC", sass)),
        "atomics": len(re.findall(r"\b(?:ATOM|RED)G?\b", sass)),
        "loads_at_once": len(re.findall(r"\bLDG\b", re.split(r"\bBRA\b", sass)[0])),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4}\*/", sass, re.MULTILINE)),
    }


class Pointer:
    """Memory, as Triton's launcher sees a tensor."""

    def __init__(self, address, dtype):
        self.dtype = dtype
        self._address = address

    def data_ptr(self):
        return self._address


def specializations(kernel, signature, constants):
    """What launches with memory of any alignment and with any numbers ask for: each would be compiled in some step."""
    bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(TARGET))
    dtypes, found = {"*i32": torch.int32, "*i64": torch.int64}, set()
    for address in (1024, 24, 8):
        for number in (0, 1, 16, 7):
            kinds = [kind for kind in signature.values() if kind != "constexpr"]
            arguments = [Pointer(address, dtypes[kind]) if kind in dtypes else number for kind in kinds]
            found.add(str(bind(*arguments, *constants)[1]))
    return found


def main():
    """Print the facts of both, and of the first with tensors of two types."""
    sizes = {"F": decision.FIRST, "R": decision.ROWS}
    messages = {"own": "*i32", "decided": "*i32", "values": "*i64", "result": "*i64"}
    found = {
        f"pack {word}": facts(decision._pack_kernel, {**messages, "words": word}, sizes, decision.PACK_WARPS)
        for word in ("*i64", "*i32")
    }
    found["compare"] = facts(decision._compare_kernel, messages, {"C": decision.COMPARED}, decision.COMPARE_WARPS)
    json.dump({"triton": triton.__version__, "kernels": found}, sys.stdout)


if __name__ == "__main__":
    main()
