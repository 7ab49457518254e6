"""Compile the kernel of kv_scatter and kv_digest for sm_90a, without a GPU, and print facts of the code as JSON.

A program of its own: Triton's interpreter, which the tests run under, is chosen when Triton is imported.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.kernels.kv.scatter import Tuning
from baton.kernels.kv.scatter_triton import ALIGNED, TYPES, move_kernel, tile_of
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def facts(*, from_size: int, to_size: int, copy: bool, digest: bool, row_len: int = 128) -> dict[str, object]:
    """Of one specialization."""
    shapes = []
    for size in (from_size, to_size):
        layout = KVLayout.of_attention(
            model_hash="m", num_layers=2, num_kv_heads=8, head_dim=row_len, block_size=size, dtype="bfloat16"
        )
        shapes.append(PoolGeometry(layout, 8).layer(0))
    constants = tile_of(shapes[0], shapes[1], 16, Tuning(16))
    num_warps = constants.pop("num_warps")
    constants |= {"COPY": copy, "DIGEST": digest}
    names = move_kernel.arg_names
    signature = {name: TYPES.get(name, "constexpr") for name in names}
    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in ALIGNED}
    compiled = triton.compile(
        ASTSource(move_kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps},
    )
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {
        "wide_loads": len(re.findall(r"\bLDG\.E\.128", sass)),
        "wide_stores": len(re.findall(r"\bSTG\.E\.128", sass)),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "registers": int(re.findall(r"REG:(\d+)", usage.stdout + usage.stderr)[0]),
        "release": sorted(set(re.findall(r"\batom\S*acq_rel\S*", ptx))),
        "flag": re.findall(r"st\.relaxed\.sys\.global\.u64", ptx),
        "fence": re.findall(r"fence\.acq_rel\.sys", ptx),
        "shared_bytes": compiled.metadata.shared,
    }


def main() -> None:
    """Print the facts of the specializations that matter."""
    found = {
        f"{name} {from_size} {to_size}": facts(
            from_size=from_size, to_size=to_size, copy=name != "digest", digest=name != "plain"
        )
        for name, from_size, to_size in (
            ("scatter", 16, 16),
            ("scatter", 16, 64),
            ("plain", 64, 64),
            ("digest", 16, 16),
        )
    }
    json.dump({"triton": triton.__version__, "kernels": found}, sys.stdout)


if __name__ == "__main__":
    main()
