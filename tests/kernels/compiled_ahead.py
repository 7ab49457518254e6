"""Kernels compiled ahead into Triton's cache, and compiled again as launches do: a process of its own, one JSON line.

    TRITON_CACHE_DIR=folder python -P -m baton.tests.kernels.compiled_ahead PROCESSES

The forms are those that a small model's warm-up asks for on a Hopper GPU that is not there; of each kernel the first
alone is compiled, the slow ones left out. What launches would compile is what Triton says that it did not find.
"""

import json
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from baton.kernels import compile_ahead
from baton.kernels.dry_run import forms_of
from baton.tests.engine import kernel_launches

SLOW = {"_bounds_kernel", "_prefill_kernel", "prefill_kernel", "scan_kernel", "_decide_kernel"}


def wanted(forms):
    """The first of each kernel."""
    first = {}
    for form in forms:
        if form.name not in SLOW:
            first.setdefault(form.name, form)
    return list(first.values())


def launch_compiles(work, names):
    """The work, where Triton compiles those kernels as it launches; those that were not in its cache, and that were."""
    found = {True: [], False: []}

    def listen(*, src, metadata, metadata_group, times, cache_hit):
        found[cache_hit].append(src.name)

    stub = JITFunction._do_compile

    def compile(self, key, signature, device, constants, options, attributes, warmup):
        if self.fn.__name__ in names:
            source = self.ASTSource(self, signature, constants, attributes)
            self.compile(source, target=self.device_caches[device][2], options=options.__dict__)
            names.remove(self.fn.__name__)
        return stub(self, key, signature, device, constants, options, attributes, warmup)

    JITFunction._do_compile, knobs.compilation.listener = compile, listen
    try:
        work()
    finally:
        JITFunction._do_compile, knobs.compilation.listener = stub, None
    return found[False], found[True]


def broken(form):
    """What no compiler takes: a range of three."""
    return replace(form, constants={place: 3 if type(it) is int else it for place, it in form.constants.items()})


def elsewhere(forms):
    """How many are in the cache for a process that meets them the other way round."""
    code = (
        "import pickle, sys; forms = pickle.load(sys.stdin.buffer); "
        "print(sum([form.is_cached() for form in reversed(forms)]))"
    )
    command = [sys.executable, "-P", "-c", code]
    return int(subprocess.run(command, input=pickle.dumps(forms), check=True, stdout=subprocess.PIPE).stdout)


def main(num_processes):
    """What came of it."""
    torch.set_num_threads(1)
    kernel_launches.stub()
    shape, sizes, options, num_drafts, verification = kernel_launches.MODELS["dense"]
    with tempfile.TemporaryDirectory() as folder:
        model = kernel_launches.load(shape, sizes, options, folder)
    limits = kernel_launches.Limits(context_len=512, chunk_len=64, seqs=2)
    server = kernel_launches.Server(model, num_drafts, verification, "dense", limits, None)
    reach = kernel_launches.Reach(num_tokens=64, num_sequences=2, context_len=512)

    def warm_up():
        server.runner.warm_up(reach)

    kernel_launches.forget()
    forms = wanted(forms_of(warm_up))
    missing = [form.name for form in forms if not form.is_cached()]
    start_s = time.monotonic()
    compile_ahead.compile_all([*forms, broken(forms[0])], num_processes)
    wall_s = time.monotonic() - start_s
    compiled, loaded = launch_compiles(warm_up, {form.name for form in forms})
    server.runner.close()
    found = {"missing": missing, "compiled": compiled, "loaded": loaded, "wall_s": round(wall_s, 1)}
    found["broken"] = broken(forms[0]).is_cached()
    found["elsewhere"] = elsewhere(forms)
    print(json.dumps({"triton": triton.__version__, **found}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
