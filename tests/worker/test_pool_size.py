"""How many KV blocks a GPU has memory for, by what is free: no GPU needed."""

import json
from types import SimpleNamespace

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.prompt_lookup import PromptLookup
from baton.engine.speculation.token_history import TokenHistory
from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.implementation import Implementation
from baton.kernels.kv import dequantize as kv_dequantize
from baton.kernels.moe import gemm as moe_gemm
from baton.kernels.moe.held_experts import HeldExperts
from baton.kvcache.layout import CHECKPOINT_SHARE, KVLayout
from baton.model.parallel import Alone
from baton.tests.kvtransfer.kept import state
from baton.worker import loading
from baton.worker.loading import StepSizes

pytestmark = pytest.mark.fast
TOTAL_BYTES = 20 << 30
WEIGHT_BYTES = 3 << 30
SIZES = SimpleNamespace(
    hidden_size=1024,
    intermediate_size=4096,
    moe_intermediate_size=0,
    num_experts=0,
    num_experts_per_token=0,
    shared_expert_size=0,
    vocab_size=32_000,
    max_model_len=131_072,
    latent=None,
)


def num_blocks(
    monkeypatch, *, dtype, is_hopper=True, head_dim=128, share=0.5, free=15 << 30, chunk_len=256, lookup=None, **model
):
    found, layout = pool_sizes(
        monkeypatch, dtype=dtype, is_hopper=is_hopper, head_dim=head_dim, share=share, free=free, chunk_len=chunk_len,
        lookup=lookup, **model,
    )  # fmt: skip
    return found.num_blocks, layout.bytes_per_block


def pool_sizes(
    monkeypatch, *, dtype, is_hopper=True, head_dim=128, share=0.5, free=15 << 30, chunk_len=256, lookup=None,
    more=(), prefix_cache=True, group=None, **model,
):  # fmt: skip
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, TOTAL_BYTES))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: WEIGHT_BYTES)
    monkeypatch.setattr(attention_prefill_hopper_triton, "num_multiprocessors", lambda index: 132 * is_hopper)
    layout = KVLayout.of_attention(
        model_hash="m", num_layers=2, num_kv_heads=4, head_dim=head_dim, block_size=16, dtype=dtype, more=more
    )
    known = {"implementation": Implementation.TRITON, "numerics": Numerics.DEFAULT, "device": torch.device("cuda", 0)}
    config = SimpleNamespace(
        gpu_memory_utilization=share, chunk_len=chunk_len, max_num_seqs=16, num_draft_tokens=2, lookup=lookup,
        prefix_cache=prefix_cache,
    )  # fmt: skip
    sizes = StepSizes(max_num_seqs=16, max_num_batched_tokens=chunk_len, why=("", ""))
    loaded = SimpleNamespace(config=SIZES, **{**known, "sparse_layers": (), **model})
    return loading._pool_sizes(config, loaded, layout, group or Alone(), sizes), layout


def room_of(share=0.5, chunk_len=256, inner_size=4096):
    steps = loading.step_bytes(
        num_tokens=chunk_len, num_rows=48, hidden_size=1024, inner_size=inner_size, vocab_size=32_000
    )
    return int(TOTAL_BYTES * share) - WEIGHT_BYTES - loading.CONTEXT_BYTES - steps


def test_the_share_is_of_the_whole_card_and_weights_and_steps_are_in_it(monkeypatch):
    found, block_bytes = num_blocks(monkeypatch, dtype="bfloat16")
    assert found == room_of() // block_bytes - 1
    other, _ = num_blocks(monkeypatch, dtype="bfloat16", share=0.6)
    assert (other - found) * block_bytes == pytest.approx(0.1 * TOTAL_BYTES, rel=1e-3)


def test_longer_steps_leave_less(monkeypatch):
    found, block_bytes = num_blocks(monkeypatch, dtype="bfloat16", chunk_len=8192)
    assert found == room_of(chunk_len=8192) // block_bytes - 1 < room_of() // block_bytes - 1


@pytest.mark.parametrize(
    "sizes", [{"shared_expert_size": 65_536}, {"moe_intermediate_size": 8192, "num_experts_per_token": 8}], ids=str
)
def test_the_widest_rows_of_a_layer_leave_less(sizes, monkeypatch):
    for name, size in sizes.items():
        monkeypatch.setattr(SIZES, name, size)
    found, block_bytes = num_blocks(monkeypatch, dtype="bfloat16", chunk_len=8192)
    assert (
        found == room_of(chunk_len=8192, inner_size=65_536) // block_bytes - 1 < room_of(chunk_len=8192) // block_bytes
    )


def test_what_experts_allocate_leaves_less(monkeypatch):
    of_experts = {"moe_intermediate_size": 512, "num_experts_per_token": 8}
    for name, size in of_experts.items():
        monkeypatch.setattr(SIZES, name, size)
    without, block_bytes = num_blocks(monkeypatch, dtype="bfloat16", chunk_len=8192)
    monkeypatch.setattr(SIZES, "num_experts", 64)
    found, _ = num_blocks(monkeypatch, dtype="bfloat16", chunk_len=8192)
    num_bytes = moe_gemm.most_bytes(8192, 8, (64, 1024, 512))
    assert num_bytes >= 8192 * 8 * (1024 + 512) * 2
    assert without - found == pytest.approx(num_bytes / block_bytes, abs=1)


