"""On a GPU: after the warm-up no kernel is compiled, nor loaded, whatever lengths and parameters requests have."""

import pytest
import torch

from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.numerics import KVDtype, Numerics, Quantization
from baton.engine.local import LocalEngine
from baton.kernels.compiles import Compiles
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.engine.kernel_asked import ASKED
from baton.tests.engine.toy_engine import letters_tokenizer, request_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
VOCAB = 4096
WIDE_VOCAB = 40_000  # a head unlike any other GEMM
LENGTHS = (1, 17, 64, 300, 1030, 1500)


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize(
    ("numerics", "quantization"),
    [
        (Numerics.DEFAULT, Quantization.NONE),
        (Numerics.DEFAULT, Quantization.FP8),
        (Numerics.INVARIANT, Quantization.NONE),
        (Numerics.INVARIANT, Quantization.FP8),
    ],
)
def test_nothing_is_compiled_after_the_warm_up(numerics, quantization, graphs, tmp_path):
    from triton import knobs

    vocab_size = VOCAB if numerics is Numerics.DEFAULT else WIDE_VOCAB
    with_fp8_kv = (numerics, quantization) == (Numerics.DEFAULT, Quantization.FP8)
    sizes = {"num_hidden_layers": 2, "vocab_size": vocab_size, "eos_token_id": 500, "max_position_embeddings": 2048}
    model = load_model(
        write_shape("qwen3-0.6b", tmp_path, **sizes),
        dtype=torch.bfloat16,
        device=CUDA,
        numerics=numerics,
        with_mtp=True,
        random_seed=3,
        quantization=quantization,
        kv_dtype=KVDtype.FP8 if with_fp8_kv else KVDtype.AUTO,
    )
    compiles = Compiles()
    compiles.listen()
    try:
        engine = LocalEngine(
            model,
            letters_tokenizer(eos_token_ids=(500,), size=vocab_size),
            num_blocks=1024,
            block_size=16,
            num_draft_tokens=2,
            chunk_len=512,
            max_num_sequences=6,
            graphs=CudaGraphConfig(mode=graphs),
        )
        compiles.serve()
        for round_number, length in enumerate(LENGTHS):
            kinds = ASKED[round_number % len(ASKED) :] + ASKED[: round_number % len(ASKED)]
            prompts = [[7 + place] * (length + place) for place in range(len(kinds))]
            requests = [request_of(p, max_tokens=6, **kind) for p, kind in zip(prompts, kinds, strict=True)]
            engine.generate(requests)
    finally:
        knobs.runtime.kernel_load_end_hook.remove(compiles.loaded)
    assert compiles.late == ()
