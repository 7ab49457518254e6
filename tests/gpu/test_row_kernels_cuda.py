"""On a GPU: norms, gates, writes to the pool, copies and padding, eager and in graphs, against their references."""

import itertools
from dataclasses import replace

import pytest
import torch

from baton.kernels import fused_copy_triton
from baton.kernels.fused_copy import fused_copy
from baton.kernels.gemm.quantize_fp8 import quantize_fp8
from baton.kernels.implementation import Implementation
from baton.kernels.mla.norm_rope_write import latent_norm_rope_write
from baton.kernels.moe.summands import Summands, add_up
from baton.kernels.pointwise import qk_norm_rope_write_triton, rms_norm_triton, silu_mul_triton
from baton.kernels.pointwise.qk_norm_rope_write import HeadNorms, LayerPool, Rotation, qk_norm_rope_write
from baton.kernels.pointwise.rms_norm import rms_norm_fused
from baton.kernels.pointwise.rope import rope_angles, rope_inverse_frequencies
from baton.kernels.pointwise.sigmoid_gate import add_shared, gate_output
from baton.kernels.pointwise.silu_mul import silu_mul_fused
from baton.tests.kernels.harness import Guards, poison, same_bits
from baton.tests.kernels.test_fused_copy import noise

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
REFERENCE = Implementation.REFERENCE
FLOAT8 = torch.float8_e4m3fn
ROWS = (1, 2, 7, 8, 15, 16, 63, 64, 65, 128)
EPS = 1e-6


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.manual_seed(0)


def values(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=CUDA).to(dtype)


def assert_close(found, wanted, most_unequal=0.01):
    """Sums in another order may round a value to the one beside it, seldom; float8 values are farther apart."""
    assert found.dtype == wanted.dtype
    step = 2**-3 if found.dtype == FLOAT8 else 2**-6
    found, wanted = found.float(), wanted.float()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.allclose(found, wanted, rtol=step, atol=2e-2, equal_nan=True)
    assert ((found != wanted) & ~found.isnan()).float().mean() < most_unequal


def replayed(compute):
    """What a captured call gives, replayed twice; nothing in it may wait for the device."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            compute()
            graph.capture_begin(capture_error_mode="thread_local")
            results = compute()
            graph.capture_end()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    return [None if result is None else result.clone() for result in results]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or same_bits(one, other)


NORMS = [
    (4096, {}),
    (4096, {"residual": True}),
    (4096, {"residual": True, "fp8": True}),
    (5120, {"residual": True, "fp8": True}),
    (2048, {"residual": True, "plus_one": True}),
    (2048, {"residual": True, "plus_one": True, "fp8": True}),
]


def norm(x_TD, weight_D, other_TD, form, implementation=Implementation.AUTO):
    named = {"plus_one": "plus_one" in form, "residual_TD": other_TD if "residual" in form else None}
    named["num_padded"] = len(x_TD) if "fp8" in form else None
    found = rms_norm_fused(x_TD, weight_D, EPS, **named, implementation=implementation)
    return found.rows, found.sum_TD, found.scale_GR


@pytest.mark.parametrize(("length", "form"), NORMS)
def test_norms(length, form):
    x_TD, other_TD, weight_D = values(2049, length), values(2049, length), values(length)
    found, wanted = norm(x_TD, weight_D, other_TD, form), norm(x_TD, weight_D, other_TD, form, REFERENCE)
    assert_close(found[0], wanted[0])
    if found[1] is not None:
        assert same_bits(found[1], wanted[1])
    if found[2] is not None:
        assert torch.allclose(found[2], wanted[2], rtol=2**-6)
    assert_same(replayed(lambda: norm(x_TD, weight_D, other_TD, form)), found)


@pytest.mark.parametrize(("length", "form"), NORMS)
def test_the_norm_of_a_row_depends_on_it_alone(length, form):
    x_TD, other_TD, weight_D = values(2049, length), values(2049, length), values(length)
    whole = norm(x_TD, weight_D, other_TD, form)
    for num_rows in ROWS:
        cut = slice(2049 - num_rows, 2049)
        rows, sum_TD, scale = norm(x_TD[cut], weight_D, other_TD[cut], form)
        assert same_bits(rows, whole[0][cut]), num_rows
        assert sum_TD is None or same_bits(sum_TD, whole[1][cut])
        assert scale is None or same_bits(scale, whole[2][:, cut].contiguous())


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("length", [1536, 2048, 4096, 5120, 7168])
def test_float8_norms_are_as_if_quantized_afterwards(length, plus_one):
    """To the bit: a model's answers must not depend on which launch makes float8."""
    x_TD, other_TD, weight_D = values(65, length), values(65, length), values(length)
    for residual_TD in (None, other_TD):
        given = {"residual_TD": residual_TD, "plus_one": plus_one}
        found = rms_norm_fused(x_TD, weight_D, EPS, **given, num_padded=68)
        plain = rms_norm_fused(x_TD, weight_D, EPS, **given)
        kept = rms_norm_fused(x_TD, weight_D, EPS, **given, num_padded=68, keep=True)
        wanted_RD, scale_GR = quantize_fp8(plain.rows, pad_to=4)
        assert_same([found.rows, found.scale_GR, found.sum_TD], [wanted_RD, scale_GR, plain.sum_TD])
        assert_same([kept.rows, kept.scale_GR, kept.kept_TD], [wanted_RD, scale_GR, plain.rows])
        assert found.rows[65:].float().eq(0).all()
        assert found.scale_GR[:, 65:].eq(1).all()


