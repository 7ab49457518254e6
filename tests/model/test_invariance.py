"""Invariant numerics, bit for bit: chunks, neighbours, places in the batch, bounds, threads, prefill or decode."""

from contextlib import contextmanager

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.gemm import inner_sum, linear
from baton.kernels.moe import moe
from baton.kernels.selftest import check_invariance
from baton.tests.model.harness import Paged, prompt

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SHAPES = {
    "dense, group 4": {"kind": "qwen3", "num_heads": 8, "num_kv_heads": 2, "tie": False},
    "moe, group 2": {"kind": "qwen3_moe"},
    "moe, shared expert": {"kind": "qwen2_moe"},
    # Wide enough that MKL splits rows and inner sizes between threads.
    "moe, wide": {"kind": "qwen3_moe", "hidden_size": 640, "head_dim": 64, "num_heads": 8, "vocab_size": 1000},
}
MARKS = {("moe, group 2", torch.float32): pytest.mark.fast, ("moe, wide", torch.float64): pytest.mark.slow}
CASES = [
    pytest.param(
        name,
        dtype,
        id=f"{name}, {dtype}",
        marks=MARKS.get((name, dtype), ()),
    )
    for name in SHAPES
    for dtype in DTYPES
]
PROMPT_LEN = 100


@contextmanager
def threads(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def alone(tiny_checkpoint, load):
    """Model, prompt, and the logits and MTP logits of the prompt in one piece, one thread."""

    def make(name, dtype):
        model = load(tiny_checkpoint(**SHAPES[name]), dtype, Numerics.INVARIANT)
        ids = prompt(PROMPT_LEN)
        paged = Paged(model)
        with threads(1):
            hidden = paged.prefill(ids)
            out = paged.mtp(ids[1:], hidden[:-1], paged.prefill_batch([(0, 0, PROMPT_LEN - 1)]))
            return model, ids, hidden, paged.logits(hidden), paged.logits(out)

    return make


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.long
def test_chunks_and_neighbours_in_prefill(name, dtype, num_threads, alone):
    model, ids, hidden, logits, drafts = alone(name, dtype)
    with threads(num_threads):
        for chunk_len in (7, 16, 48):
            paged = Paged(model)
            assert torch.equal(paged.logits(paged.prefill(ids, chunk_len=chunk_len)), logits), chunk_len
        paged = Paged(model, num_sequences=3)
        others = [prompt(57, seed=8), None, prompt(83, seed=9)]
        paged.prefill(ids[:45], sequence=1)
        parts = [(0, 0, 57), (1, 45, PROMPT_LEN), (2, 0, 83)]
        batch = paged.prefill_batch(parts)
        rows = slice(57, 57 + PROMPT_LEN - 45)
        mixed = paged.trunk(torch.cat([others[0], ids[45:], others[2]]), batch)
        assert torch.equal(mixed[rows], hidden[45:])
        assert torch.equal(paged.logits(mixed)[rows], logits[45:])
        paged = Paged(model)
        out = [
            paged.mtp(ids[s + 1 : e + 1], hidden[s:e], paged.prefill_batch([(0, s, e)]))
            for s, e in ((0, 30), (30, 31), (31, PROMPT_LEN - 1))
        ]
        assert torch.equal(paged.logits(torch.cat(out)), drafts)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.long
def test_decode_equals_prefill(name, dtype, num_threads, alone):
    model, ids, _, logits, drafts = alone(name, dtype)
    vocab_size = model.config.vocab_size
    with threads(num_threads):
        for num_rows, place, bound in ((1, 0, PROMPT_LEN), (3, 2, 150), (5, 1, 176)):
            paged = Paged(model, num_sequences=3)
            start = PROMPT_LEN - num_rows
            sequences, starts = [0, 2], [40, 90]
            sequences.insert(place, 1)
            starts.insert(place, start)
            for sequence, length in ((0, 40), (2, 90)):
                paged.prefill(prompt(length, vocab_size=90, seed=sequence), sequence=sequence)
            cut = paged.prefill(ids[:start], sequence=1)
            tokens = prompt(3 * num_rows, vocab_size=min(vocab_size, 96), seed=5).view(3, num_rows)
            tokens[place] = ids[start:]
            batch = paged.decode_batch(sequences, starts, num_rows, bound=max(bound, 96))
            hidden = paged.trunk(tokens, batch)
            assert torch.equal(paged.logits(hidden).unflatten(0, (3, num_rows))[place], logits[start:]), num_rows
            # MTP entries start ... PROMPT_LEN - 2, the last of which is garbage in this batch.
            mtp_paged = paged
            mtp_paged.mtp(ids[1 : start + 1], cut, paged.prefill_batch([(1, 0, start)]))
            tokens[place] = torch.cat([ids[start + 1 :], ids[:1]])
            finite = [s for s in sequences if s != 1]
            for sequence in finite:  # the neighbours' MTP KV, so that their rows are not NaN
                length = 40 if sequence == 0 else 90
                paged.mtp(
                    prompt(length, vocab_size=90, seed=7),
                    hidden[:1].expand(length, -1),
                    paged.prefill_batch([(sequence, 0, length)]),
                )
            out = paged.mtp(tokens, hidden, batch)
            rows = paged.logits(out).unflatten(0, (3, num_rows))[place][:-1]
            assert torch.equal(rows, drafts[start:]), num_rows


def test_default_numerics_do_move(tiny_checkpoint, load):
    """What the mode is for: without it a chunk's length shows in the last bits."""
    model = load(tiny_checkpoint(**SHAPES["moe, wide"]), torch.float32)
    ids = prompt(PROMPT_LEN)
    whole, cut = (
        paged.logits(paged.prefill(ids, chunk_len=n)) for paged, n in ((Paged(model), None), (Paged(model), 7))
    )
    assert not torch.equal(whole, cut)
    assert (whole - cut).abs().max() < 1e-4


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_self_test_knows_every_gemm_of_a_model(name, tiny_checkpoint, load, monkeypatch):
    model = load(tiny_checkpoint(**SHAPES[name]), torch.float32, Numerics.INVARIANT)
    check_invariance(model.linear_shapes(), torch.float32, model.device)
    seen = set()

    def spy_on(module, name):
        plain = getattr(module, name)

        def spy(x_TK, weight_NK, *args, **options):
            seen.add(tuple(weight_NK.shape))
            return plain(x_TK, weight_NK, *args, **options)

        monkeypatch.setattr(module, name, spy)

    for module, name in ((linear, "matmul_rows"), (inner_sum, "matmul_slices"), (moe, "matmul_rows")):
        spy_on(module, name)
    spy_on(moe, "matmul_slices")
    paged = Paged(model)
    ids = prompt(5)
    hidden = paged.prefill(ids)
    paged.logits(paged.mtp(ids, hidden, paged.prefill_batch([(0, 0, 5)])))
    assert seen == set(model.linear_shapes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_weight_of_a_shared_expert_does_not_know_the_rows_beside_it(dtype, tiny_checkpoint, load):
    model = load(tiny_checkpoint(kind="qwen2_moe"), dtype, Numerics.INVARIANT)
    mlp = model._decoder.layers[0].mlp
    generator = torch.Generator().manual_seed(2)
    x_TD, mixed_TD = (torch.randn(300, 32, generator=generator).to(dtype) for _ in range(2))

    def added(cut):
        gate_T1 = model.ops.linear(x_TD[cut], mlp.router_XD)[:, len(mlp.router_ED) :][:, :1]
        return mlp.shared.add_to(mixed_TD[cut], x_TD[cut], gate_T1)

    with torch.inference_mode():
        whole_TD = added(slice(None))
        for row in range(300):
            assert torch.equal(added(slice(row, row + 1))[0], whole_TD[row]), row
