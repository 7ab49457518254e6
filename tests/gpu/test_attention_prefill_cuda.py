"""On a GPU: paged prefill attention at serving shapes against the library, in a CUDA graph, and without a wait."""

import itertools

import pytest
import torch

from baton.bench.kernel_cases.attention_prefill import Batch, PrefillWork
from baton.kernels.attention import prefill_hopper_triton as hopper
from baton.kernels.attention import prefill_plan
from baton.kernels.attention.prefill import attention_prefill, attention_prefill_lens
from baton.kernels.implementation import Implementation

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
FP8 = torch.float8_e4m3fn
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
MIXED = ((700, 0), (1, 3000), (0, 0), (33, 517), (128, 1000), (16, 4096), (1, 0), (515, 130))
HEADS = [(32, 8, 128), (32, 4, 128), (16, 2, 256), (14, 2, 64), (4, 4, 32)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(found, wanted):
    """To rounding of bfloat16, row by row; NaN anywhere is a difference."""
    found, wanted = found.double(), wanted.double()
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)
    assert error.max() < 2e-2
    assert (found - wanted).norm() / wanted.norm() < 5e-3


def wanted_of(batch):
    """By the reference in float32, which knows nothing of tiles."""
    return attention_prefill(
        batch.query_TAD.float(), batch.key_NHSD.float(), batch.value_NHSD.float(), batch.tables_BM,
        batch.starts_E, batch.contexts_B, max_query_len=max(batch.query_lens), implementation=Implementation.REFERENCE,
    )  # fmt: skip


def spoil_unused(batch, work):
    """NaN in every slot past a sequence's last position, and in the block that nobody has."""
    batch.key_NHSD[-1] = batch.value_NHSD[-1] = float("nan")
    for sequence, (rows, prefix) in enumerate(work.chunks):
        context = rows + prefix
        if context % 16:
            block = batch.tables_BM[sequence, context // 16]
            batch.key_NHSD[block, :, context % 16 :] = float("nan")
            batch.value_NHSD[block, :, context % 16 :] = float("nan")


@pytest.mark.parametrize("heads", HEADS)
def test_mixed_chunks(heads):
    work = PrefillWork("mixed", MIXED, *heads)
    batch = Batch(work, CUDA)
    wanted = wanted_of(batch)
    spoil_unused(batch, work)
    close(batch.ours()(), wanted)
    close(batch.ours(invariant=True)(), wanted)


@pytest.mark.parametrize("heads", [(28, 4, 128), (24, 8, 128), (8, 8, 128), (16, 4, 256), (14, 2, 64)], ids=str)
def test_forms_that_may_be_chosen_agree(heads):
    batch = Batch(PrefillWork("", MIXED, *heads), CUDA)
    wanted = wanted_of(batch)
    for options in prefill_plan.hopper_options(heads[2]) if ON_HOPPER else ():
        close(batch.ours(options=options)(), wanted)
    for chunks in MIXED, ((40, 3000), (7, 100)), ((300, 9000),), ((600, 0),), ((30, 0), (20, 0)):
        batch = Batch(PrefillWork("", chunks, *heads), CUDA)
        close(batch.ours()(), wanted_of(batch))


def warp_specialized(head_dim, **changes):
    """Options of the form for Hopper."""
    return {
        "GROUPS": 2,
        "BN": 128 if head_dim <= 128 else 64,
        "STAGES": 2,
        "TURNS": True,
        "PIN": True,
        "PERSISTENT": False,
        **changes,
    }


needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="for Hopper alone")


@needs_hopper
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 2, 256), (14, 2, 64)])
@pytest.mark.parametrize("chunks", [MIXED, ((1024, 0),), ((129, 0), (7, 40)), ((64, 2000), (3, 0), (640, 128))])
def test_the_form_for_hopper(heads, chunks):
    work = PrefillWork("", chunks, *heads)
    batch = Batch(work, CUDA)
    assert hopper.fits(batch.query_TAD, batch.key_NHSD, batch.value_NHSD)
    wanted = wanted_of(batch)
    spoil_unused(batch, work)
    first = batch.ours(options=warp_specialized(heads[2]))()
    close(first, wanted)
    assert torch.equal(batch.ours(options=warp_specialized(heads[2], PERSISTENT=True))(), first)
    if heads[2] == 128:
        for changes in ({"TURNS": False}, {"PIN": False}, {"TURNS": False, "PERSISTENT": True}):
            assert torch.equal(batch.ours(options=warp_specialized(128, **changes))(), first), changes