@pytest.mark.parametrize("length", [512, 1536, 12_288, 18_432])
def test_float8_gates_are_as_if_quantized_afterwards(length):
    for num_rows in (1, 65, 2049):
        gate_up_TJ, num_padded = values(num_rows, 2 * length), -(-num_rows // 4) * 4
        found = silu_mul_fused(gate_up_TJ, num_padded=num_padded)
        wanted_RI, scale_GR = quantize_fp8(silu_mul_fused(gate_up_TJ).rows, pad_to=4)
        assert_same([found.rows, found.scale_GR], [wanted_RI, scale_GR])


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("length", [12_288, 768, 128])
def test_gates(length, quantize):
    gate_up_TJ = values(2049, 2 * length)

    def compute(rows=slice(None), implementation=Implementation.AUTO):
        given_TJ = gate_up_TJ[rows]
        found = silu_mul_fused(given_TJ, num_padded=len(given_TJ) if quantize else None, implementation=implementation)
        return found.rows, found.scale_GR

    found, wanted = compute(), compute(implementation=REFERENCE)
    assert_close(found[0], wanted[0])
    assert not quantize or torch.allclose(found[1], wanted[1], rtol=2**-6)
    assert_same(replayed(compute), found)
    for num_rows in ROWS:
        rows, scale = compute(slice(0, num_rows))
        assert same_bits(rows, found[0][:num_rows]), num_rows
        assert scale is None or same_bits(scale, found[1][:, :num_rows].contiguous())


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_heads", [128, 16, 9])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 4096])
def test_latents(num_tokens, num_heads, interleaved):
    columns = num_heads * 192
    down_TX, query_TX = values(num_tokens, 1536 + 576), values(num_tokens, columns)
    positions_T = torch.randint(0, 100_000, (num_tokens,), device=CUDA)
    angles = rope_angles(positions_T, rope_inverse_frequencies(64, 1e4, torch.bfloat16, CUDA))
    num_blocks = num_tokens // 16 + 3
    slots_T = torch.randperm(num_blocks * 16, device=CUDA)[:num_tokens]
    norm = values(512), EPS

    def compute(implementation=Implementation.AUTO, at=slice(None)):
        rows_NSX = poison(torch.empty(num_blocks, 16, 576, dtype=torch.bfloat16, device=CUDA))
        parts = down_TX[at, 1536:2048], down_TX[at, 2048:], norm, tuple(table[at] for table in angles), slots_T[at]
        query_TAE = query_TX[at].clone().unflatten(1, (num_heads, 192))
        found = latent_norm_rope_write(
            query_TAE, *parts, rows_NSX, interleaved=interleaved, implementation=implementation
        )
        return found, rows_NSX

    found, wanted = compute(), compute(REFERENCE)
    assert same_bits(found[0], wanted[0])
    assert_close(found[1], wanted[1])
    assert_same(replayed(compute), found)
    query_TAE, rows_NSX = compute(at=slice(num_tokens - 1, None))
    assert same_bits(query_TAE[0], found[0][-1])
    place = slots_T[-1] // 16, slots_T[-1] % 16
    assert same_bits(rows_NSX[place], found[1][place])


class Layer:
    """Arguments of `qk_norm_rope_write`, and a pool with canaries round it."""

    def __init__(
        self, heads, num_tokens, *, block_size=16, dim=None, mode="token", scales=0, gated=False, normed=True,
        biased=False, **rotation,
    ):  # fmt: skip
        self.num_query, num_kv, head_dim = heads
        self.gated = gated
        dim = dim or head_dim
        width = (self.num_query * (1 + gated) + 2 * num_kv) * head_dim
        self.qkv_TX = values(num_tokens, width)
        self.bias_X = values(width) if biased else None
        self.norms = None
        if normed:
            self.norms = HeadNorms(query_D=values(head_dim), key_D=values(head_dim), eps=EPS, plus_one=gated)
        inverse_F = rope_inverse_frequencies(dim, 1e6, torch.bfloat16, CUDA)
        shape = (3, num_tokens) if "sections" in rotation else (num_tokens,)
        self.positions = torch.randint(0, 40_000, shape, device=CUDA)
        if mode == "frequencies":
            self.rotation = Rotation(dim=dim, inverse_F=inverse_F, **rotation)
        else:
            rows = self.positions if mode == "token" else torch.arange(40_000, device=CUDA)
            self.rotation = Rotation(dim=dim, tables=rope_angles(rows, inverse_F), **rotation)
        if mode == "token":
            self.positions = None
        num_blocks = num_tokens // block_size + 9
        self.slots_T = torch.randperm(num_blocks * block_size, device=CUDA)[:num_tokens]
        self.slots_T[1::7] = -1
        self.shape = (num_blocks, num_kv, 2, block_size, head_dim)
        self.dtype = FLOAT8 if scales else torch.bfloat16
        scale = 0.02 + torch.rand(scales, device=CUDA) if scales else None
        self.scales = {"key_scale": scale, "value_scale": scale}

    def compute(self, data, implementation=Implementation.AUTO):
        pool = LayerPool(key_NHSD=data[:, :, 0], value_NHSD=data[:, :, 1], **self.scales)
        return qk_norm_rope_write(
            self.qkv_TX, self.norms, self.rotation, self.slots_T, pool, num_query=self.num_query,
            bias_X=self.bias_X, positions=self.positions, gated=self.gated, implementation=implementation,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((32, 8, 128), {}),
        ((32, 8, 128), {"mode": "position", "block_size": 64}),
        ((32, 4, 128), {"mode": "frequencies"}),
        ((28, 4, 128), {"interleaved": True}),
        ((32, 8, 128), {"scales": 1}),
        ((32, 8, 128), {"normed": False}),
        ((28, 4, 128), {"normed": False, "biased": True}),
        ((32, 8, 128), {"scales": 8, "block_size": 64}),
        ((16, 2, 256), {"dim": 64, "gated": True}),
        (
            (16, 2, 256),
            {"dim": 64, "gated": True, "mode": "frequencies", "sections": (11, 11, 10), "alternating": True},
        ),
        ((12, 2, 128), {"mode": "frequencies", "sections": (16, 24, 24)}),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 65, 2048])
