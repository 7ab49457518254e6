"""From a GEMM to queries and the pool: Triton against the reference, the reference against the model's own steps."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels import tuning
from baton.kernels.implementation import Implementation
from baton.kernels.kv.write import kv_write
from baton.kernels.pointwise import qk_norm_rope_write_triton as in_triton
from baton.kernels.pointwise.head_halves_triton import half_len
from baton.kernels.pointwise.qk_norm_rope_write import HeadNorms, LayerPool, Rotation, qk_norm_rope_write
from baton.kernels.pointwise.rms_norm import rms_norm
from baton.kernels.pointwise.rope import rope, rope_angles, rope_inverse_frequencies
from baton.tests.kernels.harness import Guards, assert_deterministic, poison, same_bits, strided

CPU = torch.device("cpu")
TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
FLOAT8 = torch.float8_e4m3fn
ROWS = [1, 2, 7, 8, 15, 16, 63, 64, 65, 128]
MAX_POSITION = 300


def values(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Arguments of a call, drawn; the pool is poisoned, and its layer lies as `kvcache.pool` has it."""

    def __init__(
        self, num_tokens=5, heads=(4, 2, 16), *, dim=None, block_size=16, mode="token", gated=False, plus_one=False,
        interleaved=False, sections=None, alternating=False, scales=0, dtype=torch.bfloat16, slot_dtype=torch.int64,
        max_position=MAX_POSITION, normed=True, biased=False,
    ):  # fmt: skip
        self.num_query, num_kv, head_dim = heads
        dim = dim or head_dim
        generator = torch.Generator().manual_seed(num_tokens)
        width = (self.num_query * (1 + gated) + 2 * num_kv) * head_dim
        self.qkv_TX = values(num_tokens, width, dtype=dtype)
        self.bias_X = values(width, seed=3, dtype=dtype) if biased else None
        self.norms = HeadNorms(
            query_D=values(head_dim, seed=1, dtype=dtype), key_D=values(head_dim, seed=2, dtype=dtype), eps=1e-6,
            plus_one=plus_one,
        ) if normed else None  # fmt: skip
        shape = (3, num_tokens) if sections else (num_tokens,)
        positions = torch.randint(0, max_position, shape, generator=generator)
        inverse_F = rope_inverse_frequencies(dim, 1e6, torch.bfloat16, CPU)
        angles = {"inverse_F": inverse_F}
        if mode != "frequencies":
            rows = positions if mode == "token" else torch.arange(max_position)
            angles = {"tables": rope_angles(rows, inverse_F)}
        self.rotation = Rotation(dim=dim, interleaved=interleaved, sections=sections, alternating=alternating, **angles)
        self.positions = None if mode == "token" else positions
        num_blocks = num_tokens // block_size + 3
        self.slots_T = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(slot_dtype)
        self.shape = (num_blocks, num_kv, 2, block_size, head_dim)
        self.pool_dtype = FLOAT8 if scales else dtype
        self.scales = {}
        if scales:
            self.scales = {"key_scale": 0.01 + torch.rand(scales), "value_scale": 0.02 + torch.rand(scales)}
        self.gated = gated

    def pool(self):
        return poison(torch.empty(self.shape, dtype=self.pool_dtype))

    def compute(self, kind, data=None, rows=slice(None)):
        """Queries and the layer."""
        data = self.pool() if data is None else data
        rotation, positions = self.rotation, self.positions
        if positions is None:
            tables = tuple(table[rows] for table in rotation.tables)
            rotation = Rotation(dim=rotation.dim, tables=tables, interleaved=rotation.interleaved)
        else:
            positions = positions[..., rows]
        pool = LayerPool(key_NHSD=data[:, :, 0], value_NHSD=data[:, :, 1], **self.scales)
        query_THD = qk_norm_rope_write(
            self.qkv_TX[rows], self.norms, rotation, self.slots_T[rows], pool, num_query=self.num_query,
            bias_X=self.bias_X, positions=positions, gated=self.gated, implementation=kind,
        )  # fmt: skip
        return query_THD, data


