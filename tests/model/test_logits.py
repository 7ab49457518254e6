"""Logits equal transformers', however the prompt is cut and whether rows run as prefill or decode.

Legend: T tokens, B sequences, Q rows of each.
"""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.tests.model.harness import Paged, prompt

CONFIGURATIONS = {
    "dense, tied, group 1": {"kind": "qwen3", "tie": True, "num_heads": 4, "num_kv_heads": 4},
    "dense, untied, group 4": {"kind": "qwen3", "tie": False, "num_heads": 8, "num_kv_heads": 2},
    "moe, tied, group 2": {"kind": "qwen3_moe", "tie": True, "num_heads": 4, "num_kv_heads": 2},
    "moe, untied, group 8": {"kind": "qwen3_moe", "tie": False, "num_heads": 8, "num_kv_heads": 1},
    "moe, dense layer, probabilities kept": {
        "kind": "qwen3_moe",
        "layers": 3,
        "overrides": {"norm_topk_prob": False, "mlp_only_layers": [1]},
    },
    "moe, every second layer": {"kind": "qwen3_moe", "layers": 4, "overrides": {"decoder_sparse_step": 2}},
}
DTYPES = (torch.float32, torch.float64)
QUICK = ("moe, tied, group 2", torch.float64)
CASES = [
    pytest.param(name, dtype, id=f"{name}, {dtype}", marks=[pytest.mark.fast] if (name, dtype) == QUICK else [])
    for name in CONFIGURATIONS
    for dtype in DTYPES
]
PROMPT_LEN = 90


@pytest.mark.long
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_prefill_in_any_chunks(name, dtype, numerics, tiny_checkpoint, load, reference, check_logits):
    path = tiny_checkpoint(**CONFIGURATIONS[name])
    model = load(path, dtype, numerics)
    ids = prompt(PROMPT_LEN)
    wanted = reference(path, dtype).logits(ids)
    assert wanted.std() > 0.3  # else the tolerance says nothing
    for chunk_len in (None, 1, 7, 16, 48):
        paged = Paged(model)
        logits = paged.logits(paged.prefill(ids, chunk_len=chunk_len))
        check_logits("trunk", logits, wanted)


@pytest.mark.long
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_decode_rows(name, dtype, numerics, tiny_checkpoint, load, reference, check_logits):
    """Two sequences of different length and a padding one; of Q rows the last may be garbage."""
    path = tiny_checkpoint(**CONFIGURATIONS[name])
    model = load(path, dtype, numerics)
    prompts = [prompt(75, seed=1), prompt(33, seed=2)]
    wanted = [reference(path, dtype).logits(ids) for ids in prompts]
    for num_rows, num_real in ((1, 1), (2, 2), (3, 2), (4, 4), (5, 3)):
        paged = Paged(model, num_sequences=2)
        starts = [len(ids) - num_real for ids in prompts]
        for sequence, ids in enumerate(prompts):
            paged.prefill(ids[: starts[sequence]], sequence=sequence)
        batch = paged.decode_batch([1, None, 0], [starts[1], 0, starts[0]], num_rows, num_real=num_real, bound=150)
        garbage = prompt(num_rows, seed=3)
        rows = [torch.cat([prompts[s][starts[s] :], garbage[num_real:]]) for s in (1, 0)]
        hidden = paged.trunk(torch.stack([rows[0], garbage, rows[1]]), batch)
        logits = paged.logits(hidden).unflatten(0, (3, num_rows))[:, :num_real]
        for row, sequence in ((0, 1), (2, 0)):
            check_logits("trunk", logits[row], wanted[sequence][starts[sequence] :])


def test_several_prompts_in_one_batch(tiny_checkpoint, load, reference, check_logits):
    path = tiny_checkpoint(**CONFIGURATIONS["moe, tied, group 2"])
    paged = Paged(load(path, torch.float64), num_sequences=3)
    prompts = [prompt(length, seed=length) for length in (20, 64, 41)]
    paged.prefill(prompts[1][:30], sequence=1)
    parts = [(0, 0, 20), (1, 30, 64), (2, 0, 41)]
    hidden = paged.trunk(torch.cat([prompts[s][start:end] for s, start, end in parts]), paged.prefill_batch(parts))
    wanted = torch.cat([reference(path, torch.float64).logits(prompts[s])[start:end] for s, start, end in parts])
    check_logits("trunk", paged.logits(hidden), wanted)


@pytest.mark.fast
def test_each_layer_is_announced_once_after_its_kv_is_there(tiny_checkpoint, load):
    model = load(tiny_checkpoint(), torch.float32)
    paged = Paged(model)
    ids = prompt(20)
    written = []

    def on_layer(layer):
        keys, values = paged.pool.layer(layer)
        written.append(
            (layer, not keys[paged.table[0, :1]].isnan().any(), not values[paged.table[0, :1]].isnan().any())
        )

    batch = paged.prefill_batch([(0, 0, 20)])
    with torch.inference_mode():
        hidden = model.trunk(ids, batch, paged.pool, on_layer)
        model.mtp(ids, hidden, batch, paged.pool, on_layer)
    assert written == [(layer, True, True) for layer in range(model.config.num_layers + 1)]


@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_block_size_makes_no_difference(numerics, tiny_checkpoint, load):
    model = load(tiny_checkpoint(), torch.float64, numerics)
    ids = prompt(70)
    results = []
    for block_size in (16, 32, 64):
        paged = Paged(model, block_size=block_size)
        results.append(paged.logits(paged.prefill(ids, chunk_len=33)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_bfloat16_logits_are_float32_and_near(tiny_checkpoint, load, reference):
    path = tiny_checkpoint(**CONFIGURATIONS["dense, tied, group 1"], dtype=torch.bfloat16)
    paged = Paged(load(path, torch.bfloat16))
    ids = prompt(40)
    logits = paged.logits(paged.prefill(ids))
    assert logits.dtype == torch.float32
    assert (logits - reference(path, torch.float32).logits(ids)).abs().max() < 0.15