@needs_hopper
@pytest.mark.parametrize("changes", [{"STAGES": 3}, {"BN": 64, "STAGES": 4}, {"GROUPS": 3, "BN": 64, "STAGES": 4}])
def test_the_form_for_hopper_with_other_tiles(changes):
    work = PrefillWork("", MIXED)
    batch = Batch(work, CUDA)
    wanted = wanted_of(batch)
    spoil_unused(batch, work)
    for persistent in (False, True):
        close(batch.ours(options=warp_specialized(128, **changes, PERSISTENT=persistent))(), wanted)


@needs_hopper
def test_a_row_of_the_form_for_hopper_depends_neither_on_chunks_nor_on_the_batch():
    whole = Batch(PrefillWork("", ((1024, 0),)), CUDA)
    options = warp_specialized(128)
    wanted = whole.ours(options=options)()
    end = 0
    for rows in (300, 1, 128, 595):
        end += rows
        part = whole.query_TAD[end - rows : end]
        found = attention_prefill_lens(
            torch.cat([whole.query_TAD[:50], part]), whole.key_NHSD, whole.value_NHSD, whole.tables_BM.expand(2, -1),
            [50, rows], [50, end], options=options,
        )  # fmt: skip
        assert torch.equal(found[50:], wanted[end - rows : end])
        assert torch.equal(found[:50], wanted[:50])


@needs_hopper
def test_the_form_for_hopper_is_the_same_every_time():
    batch = Batch(PrefillWork("", ((2048, 1000), (700, 3000), (5, 9000))), CUDA)
    for persistent in (False, True):
        call = batch.ours(options=warp_specialized(128, PERSISTENT=persistent))
        first = call()
        assert all(torch.equal(call(), first) for _ in range(30))


def test_fp8_kv_with_a_scale_for_each_head():
    batch = Batch(PrefillWork("", MIXED, kv_dtype=FP8), CUDA)
    scales = torch.rand(2, 8, device=CUDA) + 0.5
    batch.key_scale, batch.value_scale = scales[0].contiguous(), scales[1].contiguous()
    found = batch.ours()()
    wanted = attention_prefill_lens(
        batch.query_TAD.float(), batch.key_NHSD, batch.value_NHSD, batch.tables_BM, batch.query_lens,
        batch.context_lens, key_scale=batch.key_scale, value_scale=batch.value_scale,
        implementation=Implementation.REFERENCE,
    )  # fmt: skip
    close(found, wanted)


def test_a_row_depends_neither_on_chunks_nor_on_the_batch():
    chunks = (300, 1, 128, 595)
    ends = list(itertools.accumulate(chunks))
    whole = Batch(PrefillWork("", ((ends[-1], 0),)), CUDA)
    wanted = whole.ours(invariant=True)()
    for rows, end in zip(chunks, ends, strict=True):
        # Twice in one batch, the first time a shorter part.
        part = whole.query_TAD[end - rows : end]
        found = attention_prefill_lens(
            torch.cat([whole.query_TAD[:50], part]), whole.key_NHSD, whole.value_NHSD, whole.tables_BM.expand(2, -1),
            [50, rows], [50, end], invariant=True,
        )  # fmt: skip
        assert torch.equal(found[50:], wanted[end - rows : end])
        assert torch.equal(found[:50], wanted[:50])


def test_a_graph_follows_lengths_that_change_on_the_device():
    work = PrefillWork("", ((600, 0), (40, 2000), (300, 700)))
    batch = Batch(work, CUDA)
    call = batch.ours()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lens, seen in (((600, 40, 300), (600, 2040, 1000)), ((1, 0, 500), (9, 0, 999)), ((0, 7, 0), (0, 7, 0))):
            new = torch.tensor([0, *itertools.accumulate(lens), *seen], dtype=torch.int32).pin_memory()
            new = new.to(CUDA, non_blocking=True)
            batch.starts_E.copy_(new[:4])
            batch.contexts_B.copy_(new[4:])
            graph.replay()
            assert_same(output, call(), sum(lens))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_same(found, wanted, num_rows):
    """Bit for bit, looked at while waiting is allowed."""
    torch.cuda.set_sync_debug_mode("default")
    same = torch.equal(found[:num_rows], wanted[:num_rows])
    torch.cuda.set_sync_debug_mode("error")
    assert same


def test_lengths_on_the_host_make_nobody_wait():
    batch = Batch(PrefillWork("", MIXED), CUDA)
    wanted = batch.ours()()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = attention_prefill_lens(
            batch.query_TAD, batch.key_NHSD, batch.value_NHSD, batch.tables_BM, batch.query_lens, batch.context_lens
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, wanted)