def test_queries_and_pool(heads, options, num_tokens):
    layer, guards = Layer(heads, num_tokens, **options), Guards(device="cuda")
    data, wanted_data = (guards.empty(*layer.shape, dtype=layer.dtype) for _ in range(2))
    query_THD, wanted_THD = layer.compute(data), layer.compute(wanted_data, REFERENCE)
    assert_close(query_THD, wanted_THD)
    assert_close(data, wanted_data)
    guards.check()
    again = guards.empty(*layer.shape, dtype=layer.dtype)
    assert_same(replayed(lambda: [layer.compute(again)]), [query_THD])
    assert same_bits(again, data)
    guards.check()


def test_what_a_token_writes_depends_on_it_alone():
    layer = Layer((32, 8, 128), 2049)
    layer.slots_T = torch.arange(2049, device=CUDA)
    whole = torch.zeros(layer.shape, device=CUDA).bfloat16()
    whole_THD = layer.compute(whole)
    qkv_TX, tables = layer.qkv_TX, layer.rotation.tables
    for num_tokens in ROWS:
        layer.qkv_TX, layer.slots_T = qkv_TX[:num_tokens], torch.arange(num_tokens, device=CUDA)
        layer.rotation = Rotation(dim=128, tables=tuple(table[:num_tokens] for table in tables))
        data = torch.zeros(layer.shape, device=CUDA).bfloat16()
        assert same_bits(layer.compute(data), whole_THD[:num_tokens]), num_tokens
        rows, wanted = (part.movedim(3, 1).flatten(0, 1)[:num_tokens] for part in (data, whole))
        assert same_bits(rows, wanted), num_tokens


