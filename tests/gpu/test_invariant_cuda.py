"""Numerics `invariant` by Triton kernels on a GPU: a row's bits are its own, whatever is computed beside it.

Every operation of a decode step, rows alone against rows of batches; then a model, whose logits must not know whether a
prompt came in one chunk, in several, or token by token.
"""

import itertools
from functools import partial

import pytest
import torch

from baton.bench.kernel_cases import linear_ordered as linear_ordered_cases
from baton.core.numerics import Numerics, Quantization
from baton.kernels.attention.ordered import attention_ordered_decode, attention_ordered_prefill_lens
from baton.kernels.gemm.fp8 import linear_fp8
from baton.kernels.gemm.fp8_weight import quantize_weight
from baton.kernels.gemm.inner_sum import InnerSum, tree_sum
from baton.kernels.gemm.linear import linear_ordered
from baton.kernels.gemm.linear_ordered_triton import rule
from baton.kernels.implementation import Implementation
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.moe.moe import ExpertWeights
from baton.kernels.ops import Ops
from baton.kernels.pointwise.qk_norm_rope_write import HeadNorms, LayerPool
from baton.kernels.selftest import check_invariance
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.kernels.harness import relative_error, same_bits
from baton.tests.model.harness import Paged

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
REFERENCE, TRITON = Implementation.REFERENCE, Implementation.TRITON
ROWS = (1, 2, 7, 8, 15, 16, 63, 64, 65, 128, 1000)
MOST = 1000
HEADS = [(32, 8, 128), (28, 4, 128), (16, 2, 256), (8, 2, 64)]


@pytest.fixture(autouse=True)
def seeded():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)


def values(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=CUDA).to(dtype)


def weights(*shape):
    return values(*shape) / shape[-1] ** 0.5


def assert_rows_are_alone(compute, *inputs):
    """Of `MOST` rows: the same bits in batches of every size, from the beginning and from the end, and twice."""
    found = compute(*inputs)
    whole = found if isinstance(found, tuple) else (found,)
    for num_rows in ROWS:
        for first in {0, MOST - num_rows, (MOST - num_rows) // 3}:
            rows = slice(first, first + num_rows)
            part = compute(*[tensor[rows].contiguous() for tensor in inputs])
            for one, other in zip(part if isinstance(part, tuple) else (part,), whole, strict=True):
                assert same_bits(one, other[rows]), (num_rows, first)
    return found


@pytest.mark.parametrize("slices", [2, 8])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (4096, 12_288), (1000, 1536)])
def test_linear(num_outputs, num_inputs, slices):
    x_TK, weight_NK = values(MOST, num_inputs), weights(num_outputs, num_inputs)
    found = assert_rows_are_alone(partial(linear_ordered, weight_NK=weight_NK, num_slices=slices), x_TK)
    assert relative_error(found, x_TK.float() @ weight_NK.float().t()) < 4e-3
    few = x_TK[:5].contiguous()
    for own, outputs in itertools.product([own for own in (1, 2, 4, 8) if own <= slices], (64, 128)):
        options = {"outputs": outputs, "slices": own, "warps": 4, "stages": 3}
        assert same_bits(linear_ordered(few, weight_NK, num_slices=slices, options=options), found[:5]), (own, outputs)
    many = rule(4096, num_outputs, slices)
    assert same_bits(linear_ordered(few, weight_NK, num_slices=slices, options=many), found[:5])


@pytest.mark.parametrize("shape", ["6144x4096 2", "4096x4096 8", "4096x12288 8"])
def test_what_the_tuner_may_choose_changes_no_bit(shape):
    points = [point for point in linear_ordered_cases.tuning() if point.shape == shape]
    sizes, slices = shape.split()
    num_outputs, num_inputs = map(int, sizes.split("x"))
    x_TK, weight_NK = values(70, num_inputs), weights(num_outputs, num_inputs)
    wanted = linear_ordered(x_TK, weight_NK, num_slices=int(slices))
    candidates = {repr(each): each for point in points for each in point.candidates}
    assert len(candidates) > 4
    for options in candidates.values():
        found = linear_ordered(x_TK, weight_NK, num_slices=int(slices), options=options)
        assert same_bits(found, wanted), options


