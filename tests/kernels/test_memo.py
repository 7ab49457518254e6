"""Decisions that are kept: never for another call than the one they were made for, and never for a wrong one."""

import importlib
import itertools
from dataclasses import replace

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.attention.decode import attention_decode
from baton.kernels.attention.prefill import attention_prefill
from baton.kernels.gemm.fp8 import gemm_fp8, linear_fp8, linear_quantized
from baton.kernels.gemm.fp8_weight import Fp8Weight, quantize_weight
from baton.kernels.gemm.quantize_fp8 import Fp8Rows, quantize_fp8
from baton.kernels.implementation import Implementation
from baton.kernels.memo import Memo, open_signature, signature
from baton.kernels.mla.absorb import absorb_queries, absorb_values
from baton.kernels.mla.norm_rope_write import latent_norm_rope_write
from baton.kernels.moe.gemm import experts_grouped
from baton.kernels.moe.moe import ExpertWeights
from baton.kernels.moe.select_topk import select_topk
from baton.kernels.pointwise.qk_norm_rope_write import HeadNorms, LayerPool, Rotation, qk_norm_rope_write
from baton.kernels.pointwise.rms_norm import rms_norm_fused
from baton.kernels.pointwise.sigmoid_gate import add_shared, gate_output
from baton.kernels.pointwise.silu_mul import silu_mul_fused

pytestmark = pytest.mark.fast
REFERENCE = Implementation.REFERENCE
BF16 = torch.bfloat16


def test_a_signature_is_all_that_checks_read():
    x = torch.zeros(8, 8)
    same = [torch.zeros(8, 8), x]
    other = [x.t(), x[:, :4], x[1:], x.double(), x.to("meta"), x.view(-1)[:64].view(4, 16), None]
    # Where the first number lies within 16 bytes.
    shifted = torch.zeros(65)[1:].view(8, 8)
    assert {signature(item) for item in same} == {signature(x)}
    found = [signature(item) for item in [x, *other, shifted]]
    assert all(left != right for left, right in itertools.combinations(found, 2))


def test_an_open_signature_leaves_out_how_many_there_are():
    def found(x, num_open=1):
        return open_signature(x, num_open)

    x = torch.zeros(8, 4, 8)
    assert {found(torch.zeros(rows, 4, 8)) for rows in (1, 3, 8)} == {found(x)}
    others = [
        x.double(),
        x.to("meta"),
        x[:, :2],
        x[..., ::2],
        torch.zeros(8, 8),
        torch.zeros(8, 4, 4),
        x.transpose(0, 1),
    ]
    assert len({found(item) for item in [x, *others]}) == 1 + len(others)
    table = torch.zeros(5, 9)
    assert {found(torch.zeros(*sizes), 2) for sizes in ((5, 9), (1, 1), (4, 64))} == {found(table, 2)}
    assert found(torch.zeros(5, 18)[:, ::2], 2) != found(table, 2), "strided"
    assert found(torch.zeros(5), 1) != found(torch.zeros(10)[::2], 1)


def test_chunks_of_any_length_are_decided_alike():
    """Rows, sequences and columns differ from step to step; what is checked does not depend on how many there are."""
    forget()
    _, right, _ = prefill()
    for count, length, columns in ((1, 1, 2), (1, 7, 2), (2, 3, 4), (3, 8, 3), (2, 16, 2)):
        rows = {"query_TAD": tensor(count * length, 4, 32), "max_query_len": length}
        rows["block_tables_BM"] = torch.zeros(count, columns, dtype=torch.int64)
        rows["query_starts_E"] = torch.arange(count + 1) * length
        rows["context_lens_B"] = torch.full((count,), 16)
        attention_prefill_module = importlib.import_module("baton.kernels.attention.prefill")
        attention_prefill(**{**right, **rows}, implementation=REFERENCE)
        assert len(attention_prefill_module._KINDS) == 1
    wrong = rows | {"context_lens_B": torch.full((3,), 16)}
    with pytest.raises(KernelArgumentInvalid, match="context_lens_B"):
        attention_prefill(**{**right, **wrong}, implementation=REFERENCE)


def test_a_memo_is_bounded():
    memo = Memo(max_entries=3)
    for number in range(10):
        assert memo.find(number) is None
        assert memo.keep(number, -number) == -number
        assert memo.find(number) == -number
        assert len(memo) <= 3


def tensor(*shape, dtype=BF16):
    return torch.ones(shape, dtype=dtype)


def rms_norm():
    right = {"x_TD": tensor(4, 256), "weight_D": tensor(256), "eps": 1e-6, "residual_TD": tensor(4, 256)}
    right |= {"num_padded": 8}
    return rms_norm_fused, right, {"num_padded": [3], "residual_TD": [tensor(5, 256)]}


def silu_mul():
    return silu_mul_fused, {"gate_up_TJ": tensor(4, 512), "num_padded": 4}, {"num_padded": [3]}


def gated():
    return gate_output, {"mixed_TQ": tensor(3, 64), "gate_TAE": tensor(3, 2, 2, 32)[:, :, 1]}, {}


