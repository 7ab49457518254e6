"""On a GPU: attention that is divided by work against the reference, replayed by a graph, and the same every time."""

from dataclasses import asdict

import pytest
import torch

from baton.bench.kernel_cases.attention_decode import AttentionDecodeShape, by_work, make
from baton.bench.kernel_cases.attention_prefill import Batch, PrefillWork
from baton.kernels.attention.decode import attention_decode
from baton.kernels.attention.decode_plan import SplitKVPlans, default_options
from baton.kernels.attention.prefill import attention_prefill
from baton.kernels.implementation import Implementation
from baton.kernels.kv import dequantize as kv_dequantize

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
FP8 = torch.float8_e4m3fn
HEADS = [(32, 8, 128), (32, 4, 128), (16, 2, 256), (8, 2, 64)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(found, wanted):
    """To rounding of bfloat16; NaN anywhere is a difference."""
    found, wanted = found.float(), wanted.float()
    assert (found - wanted).norm() / wanted.norm() < 1e-2


def with_lengths(buffers, lengths):
    """The same KV, seen as far as these lengths."""
    num_queries = buffers.query_BQAD.shape[1]
    ends_B1 = torch.tensor(lengths, device=CUDA)[:, None]
    positions_BQ = ends_B1 - num_queries + torch.arange(num_queries, device=CUDA)
    buffers.positions_BQ.copy_(torch.where(ends_B1 > 0, positions_BQ, -1))


def run(buffers, options, implementation=Implementation.AUTO, plans=None):
    return attention_decode(
        buffers.query_BQAD, buffers.key_NHSD, buffers.value_NHSD, buffers.block_tables_BM, buffers.positions_BQ,
        buffers.context_len, options=options, implementation=implementation, plans=plans, **buffers.scales,
    )  # fmt: skip


LENGTHS = [
    (4000, 8, 0, 1025, 500, 64, 4096, 31),
    (4096, *(8,) * 7),
    (8,) * 8,
    (4096,) * 8,
    (0,) * 8,
]


@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize("num_queries", [1, 4, 8])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ragged_batches(heads, num_queries, is_float8):
    shape = AttentionDecodeShape(*heads, 8, 4096, num_queries, is_float8)
    buffers = make(shape, CUDA)
    for slots in (132, 792):
        options = {**by_work(shape), "slots": slots}
        for lengths in LENGTHS:
            with_lengths(buffers, lengths)
            out = run(buffers, options)
            wanted = run(buffers, None, Implementation.REFERENCE)
            assert out.isfinite().all()
            if any(lengths):
                close(out, wanted)
            else:
                assert not out.any()


def test_many_sequences_and_two_runs():
    shape = AttentionDecodeShape(32, 8, 128, 300, 2048, 1)
    buffers = make(shape, CUDA)
    with_lengths(buffers, [1 + (index * 7919) % 2048 for index in range(300)])
    first = run(buffers, by_work(shape))
    close(first, run(buffers, None, Implementation.REFERENCE))
    assert all(torch.equal(run(buffers, by_work(shape)), first) for _ in range(20))
    plans = SplitKVPlans()
    assert all(torch.equal(run(buffers, by_work(shape), plans=plans), first) for _ in range(3))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_a_graph_of_two_layers_replays_other_lengths_and_nothing_waits(num_queries, pdl):
    shape = AttentionDecodeShape(32, 8, 128, 8, 4096, num_queries)
    buffers = make(shape, CUDA)
    options = {**by_work(shape), "pdl": pdl}

    def layers():
        plans = SplitKVPlans()
        return run(buffers, options, plans=plans), run(buffers, options, plans=plans)

    layers()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        layers()
        with torch.cuda.graph(graph, stream=stream):
            captured = layers()
    torch.cuda.current_stream().wait_stream(stream)
    for lengths in LENGTHS:
        with_lengths(buffers, lengths)
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = layers()
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
        assert torch.equal(captured[0], captured[1])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="for Hopper alone"
)
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 2, 256), (14, 2, 64)], ids=str)
@pytest.mark.parametrize(
    "chunks",
    [((16, 4000),) * 4, ((1, 2000), (0, 0), (40, 3000), (3, 0)), ((300, 9000),), ((700, 0), (1, 5000), (64, 64))],
    ids=len,
)
def test_short_chunks_by_the_form_for_hopper(chunks, heads):
    batch = Batch(PrefillWork("", chunks, *heads), CUDA)
    wanted = attention_prefill(
        batch.query_TAD.float(), batch.key_NHSD.float(), batch.value_NHSD.float(), batch.tables_BM, batch.starts_E,
        batch.contexts_B, max_query_len=max(batch.query_lens), implementation=Implementation.REFERENCE,
    )  # fmt: skip
    warp_specialized = {
        "GROUPS": 2,
        "BN": 128 if heads[2] <= 128 else 64,
        "STAGES": 2,
        "PIN": False,
        "PERSISTENT": False,
    }
    for slots in (1, 132, 500, 3000):
        for turns in (False, True):
            call = batch.ours(options={**warp_specialized, "TURNS": turns, "slots": slots})
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = call()
                again = [call() for _ in range(5)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            close(found, wanted)
            assert all(torch.equal(one, found) for one in again)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    "chunks", [((16, 4000),) * 4, ((1, 2000), (0, 0), (40, 3000), (3, 0)), ((100, 9000),)], ids=len
)
def test_short_chunks(chunks, heads, kv_dtype):
    batch = Batch(PrefillWork("", chunks, *heads, kv_dtype), CUDA)
    if kv_dtype == FP8:
        batch.key_scale, batch.value_scale = torch.rand(2, heads[1], device=CUDA) + 0.5
    longest = max(batch.query_lens)
    wanted = attention_prefill(
        batch.query_TAD.float(), batch.key_NHSD.float() if kv_dtype != FP8 else batch.key_NHSD,
        batch.value_NHSD.float() if kv_dtype != FP8 else batch.value_NHSD, batch.tables_BM, batch.starts_E,
        batch.contexts_B, max_query_len=longest, key_scale=batch.key_scale, value_scale=batch.value_scale,
        implementation=Implementation.REFERENCE,
    )  # fmt: skip
    rule = asdict(default_options(longest * heads[0] // heads[1], heads[2], batch.key_NHSD.element_size()))
    for slots in (132, 528):
        call = batch.ours(options=rule | {"slots": slots})
        first = call()
        close(first, wanted)
        assert torch.equal(call(), first)
    close(batch.ours()(), wanted)


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 2, 256)], ids=str)
def test_long_chunks_over_float8_are_dequantized_first(heads, monkeypatch):
    batch = Batch(PrefillWork("", ((700, 0), (1, 3000), (0, 0), (515, 130)), *heads, FP8), CUDA)
    batch.key_scale, batch.value_scale = torch.rand(2, heads[1], device=CUDA) + 0.5
    call = batch.ours()
    dequantized = call()
    wanted = attention_prefill(
        batch.query_TAD.float(), batch.key_NHSD, batch.value_NHSD, batch.tables_BM, batch.starts_E, batch.contexts_B,
        max_query_len=max(batch.query_lens), key_scale=batch.key_scale, value_scale=batch.value_scale,
        implementation=Implementation.REFERENCE,
    )  # fmt: skip
    close(dequantized, wanted)
    assert torch.equal(call(), dequantized)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(kv_dequantize, "MAX_BYTES", 0)
    close(call(), wanted)