def test_linear_of_the_vocabulary():
    x_TK, weight_NK = values(65, 1024), weights(151_936, 1024)
    whole = linear_ordered(x_TK, weight_NK)
    for rows in (slice(0, 1), slice(64, 65), slice(3, 20)):
        assert same_bits(linear_ordered(x_TK[rows], weight_NK), whole[rows])
    assert same_bits(linear_ordered(x_TK, weight_NK[37_984:75_968]), whole[:, 37_984:75_968])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_round_as_one(size):
    x_TK, weight_NK = values(70, 12_288), weights(4096, 12_288)
    wanted = Ops(Numerics.INVARIANT, implementation=TRITON).linear_inner(x_TK, weight_NK)
    sums = []
    ops = Ops(Numerics.INVARIANT, InnerSum(size, lambda part: sums.append(part) or part), TRITON)
    width = 12_288 // size
    for rank in range(size):
        own = slice(rank * width, (rank + 1) * width)
        ops.linear_inner(x_TK[:, own].contiguous(), weight_NK[:, own].contiguous())
    assert same_bits(tree_sum(sums).bfloat16(), wanted)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (4096, 12_288), (1024, 2048)])
def test_float8_gemms(num_outputs, num_inputs):
    """For many rows, too, where default numerics ask the library."""
    weight = quantize_weight(weights(num_outputs, num_inputs))
    x_TK = values(MOST, num_inputs)
    assert_rows_are_alone(partial(linear_fp8, weight=weight, invariant=True), x_TK)
    several = torch.cat([x_TK, values(3500, num_inputs)])
    assert same_bits(linear_fp8(several, weight, invariant=True)[:MOST], linear_fp8(x_TK, weight, invariant=True))


@pytest.mark.parametrize("is_fp8", [False, True])
def test_experts(is_fp8):
    num_experts, inner, hidden, chosen = 32, 768, 2048, 8
    made = ExpertWeights(weights(num_experts, 2 * inner, hidden), weights(num_experts, hidden, inner))
    if is_fp8:
        parts = []
        for stacked in (made.gate_up_EJD, made.down_EDI):
            each = [quantize_weight(one) for one in stacked]
            parts += [torch.stack([one.values_NK for one in each]), torch.stack([one.scales_BG for one in each])]
        made = Fp8ExpertWeights(*parts)
    ops = Ops(Numerics.INVARIANT, implementation=TRITON)
    x_TD, logits_TE = values(MOST, hidden), values(MOST, num_experts)

    def moe_layer(x_TD, logits_TE):
        weight_TK, expert_TK = ops.route(logits_TE, chosen, True)
        return weight_TK, expert_TK, ops.experts(x_TD, weight_TK, expert_TK, made, False)

    assert_rows_are_alone(moe_layer, x_TD, logits_TE)