def shared():
    right = {"mixed_TD": tensor(3, 64), "shared_TD": tensor(3, 64), "gate_T1": tensor(3, 1)}
    return add_shared, right, {"gate_T1": [tensor(2, 1), tensor(3, 2)]}


def latents():
    right = {"query_TAE": tensor(3, 2, 48), "latent_TC": tensor(3, 64), "turning_TR": tensor(3, 16)}
    right |= {"norm": (tensor(64), 1e-6), "angles": (tensor(3, 8, dtype=torch.float32),) * 2, "interleaved": True}
    right |= {"slots_T": torch.arange(3), "rows_NSX": tensor(4, 16, 80)}
    wrong = {
        "norm": [(tensor(32), 1e-6)],
        "angles": [(tensor(3, 7, dtype=torch.float32),) * 2],
        "rows_NSX": [tensor(4, 16, 64)],
        "slots_T": [torch.arange(4)],
    }
    return latent_norm_rope_write, right, wrong


def queries():
    return (
        absorb_queries,
        {"query_TAE": tensor(3, 2, 48), "key_ANC": tensor(2, 32, 64)},
        {"key_ANC": [tensor(2, 48, 64)]},
    )


def head_values():
    right = {"mixed_TAC": tensor(3, 2, 64), "value_AVC": tensor(2, 64, 64), "num_padded": 4}
    return absorb_values, right, {"num_padded": [2], "value_AVC": [tensor(2, 96, 64), tensor(2, 64, 32)]}


def qk():
    pool = LayerPool(key_NHSD=tensor(4, 2, 16, 32), value_NHSD=tensor(4, 2, 16, 32))
    tables = tensor(3, 16, dtype=torch.float32), tensor(3, 16, dtype=torch.float32)
    rotation = Rotation(dim=32, tables=tables)
    norms = HeadNorms(query_D=tensor(32), key_D=tensor(32), eps=1e-6)
    right = {"qkv_TX": tensor(3, 8 * 32), "norms": norms, "rotation": rotation, "slots_T": torch.arange(3)}
    right |= {"pool": pool, "num_query": 4}
    float8 = tensor(4, 2, 16, 32).to(torch.float8_e4m3fn)
    wrong = {
        "norms": [replace(norms, query_D=tensor(16)), replace(norms, key_D=tensor(32, dtype=torch.float32))],
        "rotation": [
            replace(rotation, dim=31),
            replace(rotation, tables=(tables[0], tables[1][:2])),
            replace(rotation, tables=None),
            replace(rotation, sections=(8, 4, 4)),
        ],
        "pool": [
            replace(pool, value_NHSD=tensor(4, 2, 8, 32)),
            replace(pool, key_scale=tensor(1, dtype=torch.float32)),
            LayerPool(key_NHSD=float8, value_NHSD=float8),
        ],
        "num_query": [3, 0],
        "bias_X": [tensor(7), tensor(8 * 32, dtype=torch.float32)],
        "gated": [True],
        "positions": [torch.arange(4)],
    }
    return qk_norm_rope_write, right, wrong


def kv():
    return tensor(4, 2, 16, 32), tensor(4, 2, 16, 32), torch.arange(4).view(2, 2)


def decode():
    key, value, tables = kv()
    right = {"query_BQAD": tensor(2, 2, 4, 32), "key_NHSD": key, "value_NHSD": value, "block_tables_BM": tables}
    right |= {"positions_BQ": torch.tensor([[3, 4], [7, 8]]), "max_context_len": 16}
    wrong = {
        "max_context_len": [0],
        "softmax_scale": [-1.0],
        "key_scale": [tensor(1, dtype=torch.float32)],
        "value_NHSD": [value.transpose(0, 1).contiguous().transpose(0, 1)],
    }
    return attention_decode, right, wrong


def prefill():
    key, value, tables = kv()
    right = {"query_TAD": tensor(5, 4, 32), "key_NHSD": key, "value_NHSD": value, "block_tables_BM": tables}
    right |= {"query_starts_E": torch.tensor([0, 2, 5]), "context_lens_B": torch.tensor([4, 9]), "max_query_len": 3}
    wrong = {"max_query_len": [-1], "scale": [-1.0], "key_scale": [tensor(1, dtype=torch.float32)]}
    return attention_prefill, right, wrong


def experts():
    weights = ExpertWeights(gate_up_EJD=tensor(4, 256, 128), down_EDI=tensor(4, 128, 128))
    right = {"x_TD": tensor(3, 128), "weight_TK": tensor(3, 2, dtype=torch.float32)}
    right |= {"expert_TK": torch.tensor([[0, 1], [2, 3], [1, 0]]), "weights": weights}
    wrong = {
        "weights": [
            replace(weights, down_EDI=tensor(4, 128, 64)),
            replace(weights, gate_up_EJD=tensor(4, 128, 256).transpose(1, 2)),
            replace(weights, gate_up_EJD=tensor(4, 256, 128, dtype=torch.float32)),
        ]
    }
    return experts_grouped, right, wrong


