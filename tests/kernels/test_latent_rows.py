"""Attention over latents: the absorbed form, of chunks and of decode rows, is the expanded one."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.mla.latent_rows import attend_expanded, matmul_by_head, write_rows
from baton.kernels.ops import Ops
from baton.kernels.pointwise.rope import rope, rope_angles, rope_inverse_frequencies

pytestmark = pytest.mark.fast
SIZES = {"DeepSeek-V3": (4, 128, 64, 512, 128), "small": (3, 6, 4, 20, 10), "one head": (1, 8, 2, 6, 3)}


class Setting:
    """Two sequences in scrambled blocks of 16, beside blocks of NaN."""

    def __init__(self, sizes, dtype, lens=(75, 40)):
        self.num_heads, self.nope, self.turned, self.latent, self.values = sizes
        self.generator, self.dtype, self.lens = torch.Generator().manual_seed(3), dtype, lens
        self.key_ANC, self.value_AVC = (
            self.draw(self.num_heads, length, self.latent) / self.latent**0.5 for length in (self.nope, self.values)
        )
        self.rows = [self.draw(length, self.latent + self.turned) for length in lens]
        self.queries = [self.draw(length, self.num_heads, self.nope + self.turned) for length in lens]
        self.pool = torch.full((16, 16, self.latent + self.turned), float("nan"), dtype=dtype)
        self.tables = torch.tensor([[9, 2, 14, 4, 0, 15], [3, 11, 7, 15, 15, 15]])
        for table, rows in zip(self.tables, self.rows, strict=True):
            position = torch.arange(len(rows))
            write_rows(rows, table[position // 16] * 16 + position % 16, self.pool)
        self.scale = 1.7 * (self.nope + self.turned) ** -0.5

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def expanded(self, parts):
        """Of (sequence, first position, number) each."""
        lens = [count for _, _, count in parts], [first + count for _, first, count in parts]
        query = torch.cat([self.queries[at][first : first + count] for at, first, count in parts])
        tables = self.tables[[at for at, _, _ in parts]]
        return attend_expanded(query, self.pool, self.key_ANC, self.value_AVC, tables, *lens, self.scale)

    def absorbed(self, parts, numerics, *, is_decoded):
        ops = Ops(numerics)
        query = torch.cat([self.queries[at][first : first + count] for at, first, count in parts])
        expand = torch.cat([self.key_ANC, self.value_AVC], dim=1)
        tables, how = self.tables[[at for at, _, _ in parts]], {"nope_dim": self.nope, "scale": self.scale}
        if is_decoded:
            positions = torch.tensor([list(range(first, first + count)) for _, first, count in parts])
            query, bound = query.unflatten(0, positions.shape), int(positions.max()) + 4
            found = ops.mla_decode(query, self.pool, expand, tables, positions, bound, **how)
            return found.unflatten(1, (self.num_heads, -1))
        lens = [count for _, _, count in parts], [first + count for _, first, count in parts]
        return ops.mla_prefill(query, self.pool, expand, tables, *lens, **how)


PARTS = {
    "prompts": ([(0, 0, 75), (1, 0, 40)], False),
    "chunks": ([(1, 7, 20), (0, 60, 15)], False),
    "decode rows": ([(0, 72, 3), (1, 30, 3)], True),
}


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.long
def test_the_absorbed_form_is_the_expanded_one(sizes, parts, numerics):
    setting, (parts, is_decoded) = Setting(SIZES[sizes], torch.float64), PARTS[parts]
    wanted, found = setting.expanded(parts), setting.absorbed(parts, numerics, is_decoded=is_decoded)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_however_it_comes(dtype):
    setting = Setting(SIZES["small"], dtype)
    whole = setting.absorbed([(0, 0, 75), (1, 0, 40)], Numerics.INVARIANT, is_decoded=False)
    for parts, is_decoded in PARTS.values():
        rows = [slice(75 * at + first, 75 * at + first + count) for at, first, count in parts]
        found = setting.absorbed(parts, Numerics.INVARIANT, is_decoded=is_decoded)
        assert torch.equal(found, torch.cat([whole[some] for some in rows]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_heads_gemm_does_not_depend_on_rows_and_heads_beside_it(dtype):
    generator = torch.Generator().manual_seed(1)
    x_TAK, weight_AJK = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((37, 4, 70), (4, 33, 70)))
    whole = matmul_by_head(x_TAK, weight_AJK, invariant=True)
    assert (whole - torch.einsum("tak,ajk->taj", x_TAK, weight_AJK)).abs().max() < 1e-4
    for rows, heads in ((slice(5, 6), slice(0, 4)), (slice(0, 20), slice(2, 4)), (slice(36, 37), slice(3, 4))):
        part = matmul_by_head(x_TAK[rows, heads], weight_AJK[heads], invariant=True)
        assert torch.equal(part, whole[rows, heads])


def test_neighbours_turn_as_halves_do():
    """The same pairs by the same angles, where they stand."""
    generator = torch.Generator().manual_seed(2)
    x_THD = torch.randn(9, 2, 12, generator=generator, dtype=torch.float64)
    inverse_F = rope_inverse_frequencies(8, 1e4, torch.float64, torch.device("cpu"))
    angles = rope_angles(torch.arange(9), inverse_F)
    apart = torch.cat([x_THD[..., :8:2], x_THD[..., 1:8:2], x_THD[..., 8:]], dim=-1)
    wanted, found = rope(apart, *angles), rope(x_THD, *angles, interleaved=True)
    assert torch.equal(found[..., :8:2], wanted[..., :4])
    assert torch.equal(found[..., 1:8:2], wanted[..., 4:8])
    assert torch.equal(found[..., 8:], x_THD[..., 8:])