@pytest.mark.parametrize("length", [128, 1024, 2048, 4096, 5120])
def test_norms_and_gates(length):
    ops = Ops(Numerics.INVARIANT, implementation=TRITON)
    weight_D = values(length)
    x_TD, added_TD = values(MOST, length), values(MOST, length)
    assert_rows_are_alone(lambda x: ops.rms_norm(x, weight_D, 1e-6), x_TD)
    assert_rows_are_alone(lambda x, added: ops.add_rms_norm(x, added, weight_D, 1e-6), x_TD, added_TD)
    assert_rows_are_alone(ops.silu_mul, values(MOST, 2 * length))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_norms_and_rotation_of_heads(heads):
    num_heads, num_kv_heads, head_dim = heads
    ops = Ops(Numerics.INVARIANT, implementation=TRITON)
    norms = HeadNorms(query_D=values(head_dim), key_D=values(head_dim), eps=1e-6)

    def write(qkv_TX, cos_TF, sin_TF):
        pool = torch.zeros(64, num_kv_heads, 2, 16, head_dim, dtype=torch.bfloat16, device=CUDA)
        slots_T = torch.arange(len(qkv_TX), device=CUDA)
        layer = LayerPool(key_NHSD=pool[:, :, 0], value_NHSD=pool[:, :, 1])
        query_TQD = ops.qk_norm_rope_write(qkv_TX, norms, (cos_TF, sin_TF), slots_T, layer)
        return query_TQD, pool.permute(0, 3, 1, 2, 4).flatten(0, 1)[: len(qkv_TX)]

    angles_TF = torch.rand(MOST, head_dim // 2, device=CUDA) * 1000
    qkv_TX = values(MOST, (num_heads + 2 * num_kv_heads) * head_dim)
    assert_rows_are_alone(write, qkv_TX, angles_TF.cos(), angles_TF.sin())


class Context:
    """A sequence's queries and its KV in blocks that lie scattered; another's blocks lie among them."""

    def __init__(self, heads, length, block_size=16):
        num_heads, num_kv_heads, head_dim = heads
        num_blocks = -(-length // block_size)
        self.length = length
        self.query = values(length, num_heads, head_dim) * 2
        pool = values(2 * num_blocks, num_kv_heads, 2, block_size, head_dim)
        self.key, self.value = pool[:, :, 0], pool[:, :, 1]
        self.tables = torch.randperm(2 * num_blocks, device=CUDA).view(2, num_blocks)

    def prefill(self, start, end, other=0):
        """Rows of a chunk, behind a chunk of the other sequence if it has rows."""
        query = torch.cat([values(other, *self.query.shape[1:]), self.query[start:end]])
        lens = ([other], [other + 77]) if other else ([], [])
        tables = self.tables.flip(0) if other else self.tables[:1]
        out = attention_ordered_prefill_lens(
            query, self.key, self.value, tables, [*lens[0], end - start], [*lens[1], end]
        )
        return out[other:]

    def decode(self, start, num_rows, bound, is_split, batch=1, place=0):
        """Rows of this sequence as one of a batch, whose others are at other positions."""
        positions = torch.randint(num_rows, self.length, (batch, 1), device=CUDA) - num_rows
        positions = positions + torch.arange(num_rows, device=CUDA)
        positions[place] = start + torch.arange(num_rows, device=CUDA)
        query = values(batch, num_rows, *self.query.shape[1:])
        query[place] = self.query[start : start + num_rows]
        tables = self.tables[1:].repeat(batch, 1)
        tables[place] = self.tables[0]
        return attention_ordered_decode(
            query, self.key, self.value, tables, positions, bound, is_split=is_split
        )[place]  # fmt: skip


@pytest.mark.parametrize(("heads", "block_size"), [*((heads, 16) for heads in HEADS), (HEADS[0], 64)], ids=str)
def test_attention(heads, block_size):
    """Chunks and neighbours; steps of one row and several, alone and in batches, split or not, near and far bounds."""
    length = 1700
    context = Context(heads, length, block_size)
    whole = context.prefill(0, length)
    wanted = attention_ordered_prefill_lens(
        context.query, context.key, context.value, context.tables[:1], [length], [length], implementation=REFERENCE
    )
    assert relative_error(whole, wanted) < 1e-2
    for cuts in ((0, 1, 2, 9, 17, 80, 512, 513, 1536, length), (0, 63, 64, 511, 1025, length), (0, 1000, length)):
        for (start, end), other in zip(itertools.pairwise(cuts), itertools.cycle((0, 5, 130)), strict=False):
            assert same_bits(context.prefill(start, end, other), whole[start:end]), (start, end, other)
    for start, num_rows in ((0, 1), (63, 1), (64, 2), (511, 1), (512, 1), (510, 5), (1023, 8), (1535, 3), (1699, 1)):
        end = start + num_rows
        for is_split, bound, batch in itertools.product((False, True, None), (end, length), (1, 3, 70)):
            found = context.decode(start, num_rows, bound if batch == 1 else length, is_split, batch, batch // 2)
            assert same_bits(found, whole[start:end]), (start, num_rows, is_split, bound, batch)


def test_attention_does_not_wait_and_is_captured():
    context = Context((32, 8, 128), 1700)
    positions = torch.tensor([[900, 901], [20, 21], [1600, 1601]], device=CUDA)
    query, tables = values(3, 2, 32, 128), context.tables[[0, 1, 0]]
    for is_split in (False, True):
        run = partial(
            attention_ordered_decode, query, context.key, context.value, tables, positions, 1700, is_split=is_split
        )
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        first = positions.clone()
        for back in (0, 15, 500, 5000):
            positions.copy_(first - back)
            torch.cuda.set_sync_debug_mode("error")
            try:
                eager = run()
                graph.replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert same_bits(captured, eager)
        assert not captured.any()
        positions.copy_(first)


def test_the_self_test_holds():
    options = {"num_ranks": 4, "implementation": TRITON, "quantization": Quantization.FP8}
    check_invariance([(4096, 4096), (24_576, 4096)], torch.bfloat16, CUDA, **options)


SIZES = {"num_hidden_layers": 2, "vocab_size": 4096, "eos_token_id": 500}


def load(path, quantization=Quantization.NONE, with_mtp=False):
    model = load_model(
        path,
        dtype=torch.bfloat16,
        device=CUDA,
        numerics=Numerics.INVARIANT,
        with_mtp=with_mtp,
        random_seed=3,
        implementation=TRITON,
        quantization=quantization,
    )
    assert model.implementation is TRITON
    return model


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("kind", ["qwen3-8b", "qwen3-30b-a3b", "qwen3-0.6b"])
def test_logits_do_not_know_how_a_prompt_came(kind, quantization, tmp_path):
    """One chunk, several, token by token, drafts' rows, and with neighbours; heads of 128."""
    model = load(write_shape(kind, tmp_path, **SIZES), quantization)
    length, start = 700, 640
    ids = torch.randint(0, 4096, (length,), generator=torch.Generator().manual_seed(5)).to(CUDA)

    def paged(num_sequences=1):
        return Paged(model, num_sequences=num_sequences, capacity_len=768)

    one = paged()
    wanted = one.logits(one.prefill(ids))
    assert wanted.isfinite().all()
    for chunk_len in (512, 333, 64, 17):
        cut = paged()
        assert same_bits(cut.logits(cut.prefill(ids, chunk_len=chunk_len)), wanted), chunk_len
    for num_rows, neighbours in ((1, 0), (1, 40), (4, 0), (4, 20)):
        # Neighbours pad the batch: they write to the scratch block, where NaN may come from, and change nothing.
        several = paged()
        several.prefill(ids[:start])
        found = []
        for at in range(start, length, num_rows):
            batch = several.decode_batch([0] + [None] * neighbours, [at] + [0] * neighbours, num_rows, bound=768)
            tokens = torch.cat([ids[at : at + num_rows], ids[: neighbours * num_rows]])
            found.append(several.logits(several.trunk(tokens, batch)[:num_rows]))
        assert same_bits(torch.cat(found), wanted[start:]), (num_rows, neighbours)
    mixed = paged(2)
    mixed.prefill(ids[:start])
    other = ids.flip(0)[:300]
    hidden = mixed.trunk(torch.cat([other, ids[start:]]), mixed.prefill_batch([(1, 0, 300), (0, start, length)]))
    assert same_bits(mixed.logits(hidden)[300:], wanted[start:])


def test_drafts_do_not_know_how_a_prompt_came(tmp_path):
    """Entries of the MTP head in one piece, in several, and row by row as steps make them."""
    model = load(write_shape("qwen3-8b", tmp_path, **SIZES), with_mtp=True)
    length = 150
    ids = torch.randint(0, 4096, (length,), generator=torch.Generator().manual_seed(6)).to(CUDA)
    paged = Paged(model, capacity_len=192)
    hidden = paged.prefill(ids)
    wanted = paged.logits(paged.mtp(ids[1:], hidden[:-1], paged.prefill_batch([(0, 0, length - 1)])))
    assert wanted.isfinite().all()
    paged, found = Paged(model, capacity_len=192), []
    for start, end in ((0, 1), (1, 66), (66, 140)):
        found.append(paged.mtp(ids[start + 1 : end + 1], hidden[start:end], paged.prefill_batch([(0, start, end)])))
    for start in range(140, length - 1):
        batch = paged.decode_batch([0], [start], 1, bound=192)
        found.append(paged.mtp(ids[start + 1 : start + 2], hidden[start : start + 1], batch))
    assert same_bits(paged.logits(torch.cat(found)), wanted)