def assert_close(found, wanted):
    """Sums in another order may round a value to the one beside it, seldom; NaN where nothing was written."""
    assert found.dtype == wanted.dtype
    step = {torch.bfloat16: 2**-6, FLOAT8: 2**-3, torch.float32: 1e-4}[found.dtype]
    found, wanted = found.float(), wanted.float()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.allclose(found, wanted, rtol=step, atol=1e-2 if step > 1e-3 else 1e-5, equal_nan=True)
    if step > 1e-3:
        assert ((found != wanted) & ~found.isnan()).float().mean() < 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"heads": (4, 2, 16)},
        {"heads": (7, 1, 128), "num_tokens": 3},
        {"heads": (32, 8, 128), "num_tokens": 1, "mode": "position"},
        {"heads": (4, 2, 128), "block_size": 64, "mode": "frequencies", "max_position": 1_000_000},
        {"heads": (4, 2, 64), "interleaved": True, "slot_dtype": torch.int32},
        {"heads": (4, 2, 96), "interleaved": True, "dim": 48, "mode": "position"},
        {"heads": (3, 3, 96)},
        {"heads": (4, 1, 256), "dim": 64, "gated": True, "plus_one": True, "num_tokens": 2},
        {"heads": (4, 2, 128), "mode": "frequencies", "sections": (16, 24, 24)},
        {"heads": (4, 2, 128), "mode": "position", "sections": (24, 20, 20), "alternating": True},
        {"heads": (4, 1, 256), "dim": 64, "gated": True, "mode": "frequencies", "sections": (11, 11, 10),
         "alternating": True, "num_tokens": 2},
        {"heads": (4, 2, 128), "scales": 1, "block_size": 64},
        {"heads": (4, 2, 128), "scales": 2},
        {"heads": (4, 2, 32), "dtype": torch.float32},
        {"heads": (4, 2, 128), "normed": False},
        {"heads": (4, 2, 64), "normed": False, "scales": 1, "mode": "position"},
        {"heads": (7, 1, 128), "normed": False, "biased": True, "num_tokens": 3},
        {"heads": (4, 2, 96), "biased": True, "interleaved": True, "dim": 48, "mode": "position"},
        {"heads": (4, 1, 256), "dim": 64, "gated": True, "biased": True, "num_tokens": 2},
    ],
)  # fmt: skip
def test_triton_is_as_the_reference(options):
    case = Case(**options)
    case.slots_T[len(case.slots_T) // 2] = -1
    found, wanted = case.compute(TRITON), case.compute(REFERENCE)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


@pytest.mark.fast
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_the_plain_form_is_what_models_compute(normed, biased):
    case = Case(9, (8, 2, 64), normed=normed, biased=biased)
    heads_TXD = (case.qkv_TX + case.bias_X if biased else case.qkv_TX).unflatten(1, (-1, 64))
    query_THD, key_THD, value_THD = heads_TXD.split([8, 2, 2], dim=1)
    data = case.pool()
    if normed:
        query_THD = rms_norm(query_THD, case.norms.query_D, 1e-6)
        key_THD = rms_norm(key_THD, case.norms.key_D, 1e-6)
    query_THD, key_THD = rope(query_THD, *case.rotation.tables), rope(key_THD, *case.rotation.tables)
    kv_write(key_THD, value_THD, case.slots_T, data[:, :, 0], data[:, :, 1])
    found_THD, found = case.compute(REFERENCE)
    assert same_bits(found_THD, query_THD)
    assert same_bits(found, data)


@pytest.mark.fast
@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_how_far_apart_tokens_are(interleaved):
    """Float64 and complex numbers: an independent way to turn."""
    case = Case(4, (1, 1, 32), dtype=torch.float32, mode="frequencies", interleaved=interleaved, dim=16)
    case.positions = torch.tensor([0, 5, 100, 131_072])
    inverse_F = case.rotation.inverse_F.double()
    turn_TF = torch.exp(1j * (case.positions[:, None].float() * case.rotation.inverse_F).double())
    x_TD = case.qkv_TX[:, :32].double()
    x_TD = x_TD / (x_TD.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * case.norms.query_D.double()
    turning_TR = x_TD[:, :16]
    pairs = (turning_TR[:, ::2], turning_TR[:, 1::2]) if interleaved else turning_TR.chunk(2, dim=1)
    turned_TF = torch.complex(*pairs) * turn_TF
    parts = [turned_TF.real, turned_TF.imag]
    turned_TR = torch.stack(parts, dim=-1).flatten(1) if interleaved else torch.cat(parts, dim=1)
    wanted_TD = torch.cat([turned_TR, x_TD[:, 16:]], dim=1)
    assert len(inverse_F) == 8
    for kind in (TRITON, REFERENCE):
        query_THD, _ = case.compute(kind)
        assert torch.allclose(query_THD[:, 0].double(), wanted_TD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [ROWS[:5], pytest.param(ROWS, marks=pytest.mark.slow)])
def test_a_row_depends_on_itself_alone(counts):
    case = Case(counts[-1], (4, 2, 64), mode="frequencies")
    whole_THD, whole = case.compute(TRITON)
    for num_tokens in counts[:-1]:
        first = counts[-1] - num_tokens if num_tokens % 2 else 0
        rows = slice(first, first + num_tokens)
        query_THD, data = case.compute(TRITON, rows=rows)
        assert same_bits(query_THD, whole_THD[rows]), num_tokens
        block_T, offset_T = case.slots_T[rows] // 16, case.slots_T[rows] % 16
        for part in (0, 1):
            assert same_bits(data[block_T, :, part, offset_T], whole[block_T, :, part, offset_T])


@pytest.mark.fast
def test_a_heads_squares_are_added_alike_in_every_division():
    """Every thread has a whole vector of a half, so that which threads share a head does not follow from a tile."""
    found = tuning.table()["qk_norm_rope_write"]
    assert len(found) >= 3
    for shape, sizes in found.items():
        head_dim = int(shape.split("/")[2])
        for options in sizes.values():
            assert options["heads"] * half_len(head_dim) >= 32 * 8 * options["num_warps"], shape
    for head_dim in (16, 96, 128, 256):
        assert 1 <= in_triton.rule(2, head_dim)["heads"] <= 2


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((8, 2, 16), {"heads": 2, "tiles": 4, "num_warps": 1}),
        ((5, 3, 32), {"heads": 2, "tiles": 2, "num_warps": 2}),
        ((6, 1, 16), {"heads": 4, "tiles": 2, "num_warps": 1}),
        ((6, 6, 16), {"heads": 1, "tiles": 4, "num_warps": 1}),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_any_division_gives_the_same(heads, options, num_tokens, monkeypatch):
    case = Case(num_tokens, heads)
    case.slots_T[num_tokens // 2] = -1
    wanted = case.compute(TRITON)
    monkeypatch.setattr(in_triton, "_tuned", lambda num_tokens, *rest: in_triton._of_options(
        tuple(options.items()), *rest))  # fmt: skip
    for one, other in zip(case.compute(TRITON), wanted, strict=True):
        assert same_bits(one, other)


def test_only_the_slots_are_written_and_each_once():
    case = Case(6, (4, 2, 32))
    case.slots_T[3] = -1
    guards = Guards()
    data = guards.empty(*case.shape)
    query_THD, _ = case.compute(TRITON, data)
    guards.check()
    written = torch.zeros(case.shape[0] * 16, dtype=torch.bool)
    written[case.slots_T[case.slots_T >= 0]] = True
    is_nan = data.isnan().movedim(3, 1).flatten(0, 1).flatten(1)
    assert torch.equal(~is_nan.any(dim=1), written)
    assert torch.equal(~is_nan.all(dim=1), written)
    assert not query_THD.isnan().any()


def test_strides_and_two_runs():
    case = Case(5, (4, 2, 32), mode="position")
    wanted_THD, wanted = case.compute(TRITON)
    case.qkv_TX = strided(case.qkv_TX)
    inputs = (case.qkv_TX, case.slots_T, case.positions, case.norms.query_D, case.norms.key_D)
    found_THD, found = assert_deterministic(lambda: case.compute(TRITON), *inputs)
    assert same_bits(found_THD, wanted_THD)
    assert same_bits(found, wanted)


def test_gates_stay_and_garbage_of_padding_rows_stays_there():
    case = Case(4, (2, 1, 32), gated=True)
    poison(case.qkv_TX[2])
    case.slots_T[2] = -1
    before_TX = case.qkv_TX.clone()
    query_THD, data = case.compute(TRITON)
    assert same_bits(case.qkv_TX, before_TX)
    assert query_THD[2].isnan().all()
    assert not query_THD[[0, 1, 3]].isnan().any()
    other_THD, _ = case.compute(REFERENCE)
    assert_close(query_THD, other_THD)
    assert (~data.isnan()).sum() == 3 * 2 * 32


@pytest.mark.fast
def test_no_tokens():
    assert Case(0, (4, 2, 16)).compute(TRITON)[0].shape == (0, 4, 16)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("qkv_TX", lambda case: {"qkv_TX": case.qkv_TX[:, :-1]}),
        ("qkv_TX", lambda case: {"qkv_TX": case.qkv_TX.T.contiguous().T}),
        ("qkv_TX", lambda case: {"gated": True}),
        ("num_query", lambda case: {"num_query": 0}),
        ("bias_X", lambda case: {"bias_X": values(127)}),
        ("bias_X", lambda case: {"bias_X": values(128).float()}),
        ("query_D", lambda case: {"norms": HeadNorms(query_D=values(8), key_D=values(16), eps=1e-6)}),
        ("key_D", lambda case: {"norms": HeadNorms(query_D=values(16), key_D=values(16).float(), eps=1e-6)}),
        ("slots_T", lambda case: {"slots_T": case.slots_T[1:]}),
        ("slots_T", lambda case: {"slots_T": case.slots_T.float()}),
        ("key_NHSD", lambda case: {"pool": LayerPool(key_NHSD=values(4, 2, 16), value_NHSD=values(4, 2, 16))}),
        ("key_scale", lambda case: {"pool": pool_of(case, FLOAT8)}),
        ("value_scale", lambda case: {"pool": pool_of(case, FLOAT8, torch.ones(2), torch.ones(1))}),
        ("key_scale", lambda case: {"pool": pool_of(case, FLOAT8, torch.ones(3), torch.ones(3))}),
        ("key_scale", lambda case: {"pool": pool_of(case, torch.bfloat16, torch.ones(1), torch.ones(1))}),
        ("value_NHSD", lambda case: {"pool": uneven_pool_of(case)}),
        ("dim", lambda case: {"rotation": Rotation(dim=15, inverse_F=torch.ones(7))}),
        ("dim", lambda case: {"rotation": Rotation(dim=32, inverse_F=torch.ones(16))}),
        ("tables", lambda case: {"rotation": Rotation(dim=16)}),
        ("tables", lambda case: {"rotation": Rotation(dim=16, tables=(torch.ones(4, 8), torch.ones(4, 8)))}),
        ("positions", lambda case: {"rotation": Rotation(dim=16, inverse_F=torch.ones(8))}),
        ("inverse_F", lambda case: {"rotation": Rotation(dim=16, inverse_F=torch.ones(7)), "positions": case.slots_T}),
        ("sections", lambda case: {"rotation": Rotation(dim=16, inverse_F=torch.ones(8), sections=(3, 3, 3))}),
        ("positions", lambda case: {"positions": case.slots_T[:2]}),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(argument, change):
    case = Case(5, (4, 2, 16))
    data = case.pool()
    given = {
        "qkv_TX": case.qkv_TX,
        "norms": case.norms,
        "rotation": case.rotation,
        "slots_T": case.slots_T,
        "pool": LayerPool(key_NHSD=data[:, :, 0], value_NHSD=data[:, :, 1]),
        "num_query": 4,
    }
    with pytest.raises(KernelArgumentInvalid, match=argument) as caught:
        qk_norm_rope_write(**given | change(case))
    assert caught.value.fields["argument"] == argument


def pool_of(case, dtype, key_scale=None, value_scale=None):
    data = torch.zeros(case.shape).to(dtype)
    return LayerPool(key_NHSD=data[:, :, 0], value_NHSD=data[:, :, 1], key_scale=key_scale, value_scale=value_scale)


def uneven_pool_of(case):
    return LayerPool(key_NHSD=case.pool()[:, :, 0], value_NHSD=case.pool()[1:, :, 1])
