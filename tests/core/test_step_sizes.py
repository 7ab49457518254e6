"""Sizes of steps that nobody chose: by device, model and pool."""

import pytest

from baton.engine.graphs.key import GraphSizes, default_sizes, default_widths
from baton.worker.loading import DeviceFacts, choose

pytestmark = pytest.mark.fast
CPU = DeviceFacts(kind="cpu")
GIB = 1 << 30


def gpu(gib, *, seqs=0, tokens=0, vocab_size=151_936, rows=1):
    device = DeviceFacts(kind="cuda", num_bytes=int(gib * GIB))
    return choose(asked_seqs=seqs, asked_tokens=tokens, device=device, vocab_size=vocab_size, num_rows_per_seq=rows)


def fitted(sizes, pool_len, *, asked=0, kind="cuda", max_model_len=40_960):
    return sizes.fitted(asked_seqs=asked, kind=kind, pool_len=pool_len, max_model_len=max_model_len).max_num_seqs


def test_a_cpu_has_small_steps_whatever_its_pool():
    sizes = choose(asked_seqs=0, asked_tokens=0, device=CPU, vocab_size=512, num_rows_per_seq=3)
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (16, 256)
    assert fitted(sizes, 64, kind="cpu") == 16


def test_an_h200_that_two_workers_share_runs_256_sequences_and_4096_tokens():
    sizes = gpu(0.45 * 139.8, rows=3)
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (256, 4096)
    assert fitted(sizes, 300_000) == 256
    assert "default of a GPU" in sizes.why[0]


def test_a_gpu_computes_more_tokens_where_experts_would_get_few_rows():
    """By published shapes: 8 of 256 (35B, DeepSeek-V3), 8 of 160 (GLM-4.6), 8 of 128 (30B), 2 of 8 (Mixtral)."""
    for num_chosen, num_experts, tokens in ((8, 256, 8192), (8, 160, 8192), (8, 128, 4096), (2, 8, 4096)):
        share = num_chosen / num_experts
        sizes = {"device": DeviceFacts(kind="cuda", num_bytes=80 * GIB), "vocab_size": 512, "num_rows_per_seq": 1}
        chosen = choose(asked_seqs=0, asked_tokens=0, expert_share=share, **sizes)
        assert chosen.max_num_batched_tokens == tokens
        assert choose(asked_seqs=0, asked_tokens=300, expert_share=share, **sizes).max_num_batched_tokens == 300
        assert ("an expert would have 128" in chosen.why[1]) == (num_experts == 256)
    on_cpu = choose(asked_seqs=0, asked_tokens=0, device=CPU, vocab_size=512, num_rows_per_seq=1, expert_share=1 / 32)
    assert on_cpu.max_num_batched_tokens == 256


def test_no_more_sequences_than_the_pool_holds():
    assert fitted(gpu(80), 100_000) == 96
    assert fitted(gpu(80), 100_000, max_model_len=512) == 192
    assert fitted(gpu(80), 1_000) == 8
    sizes = gpu(80).fitted(asked_seqs=0, kind="cuda", pool_len=100_000, max_model_len=4096)
    assert sizes.why[0] == "max_num_seqs 96: the KV pool holds 100000 positions, 1024 for each"


def test_logits_of_a_small_gpu_leave_room_for_kv():
    small = gpu(5, rows=5)
    assert small.max_num_seqs == 40
    assert small.max_num_seqs * 5 * 151_936 * 16 <= 0.1 * 5 * GIB
    assert "10% of 5.0 GiB" in small.why[0]
    assert gpu(0.1).max_num_seqs == 8


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_asked_for_stays(kind):
    device = DeviceFacts(kind=kind, num_bytes=GIB if kind == "cuda" else 0)
    sizes = choose(asked_seqs=777, asked_tokens=4096, device=device, vocab_size=10**6, num_rows_per_seq=5)
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (777, 4096)
    assert fitted(sizes, 16, asked=777, kind=kind) == 777
    assert all("asked for" in why for why in sizes.why)


def test_graphs_reach_the_sequences_and_their_number_is_known():
    """What capturing costs at start: 117 graphs for 40,960 positions without drafts, 819 with two."""
    sizes, widths = default_sizes(256), default_widths(2_560)
    assert sizes[-1] == 256
    for num_drafts, captured in ((0, 117), (2, 819)):
        all_sizes = {"sizes": sizes, "widths": widths, "num_draft_tokens": num_drafts, "max_entries": 1 << 30}
        assert len(list(GraphSizes(**all_sizes).keys())) == captured
        assert len(list(GraphSizes(**all_sizes, num_owners=8).keys())) == captured * 25 // 13, "two of all but one size"
