"""From latent projections to queries and rows: Triton against the reference, and against complex numbers."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.implementation import Implementation
from baton.kernels.mla.norm_rope_write import latent_norm_rope_write
from baton.kernels.pointwise.rope import rope_angles, rope_inverse_frequencies
from baton.tests.kernels.harness import Guards, assert_deterministic, poison, same_bits
from baton.tests.kernels.test_qk_norm_rope_write import assert_close, values

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
EPS = 1e-6


class Case:
    """Arguments of a call, drawn: latents and key columns side by side, as a GEMM leaves them, and a poisoned pool."""

    def __init__(
        self, num_tokens=5, num_heads=3, nope_dim=32, latent_dim=64, turned_dim=16, *, interleaved=True, block_size=16,
        dtype=torch.bfloat16, slot_dtype=torch.int64, is_view=False,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(num_tokens)
        head_dim = nope_dim + turned_dim
        columns = num_heads * head_dim
        self.down_TX = values(num_tokens, columns + latent_dim + turned_dim, dtype=dtype)
        query_TX, self.latent_TC, self.turning_TR = self.down_TX.split([columns, latent_dim, turned_dim], dim=1)
        self.query_TAE = (query_TX if is_view else query_TX.contiguous()).unflatten(1, (num_heads, head_dim))
        self.norm = values(latent_dim, seed=1, dtype=dtype), EPS
        self.inverse_F = rope_inverse_frequencies(turned_dim, 1e4, torch.bfloat16, torch.device("cpu"))
        self.positions_T = torch.randint(0, 100_000, (num_tokens,), generator=generator)
        self.angles = rope_angles(self.positions_T, self.inverse_F)
        num_blocks = num_tokens // block_size + 3
        self.slots_T = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(slot_dtype)
        self.shape = num_blocks, block_size, latent_dim + turned_dim
        self.interleaved, self.turned_dim, self.dtype = interleaved, turned_dim, dtype

    def compute(self, kind, rows_NSX=None, at=slice(None), **changes):
        """Queries and the pool's layer; the case's own queries stay as they are."""
        rows_NSX = poison(torch.empty(self.shape, dtype=self.dtype)) if rows_NSX is None else rows_NSX
        query_TAE = self.query_TAE[at].clone(memory_format=torch.preserve_format)
        given = {
            "query_TAE": query_TAE,
            "latent_TC": self.latent_TC[at],
            "turning_TR": self.turning_TR[at],
            "norm": self.norm,
            "angles": tuple(table_TF[at] for table_TF in self.angles),
            "slots_T": self.slots_T[at],
            "rows_NSX": rows_NSX,
        }
        found_TAE = latent_norm_rope_write(**given | changes, interleaved=self.interleaved, implementation=kind)
        return found_TAE, rows_NSX


@pytest.mark.parametrize(
    "options",
    [
        {"num_tokens": 1, "num_heads": 16, "nope_dim": 128, "latent_dim": 512, "turned_dim": 64},
        {"num_tokens": 3, "num_heads": 8, "nope_dim": 128, "latent_dim": 512, "turned_dim": 64, "interleaved": False},
        {"num_heads": 1},
        {"num_heads": 9, "turned_dim": 32, "block_size": 64, "slot_dtype": torch.int32},
        {"num_heads": 20, "latent_dim": 16, "interleaved": False},
        {"num_tokens": 17, "is_view": True},
        {"dtype": torch.float32},
        {"dtype": torch.float16, "nope_dim": 16},
    ],
)
def test_triton_is_as_the_reference(options):
    case = Case(**options)
    found, wanted = case.compute(TRITON), case.compute(REFERENCE)
    turning = slice(case.query_TAE.shape[2] - case.turned_dim, None)
    assert same_bits(found[0], wanted[0]), "a rotation has no sums"
    assert same_bits(found[0][..., : turning.start], case.query_TAE[..., : turning.start])
    assert not same_bits(found[0][..., turning], case.query_TAE[..., turning])
    if case.dtype is torch.float16:
        assert torch.allclose(found[1].float(), wanted[1].float(), rtol=2**-9, atol=1e-3, equal_nan=True)
    else:
        assert_close(found[1], wanted[1])


@pytest.mark.fast
@pytest.mark.parametrize("kind", [TRITON, REFERENCE])
@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_what_complex_numbers_and_float64_say(interleaved, kind):
    case = Case(4, 2, 16, 32, 16, interleaved=interleaved, dtype=torch.float32)

    def turned(x):
        pairs = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        turn_TF = torch.exp(1j * (case.positions_T[:, None].float() * case.inverse_F).double())
        turned = torch.complex(*(half.double() for half in pairs)) * turn_TF.view(4, *[1] * (x.dim() - 2), -1)
        parts = [turned.real, turned.imag]
        return torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)

    query_TAE, rows_NSX = case.compute(kind)
    assert torch.allclose(query_TAE[..., 16:].double(), turned(case.query_TAE[..., 16:]), rtol=1e-5, atol=1e-5)
    latent_TC = case.latent_TC.double()
    latent_TC = latent_TC / (latent_TC.square().mean(dim=1, keepdim=True) + EPS).sqrt() * case.norm[0].double()
    wanted_TX = torch.cat([latent_TC, turned(case.turning_TR)], dim=1)
    row_TX = rows_NSX[case.slots_T // 16, case.slots_T % 16]
    assert torch.allclose(row_TX.double(), wanted_TX, rtol=1e-5, atol=1e-5)


def test_only_the_slots_are_written():
    case, guards = Case(6, 9), Guards()
    rows_NSX, query_TAE = guards.empty(*case.shape), guards.copy(case.query_TAE)
    case.compute(TRITON, rows_NSX, query_TAE=query_TAE)
    guards.check()
    written = torch.zeros(case.shape[0] * 16, dtype=torch.bool)
    written[case.slots_T] = True
    is_nan = rows_NSX.isnan().flatten(0, 1)
    assert torch.equal(~is_nan.any(dim=1), written)
    assert torch.equal(~is_nan.all(dim=1), written)


def test_a_view_of_a_wider_tensor_loses_nothing_beside_it():
    case = Case(5, 2, is_view=True)
    before_TX, columns = case.down_TX.clone(), case.query_TAE[0].numel()
    query_TAE, _ = case.compute(TRITON, query_TAE=case.query_TAE)
    assert query_TAE.data_ptr() == case.down_TX.data_ptr()
    assert same_bits(case.down_TX[:, columns:], before_TX[:, columns:])
    assert not same_bits(case.down_TX[:, :columns], before_TX[:, :columns])


def test_a_row_depends_on_itself_alone_and_two_runs_agree():
    case = Case(17, 9)
    whole_TAE, whole = assert_deterministic(lambda: case.compute(TRITON), case.latent_TC, case.slots_T, *case.angles)
    for at in (slice(0, 1), slice(3, 8), slice(16, 17)):
        query_TAE, rows_NSX = case.compute(TRITON, at=at)
        assert same_bits(query_TAE, whole_TAE[at])
        places = case.slots_T[at] // 16, case.slots_T[at] % 16
        assert same_bits(rows_NSX[places], whole[places])


@pytest.mark.fast
def test_no_tokens():
    assert Case(0).compute(TRITON)[0].shape == (0, 3, 48)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query_TAE", lambda case: {"query_TAE": case.query_TAE.transpose(1, 2).contiguous().transpose(1, 2)}),
        ("query_TAE", lambda case: {"query_TAE": case.query_TAE.double()}),
        ("latent_TC", lambda case: {"latent_TC": case.latent_TC[1:]}),
        ("latent_TC", lambda case: {"latent_TC": case.latent_TC.float()}),
        ("latent_TC", lambda case: {"latent_TC": case.latent_TC[:, :48]}),
        ("latent_TC", lambda case: {"turning_TR": case.turning_TR[:, :8]}),
        ("turning_TR", lambda case: {"turning_TR": case.turning_TR.T.contiguous().T}),
        ("turning_TR", lambda case: {"query_TAE": case.query_TAE[..., :8].contiguous()}),
        ("weight_C", lambda case: {"norm": (case.norm[0][1:], EPS)}),
        ("weight_C", lambda case: {"norm": (case.norm[0].float(), EPS)}),
        ("angles", lambda case: {"angles": tuple(table[:, 1:] for table in case.angles)}),
        ("angles", lambda case: {"angles": tuple(table.double() for table in case.angles)}),
        ("angles", lambda case: {"angles": (case.angles[0], torch.cat(case.angles, dim=1)[:, 8:])}),
        ("slots_T", lambda case: {"slots_T": case.slots_T[1:]}),
        ("slots_T", lambda case: {"slots_T": case.slots_T.float()}),
        ("rows_NSX", lambda case: {"rows_NSX": torch.zeros(4, 16, 79).bfloat16()}),
        ("rows_NSX", lambda case: {"rows_NSX": torch.zeros(4, 16, 80)}),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(argument, change):
    case = Case()
    with pytest.raises(KernelArgumentInvalid, match=argument) as caught:
        case.compute(TRITON, **change(case))
    assert caught.value.fields["argument"] == argument
