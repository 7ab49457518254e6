"""An engine on a GPU from nothing to ready, as one JSON line: what was compiled ahead, and what its launches compiled.

TRITON_CACHE_DIR=folder python -P -m baton.tests.gpu.first_start qwen3.5-35b-a3b 4    # layers
"""

import json
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from triton import knobs

from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.numerics import Numerics
from baton.engine.local import LocalEngine
from baton.kernels import compile_ahead
from baton.kernels.implementation import Implementation
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.engine.toy_engine import letters_tokenizer

SIZES = {"vocab_size": 4096, "eos_token_id": 500, "max_position_embeddings": 4096}


def main(shape, num_layers):
    """Load, start, tell."""
    lines, found = [], {True: Counter(), False: Counter()}
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    compile_ahead.log.addHandler(handler)
    compile_ahead.log.setLevel(logging.INFO)

    def listen(*, src, metadata, metadata_group, times, cache_hit):
        found[cache_hit][src.name] += 1

    knobs.compilation.listener = listen
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(
            write_shape(shape, Path(folder), **SIZES, num_hidden_layers=num_layers),
            dtype=torch.bfloat16,
            device=torch.device("cuda", 0),
            numerics=Numerics.DEFAULT,
            with_mtp=True,
            random_seed=3,
            implementation=Implementation.TRITON,
        )
    start_s = time.monotonic()
    LocalEngine(
        model,
        letters_tokenizer(eos_token_ids=(500,), size=SIZES["vocab_size"]),
        num_blocks=1024,
        block_size=16,
        num_draft_tokens=2,
        chunk_len=512,
        max_num_sequences=6,
        graphs=CudaGraphConfig(sizes=(1, 6)),
    )
    torch.cuda.synchronize()
    start_s = time.monotonic() - start_s
    print(json.dumps({"start_s": start_s, "compiled": found[False], "loaded": found[True].total(), "lines": lines}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
