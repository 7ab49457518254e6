"""Compile every variant of every kernel ahead of time, without a GPU, and hold the code against a committed table.

    python -P -m baton.tests.kernels.sass              # print the facts as JSON, for sm_90a, and broken promises
    python -P -m baton.tests.kernels.sass --changed    # compile only what is not as it was when the table was written
    python -P -m baton.tests.kernels.sass --amd        # only that all compile for gfx942
    python -P -m baton.tests.kernels.sass --accept     # write the table of this version of Triton
    python -P -m baton.tests.kernels.sass --only PART  # of variants whose name has PART in it

With another version of Triton, which has its own part of the table:

    pip install --no-deps --target FOLDER triton==3.6.0
    PYTHONPATH=FOLDER:$PYTHONPATH python -P -m baton.tests.kernels.sass --accept

A program of its own: Triton's interpreter, which the tests run under, is chosen when Triton is imported.
"""

import argparse
import hashlib
import importlib
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

import baton

HOPPER = GPUTarget("cuda", 90, 32)
AMD = GPUTarget("hip", "gfx942", 64)
TABLE = Path(__file__).with_name("sass_table.json")
PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CUOBJDUMP, NVDISASM = PROGRAMS / "cuobjdump", PROGRAMS / "nvdisasm"
INSTRUCTION_BYTES = 16
COUNTED = ("HGMMA", "QGMMA", "HMMA", "LDGSTS", "UTMALDG", "UBLKCP", "USETMAXREG", "LDL", "STL", "RED", "ATOMG")


def all_variants():
    """Of every module of the package that has any, in order of names."""
    package = Path(baton.__file__).parent / "kernels"
    paths = [path.relative_to(package.parent).with_suffix("") for path in sorted(package.rglob("*_triton.py"))]
    modules = [importlib.import_module(".".join(("baton", *path.parts))) for path in paths]
    variants = [variant for module in modules for variant in module.variants()]
    names = [variant.name for variant in variants]
    assert len(names) == len(set(names)), "two variants have one name"
    return variants


def source_of(variant):
    """What a variant is compiled from."""
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = GluonASTSource if variant.kernel.is_gluon() else ASTSource
    return source(variant.kernel, signature, dict(variant.constants), attributes)