def test_chains_of_dependent_launches_read_what_was_written():
    """Each launch begins before the one before it is over; results are as if none did."""
    x_TD, weight_D = values(64, 4096), torch.ones(4096, device=CUDA).bfloat16()

    def chain(early):
        rows_TD, sum_TD = x_TD, x_TD
        for _ in range(50):
            rows_TD, sum_TD, *_ = rms_norm_triton.launch(
                rows_TD, weight_D, EPS, sum_TD, None, plus_one=False, early=early
            )
            both_TJ = torch.cat([rows_TD, sum_TD], dim=1)  # knows nothing of such launches
            rows_TD, _ = silu_mul_triton.launch(both_TJ, None, early=early)
        return rows_TD, sum_TD

    wanted = chain(False)
    assert_same(chain(True), wanted)
    assert_same(replayed(lambda: chain(True)), wanted)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("hidden", "num_chosen"), [(2048, 9), (2048, 8), (2048, 12), (5120, 8), (7168, 9), (192, 3)])
def test_a_norm_that_adds_up_what_experts_made(hidden, num_chosen, num_rows):
    """To the bits of one launch after the other, also in a graph."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    expert_TK = torch.randint(-1, 257, (num_rows, num_chosen), generator=generator, device="cuda")
    part_ND = values(num_rows * num_chosen, hidden)
    part_ND[((expert_TK < 0) | (expert_TK >= 256)).flatten()] = float("nan")
    alone = Summands(part_ND, expert_TK, 256)
    shared = replace(alone, shared_TD=values(num_rows, hidden))
    gated = replace(shared, gate_T1=values(num_rows, 264)[:, 256:257])
    x_TD, weight_D = values(num_rows, hidden), values(hidden)
    forms = [{}, {"plus_one": True}]
    if hidden % 128 == 0:
        forms.append({"num_padded": num_rows + 3, "keep": True})
    for made, form in itertools.product((alone, shared, gated), forms):

        def normed(residual_TD, form=form):
            found = rms_norm_fused(x_TD, weight_D, EPS, residual_TD=residual_TD, **form)
            tensors = found.rows, found.sum_TD, found.scale_GR, found.kept_TD
            return tuple(tensor for tensor in tensors if tensor is not None)

        wanted = normed(add_up(made))
        assert not wanted[1].isnan().any()
        assert_same(normed(made), wanted)
        assert_same(replayed(lambda made=made, normed=normed: normed(made)), wanted)


@pytest.mark.parametrize("num_rows", ROWS)
def test_sigmoid_gates(num_rows):
    mixed_TD, shared_TD = values(num_rows, 2 * 2048).split(2048, dim=1)
    for gate in (values(num_rows, 264)[:, 256:257], None):
        wanted = add_shared(mixed_TD, shared_TD, gate, implementation=REFERENCE)
        found = add_shared(mixed_TD, shared_TD, gate)
        assert_close(found, wanted)
        assert_same(replayed(lambda gate=gate: (add_shared(mixed_TD, shared_TD, gate),)), (found,))
    gate_TAE, mixed_TQ = values(num_rows, 16, 2, 256)[:, :, 1], values(num_rows, 16 * 256)
    wanted = gate_output(mixed_TQ, gate_TAE, implementation=REFERENCE)
    assert_close(gate_output(mixed_TQ, gate_TAE), wanted)


def test_many_copies():
    sizes = [0, 1, 3, 16, 17, 4096, 65_537, 3_000_001, *range(1, 40)]
    sources = [noise(size + 16, size).to(CUDA) for size in sizes]
    for shift in (0, 4, 7):
        targets = [torch.full((size + 16,), 0xA7, dtype=torch.uint8, device=CUDA) for size in sizes]
        pairs = [
            (target[shift : shift + size], source[:size])
            for target, source, size in zip(targets, sources, sizes, strict=True)
        ]
        running = fused_copy(pairs, CUDA)
        running.wait(10)
        assert running.is_done
        for target, source, size in zip(targets, sources, sizes, strict=True):
            assert torch.equal(target[shift : shift + size], source[:size])
            assert target[:shift].eq(0xA7).all()
            assert target[shift + size :].eq(0xA7).all()


def test_copies_from_pinned_memory_do_not_wait():
    source, target = noise(100_000).pin_memory(), torch.zeros(100_000, dtype=torch.uint8, device=CUDA)
    fused_copy([(target, source)], CUDA).wait(10)
    target.zero_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        running = fused_copy([(target, source)], CUDA)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    running.wait(10)
    assert torch.equal(target.cpu(), source)
    table_N3 = running.tables[1]
    target.zero_()
    replayed(lambda: [fused_copy_triton.launch(table_N3, 100_000)])
    assert torch.equal(target.cpu(), source)


def test_steps_compile_nothing_new():
    """Numbers of rows, alignments of slices and addresses differ from step to step."""
    kernels = [
        rms_norm_triton._norm_kernel,
        silu_mul_triton._silu_mul_kernel,
        qk_norm_rope_write_triton._qk_kernel,
        fused_copy_triton._copy_kernel,
    ]

    def step(num_rows):
        norm(values(num_rows, 4096), values(4096), values(num_rows, 4096), {"residual": True, "fp8": True})
        silu_mul_fused(values(num_rows, 2 * 12_288), num_padded=num_rows)
        layer = Layer((32, 8, 128), num_rows)
        layer.compute(torch.zeros(layer.shape, device=CUDA).bfloat16())
        target = torch.zeros(num_rows, device=CUDA)
        fused_copy([(target, torch.ones_like(target))], CUDA).wait(10)

    for num_rows in (16, 512, 2048, 4096):  # a number for each row of the tuned tables
        step(num_rows)
    before = [len(kernel.device_caches[0][0]) for kernel in kernels]
    for num_rows in (1, 2, 3, 17, 64, 100, 256):
        step(num_rows)
    assert [len(kernel.device_caches[0][0]) for kernel in kernels] == before