def topk():
    right = {"logits_TE": tensor(3, 16), "num_chosen": 4, "bias_E": tensor(16, dtype=torch.float32)}
    right |= {"num_groups": 4, "num_kept_groups": 2}
    wrong = {"num_chosen": [0, 9], "num_groups": [3], "num_kept_groups": [0, 5], "expert_dtype": [torch.int16]}
    return select_topk, right, wrong


def gemm():
    weight = quantize_weight(tensor(256, 256))
    a_MK, scales_GM = quantize_fp8(tensor(4, 256))
    right = {"a_MK": a_MK, "scales_GM": scales_GM, "weight": weight, "out_MN": tensor(4, 256)}
    wrong = {"num_sms": [0], "weight": [quantize_weight(tensor(256, 128)), quantize_weight(tensor(128, 256))]}
    return gemm_fp8, right, wrong


def linear():
    weight = quantize_weight(tensor(256, 256))
    right = {"x_MK": tensor(4, 256), "weight": weight, "out_MN": tensor(4, 256)}
    other = Fp8Weight(weight.values_NK[:128], weight.scales_BG[:1])
    return linear_fp8, right, {"num_sms": [-1], "weight": [quantize_weight(tensor(256, 128)), other]}


def quantized():
    """There is no reference: rows are quantized for Triton alone."""

    def multiplied(values_RK, scales_GR, num_rows, weight, implementation):
        rows = Fp8Rows(values_RK, scales_GR, num_rows)
        return linear_quantized(rows, weight, invariant=True, implementation=Implementation.TRITON)

    values_RK, scales_GR = quantize_fp8(tensor(4, 256))
    right = {"values_RK": values_RK, "scales_GR": scales_GR, "num_rows": 4, "weight": quantize_weight(tensor(64, 256))}
    wrong = {"num_rows": [0, 3, 5], "weight": [quantize_weight(tensor(256, 128))]}
    return multiplied, right, wrong


def bent(value):
    """What fits in nothing: of other dtypes, shapes, strides and devices."""
    yield value.to(torch.int16)
    yield value.to("meta")
    yield value[None]
    yield torch.cat([value, value])
    if value.dim() > 1:
        yield torch.cat([value, value], dim=-1)
        yield value.repeat_interleave(2, dim=-1)[..., ::2]  # strided columns
    elif value.shape[-1] > 1:
        yield value.repeat_interleave(2)[::2]


MODULES = ("attention.decode", "attention.prefill", "gemm.fp8", "mla.absorb", "moe.gemm", "moe.select_topk",
           "pointwise.qk_norm_rope_write", "pointwise.rms_norm", "pointwise.sigmoid_gate",
           "pointwise.silu_mul")  # fmt: skip


def forget():
    found = [importlib.import_module(f"baton.kernels.{name}") for name in MODULES]
    memos = [value for module in found for value in vars(module).values() if isinstance(value, Memo)]
    assert len(memos) == len(MODULES) + 4
    for memo in memos:
        memo._kept.clear()


CASES = (
    rms_norm,
    silu_mul,
    gated,
    shared,
    qk,
    latents,
    queries,
    head_values,
    decode,
    prefill,
    experts,
    topk,
    gemm,
    linear,
    quantized,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.long
def test_a_kept_decision_lets_no_wrong_argument_pass(case):
    """Whatever is refused by who has seen nothing is refused, in the same words, by who has seen the right call."""
    function, right, wrong = case()
    names = [name for name, value in right.items() if isinstance(value, torch.Tensor)]
    calls = [{**right, name: value} for name in names for value in bent(right[name])]
    calls += [{**right, name: value} for name, values in wrong.items() for value in values]
    num_refused = 0
    for arguments in calls:
        said = []
        forget()
        for _ in range(2):
            try:
                function(**arguments, implementation=REFERENCE)
            except KernelArgumentInvalid as error:
                said.append(str(error))
            except (RuntimeError, NotImplementedError):  # of a reference: no check has refused it
                said.append("passed")
            else:
                said.append("passed")
            function(**right, implementation=REFERENCE)
        assert said[0] == said[1]
        num_refused += said[0] != "passed"
    assert num_refused >= len(calls) * 0.6
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(KernelArgumentInvalid):
                function(**{**right, name: value}, implementation=REFERENCE)


def test_what_computes_is_a_part_of_the_call():
    """A call that torch was asked for is no answer to one that Triton is."""
    right = decode()[1]
    attention_decode(**right, implementation=REFERENCE)
    with pytest.raises(KernelArgumentInvalid, match="block_tables_BM"):
        attention_decode(**right | {"block_tables_BM": torch.arange(4)}, implementation=REFERENCE)
    odd = right | {
        "query_BQAD": tensor(2, 2, 4, 24),
        "key_NHSD": tensor(4, 2, 16, 24),
        "value_NHSD": tensor(4, 2, 16, 24),
    }
    attention_decode(**odd, implementation=REFERENCE)
    with pytest.raises(KernelArgumentInvalid, match="D is 24"):
        attention_decode(**odd, implementation=Implementation.TRITON)
    attention_decode(**odd, implementation=REFERENCE)