def compile_for(variant, target, num_warps=None):
    options = {"num_warps": num_warps or variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    return triton.compile(source_of(variant), target=target, options=options)


def source_hash(variant):
    """The same for the same code: of the kernel and all that it calls, types, constants and options.

    With one version of Triton, which brings its own ptxas, the same is compiled to the same.
    """
    options = [variant.num_warps, variant.num_stages, sorted(variant.options.items())]
    return hashlib.sha256(f"{source_of(variant).hash()} {options}".encode()).hexdigest()[:16]


def code_of(cubin):
    """What a cubin, which is an ELF file, has in its sections of code."""
    at, size, num_sections, names = struct.unpack_from("<Q10xHHH", cubin, 40)
    sections = [struct.unpack_from("<I20xQQ", cubin, at + size * index) for index in range(num_sections)]
    name_at = sections[names][1]
    code = [section for section in sections if cubin.startswith(b".text.", name_at + section[0])]
    assert code, "no code"
    return b"".join(cubin[begin : begin + length] for _, begin, length in code)


def disassembled(codes):
    """The text of each. All at once: nvdisasm takes a quarter of a second before its first instruction."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        done = subprocess.run([NVDISASM, "-b", "SM90a", file.name], capture_output=True, text=True, check=True)
    lines = re.findall(r"/\*([0-9a-f]+)\*/(.*)", done.stdout)
    assert [int(at, 16) for at, _ in lines] == list(range(0, sum(map(len, codes)), INSTRUCTION_BYTES))
    texts = iter(text for _, text in lines)
    return ["\n".join(islice(texts, len(code) // INSTRUCTION_BYTES)) for code in codes]


def num_registers(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.findall(r"REG:(\d+)", text.stdout + text.stderr)[0])


def waits_for_copies(sass):
    """Whether copies to shared memory are in groups, or arrive at barriers: others are waited for by nothing."""
    return "LDGSTS" not in sass or "LDGDEPBAR" in sass or "LDGSTSBAR" in sass


def facts(variant, compiled, sass):
    """What the code for Hopper has: counts of instructions, registers, shared memory."""
    names = *COUNTED, *(name for name in variant.lacks if name not in COUNTED)
    counts = Counter(re.findall(rf"\b(?:{'|'.join(names)})\b", sass))
    # Only where they are promised: which there are is a matter of tiles, and for most kernels nobody's concern.
    shapes = sorted(set(re.findall(r"\b[HQ]GMMA\.(\d+x\d+x\d+)", sass))) if variant.shapes else []
    return {
        **{name: counts[name] for name in names if counts[name]},
        **({"shapes": shapes} if shapes else {}),
        **({} if waits_for_copies(sass) else {"unwaited": True}),
        "source": source_hash(variant),
        "registers": num_registers(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
    }


def facts_of_all(variants):
    """By name."""
    if not variants:
        return {}
    with ThreadPoolExecutor(2) as pool:  # ptxas is a process of its own
        compiled = list(pool.map(lambda variant: compile_for(variant, HOPPER), variants))
    texts = disassembled([code_of(each.asm["cubin"]) for each in compiled])
    return {variant.name: facts(variant, *made) for variant, *made in zip(variants, compiled, texts, strict=True)}


def broken_promises(variant, found):
    """What a variant promises and its code does not keep."""
    spills = () if variant.may_spill else ("LDL", "STL")
    broken = [f"has no {name}" for name in variant.contains if not found.get(name)]
    broken += [f"has {found[name]} {name}" for name in (*spills, *variant.lacks) if found.get(name)]
    if found.get("unwaited"):
        broken.append("copies to shared memory without a group, so that nothing waits for the copies")
    if variant.shapes and found.get("shapes") != sorted(variant.shapes):
        broken.append(f"multiplies by {found.get('shapes')}, not by {sorted(variant.shapes)}")
    if found["registers"] > variant.max_registers:
        broken.append(f"takes {found['registers']} registers of {variant.max_registers}")
    if found["shared_bytes"] > variant.max_shared_bytes:
        broken.append(f"takes {found['shared_bytes']} bytes of shared memory of {variant.max_shared_bytes}")
    return broken


def main():
    assert not triton.knobs.runtime.interpret, "nothing is compiled with TRITON_INTERPRET=1"
    parser = argparse.ArgumentParser()
    parser.add_argument("--amd", action="store_true")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--accept", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    variants = [variant for variant in all_variants() if options.only in variant.name]
    if options.amd:
        for variant in variants:
            if variant.on_amd:
                compile_for(variant, AMD)
        json.dump({"triton": triton.__version__, "kernels": [v.name for v in variants if v.on_amd]}, sys.stdout)
        return
    known = json.loads(TABLE.read_text()).get(triton.__version__, {}) if options.changed else {}
    known = {v.name: known[v.name] for v in variants if known.get(v.name, {}).get("source") == source_hash(v)}
    found = known | facts_of_all([variant for variant in variants if variant.name not in known])
    broken = {variant.name: broken_promises(variant, found[variant.name]) for variant in variants}
    if options.accept:
        table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        table[triton.__version__] = {**table.get(triton.__version__, {}), **found}
        kept = {variant.name for variant in all_variants()}
        table[triton.__version__] = {
            name: table[triton.__version__][name] for name in sorted(kept & {*table[triton.__version__]})
        }
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    json.dump(
        {"triton": triton.__version__, "kernels": found, "broken": {k: v for k, v in broken.items() if v}}, sys.stdout
    )


if __name__ == "__main__":
    main()