@pytest.mark.parametrize(("num_tokens", "num_choices", "times"), [(100, 9, 2), (8192, 8, 1)])
def test_in_short_steps_a_shared_expert_is_one_of_them_and_parts_outlive_their_layer(
    num_tokens, num_choices, times, monkeypatch
):
    of_experts = {"moe_intermediate_size": 512, "num_experts_per_token": 8, "shared_expert_size": 512}
    for name, size in of_experts.items():
        monkeypatch.setattr(SIZES, name, size)
    without, block_bytes = num_blocks(monkeypatch, dtype="bfloat16", chunk_len=num_tokens)
    monkeypatch.setattr(SIZES, "num_experts", 64)
    found, _ = num_blocks(monkeypatch, dtype="bfloat16", chunk_len=num_tokens)
    num_bytes = moe_gemm.most_bytes(num_tokens, num_choices, (64 + num_choices - 8, 1024, 512))
    assert without - found == pytest.approx(times * num_bytes / block_bytes, abs=1)


def test_the_tokens_that_drafts_are_looked_up_in_leave_less(monkeypatch):
    """As much as the table of a runner of these sizes takes, and no more."""
    without, block_bytes = num_blocks(monkeypatch, dtype="bfloat16")
    found, _ = num_blocks(monkeypatch, dtype="bfloat16", lookup=PromptLookup())
    history = TokenHistory(PromptLookup(), 16, SIZES.max_model_len, torch.device("meta"))
    num_bytes = sum(value.nbytes for value in vars(history).values() if isinstance(value, torch.Tensor))
    assert num_bytes >= 16 * SIZES.max_model_len * 4
    assert without - found == pytest.approx(num_bytes / block_bytes, abs=1)


def test_what_others_hold_is_not_taken(monkeypatch):
    found, block_bytes = num_blocks(monkeypatch, dtype="bfloat16", free=2 << 30)
    assert found * block_bytes < 2 << 30
    assert num_blocks(monkeypatch, dtype="bfloat16", free=1 << 10)[0] < 1


def test_float8_leaves_room_to_be_dequantized_where_it_is(monkeypatch):
    found, block_bytes = num_blocks(monkeypatch, dtype="float8_e4m3fn")
    assert found == (room_of() - 2 * kv_dequantize.MAX_BYTES) // block_bytes - 1


def test_what_experts_are_exchanged_through_leaves_less(monkeypatch):
    options = {"dtype": "bfloat16"}
    least, block_bytes = num_blocks(monkeypatch, **options)
    experts = SimpleNamespace(
        gate_up_EJD=torch.empty(4, 512, 1024, dtype=torch.bfloat16),
        down_EDI=torch.empty(4, 1024, 256, dtype=torch.bfloat16),
        held=HeldExperts.of_rank(8, 0, 2, 0),
    )
    layers = [SimpleNamespace(experts=experts, slots=slots) for slots in (object(), object())]
    moving, _ = num_blocks(monkeypatch, **options, sparse_layers=layers)
    assert least - moving == pytest.approx((4 + 3) * 3 * 256 * 1024 * 2 / block_bytes, abs=1)
    staying = [SimpleNamespace(experts=experts, slots=None)]
    assert num_blocks(monkeypatch, **options, sparse_layers=staying)[0] == least


@pytest.mark.parametrize(
    "changes",
    [
        {"is_hopper": False},
        {"head_dim": 32},
        {"implementation": Implementation.REFERENCE},
        {"numerics": Numerics.INVARIANT},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_where_nothing_is_dequantized_no_room_is_left_for_it(monkeypatch, changes):
    found, block_bytes = num_blocks(monkeypatch, dtype="float8_e4m3fn", **changes)
    assert found == room_of() // block_bytes - 1


class OfTwo(Alone):
    """A rank whose peer has room for less."""

    def gather_bytes(self, data):
        return [data, json.dumps([number // 2 for number in json.loads(data)]).encode()]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_checkpoints_have_a_share_of_what_sequences_leave_and_ranks_agree(monkeypatch, prefix_cache):
    model = {"dtype": "bfloat16", "more": [state(4, 1 << 16, length=16, dtype="float32")], "prefix_cache": prefix_cache}
    model["implementation"] = Implementation.REFERENCE
    found, layout = pool_sizes(monkeypatch, **model)
    left = room_of() - 33 * layout.bytes_per_state_slot
    assert found.num_checkpoints == (left // (CHECKPOINT_SHARE * layout.bytes_per_state_slot) if prefix_cache else 0)
    assert found.num_state_slots == 32 + found.num_checkpoints
    taken = (found.num_state_slots + 1) * layout.bytes_per_state_slot + (found.num_blocks + 1) * layout.bytes_per_block
    assert room_of() - layout.bytes_per_block - 64 < taken <= room_of()
    less, _ = pool_sizes(monkeypatch, **model, group=OfTwo())
    assert less == (found.num_blocks // 2, 32 + found.num_checkpoints // 2, found.num_checkpoints // 2)
