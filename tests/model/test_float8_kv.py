"""Models whose KV is float8: what attention reads, whatever the chunks; scales of a checkpoint; what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ModelTensorMisshapen, ModelUnsupported
from baton.core.numerics import KVDtype, Numerics
from baton.kernels.kv.dequantize import DTYPE
from baton.kvcache.pool import num_blocks_for_memory
from baton.model.loader import load_model
from baton.tests.model.harness import Paged, prompt

CPU = torch.device("cpu")
LEN = 50


def load(path, kv_dtype=KVDtype.FP8, dtype=torch.float32, numerics=Numerics.DEFAULT, **options):
    return load_model(path, dtype=dtype, device=CPU, numerics=numerics, with_mtp=True, kv_dtype=kv_dtype, **options)


def with_scales(path, scales):
    """The same checkpoint with more tensors in it."""
    file = path / "model.safetensors"
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    return path


class RoundedPaged(Paged):
    """A pool of the model's dtype whose content is rounded to float8 and back as soon as it is written."""

    def __init__(self, model, scales=None):
        super().__init__(model)
        self.scales = scales or {}

    def trunk(self, token_ids, batch):
        with torch.inference_mode():
            return self.model.trunk(torch.as_tensor(token_ids).flatten(), batch, self.pool, self.round)

    def round(self, layer):
        for part, kv_NHSD in enumerate(self.pool.layer(layer)):
            scale = self.scales.get((layer, part), 1.0)
            kv_NHSD.copy_((kv_NHSD.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)


def all_ways(paged_of, ids):
    """Logits of a prompt in one piece; in chunks; and of its last rows as a decode step."""
    paged = paged_of()
    whole = paged.logits(paged.prefill(ids))
    paged = paged_of()
    chunked = paged.logits(paged.prefill(ids, chunk_len=7))
    paged = paged_of()
    paged.prefill(ids[:-3])
    decoded = paged.logits(paged.trunk(ids[-3:], paged.decode_batch([0], [LEN - 3], 3, bound=64)))
    return whole, chunked, decoded


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_attention_reads_what_float8_holds(kind, tiny_checkpoint):
    path, ids = tiny_checkpoint(kind=kind), prompt(LEN)
    model = load(path, dtype=torch.float64)
    rounded = load(path, KVDtype.AUTO, dtype=torch.float64)
    wanted = all_ways(lambda: RoundedPaged(rounded), ids)
    found = all_ways(lambda: Paged(model), ids)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-9
    exact = Paged(rounded)
    assert (exact.logits(exact.prefill(ids)) - found[0]).abs().max() > 1e-3  # it does round


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_invariant_numerics_hold(dtype, tiny_checkpoint):
    model, ids = load(tiny_checkpoint(kind="qwen3"), dtype=dtype, numerics=Numerics.INVARIANT), prompt(LEN)
    whole, chunked, decoded = all_ways(lambda: Paged(model), ids)
    assert torch.equal(chunked, whole)
    assert torch.equal(decoded, whole[-3:])
    paged = Paged(model, num_sequences=2)  # beside another, at another place
    others = prompt(40, seed=3)
    both = paged.trunk(torch.cat([others, ids]), paged.prefill_batch([(0, 0, 40), (1, 0, LEN)]))
    assert torch.equal(paged.logits(both)[40:], whole)


@pytest.mark.fast
def test_scales_of_the_checkpoint_are_used(tiny_checkpoint):
    names = "model.layers.{}.self_attn.{}_scale"
    scales = {(0, 0): 0.01, (0, 1): 3.0, (1, 0): 0.5}  # the first makes keys saturate, the last one's values have none
    tensors = {names.format(layer, "kv"[part]): torch.tensor(scale) for (layer, part), scale in scales.items()}
    tensors[names.format(1, "k")] = tensors[names.format(1, "k")].reshape(1)
    path, ids = with_scales(tiny_checkpoint(kind="qwen3", seed=11), tensors), prompt(LEN)
    plain = load(path, KVDtype.AUTO, dtype=torch.float64)  # they are of no use there
    wanted = all_ways(lambda: RoundedPaged(plain, scales), ids)
    found = all_ways(lambda: Paged(load(path, dtype=torch.float64)), ids)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-5  # GEMMs with scales are rounded in float32


@pytest.mark.fast
@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (torch.tensor(0.0), ModelUnsupported),
        (torch.tensor(float("nan")), ModelUnsupported),
        (torch.tensor([-1.0]), ModelUnsupported),
        (torch.ones(2), ModelTensorMisshapen),
        (torch.ones(1, dtype=torch.int32), ModelTensorMisshapen),
    ],
)
def test_scales_that_are_none_are_refused(scale, error, tmp_path_factory, tiny_checkpoint):
    from baton.tests.model.checkpoints import write_checkpoint

    path = write_checkpoint(tmp_path_factory.mktemp("scales"), kind="qwen3")
    with pytest.raises(error, match="v_scale"):
        load(with_scales(path, {"model.layers.1.self_attn.v_scale": scale}))


@pytest.mark.fast
def test_a_pool_has_half_of_bfloat16s_bytes_and_another_identity(tiny_checkpoint):
    path = tiny_checkpoint(kind="qwen3")
    layouts = {
        (kv_dtype, dtype): load(path, kv_dtype, dtype).kv_layout(16)
        for kv_dtype in KVDtype
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert layouts[KVDtype.FP8, torch.bfloat16].dtype == "float8_e4m3fn"
    small, large = layouts[KVDtype.FP8, torch.bfloat16], layouts[KVDtype.AUTO, torch.bfloat16]
    assert 2 * small.bytes_per_block == large.bytes_per_block
    assert num_blocks_for_memory(small, 1 << 20) > 2 * num_blocks_for_memory(large, 1 << 20)
    assert len({layout.hash for layout in layouts.values()}) == 4
    assert len({layout.model_hash for layout in layouts.values()}) == 3  # names of prefixes: float8 by what made it
    assert Paged(load(path)).pool.blocks(0).dtype == DTYPE


@pytest.mark.fast
def test_heads_that_are_no_whole_words_are_refused_before_weights_are_read(tmp_path, tiny_checkpoint):
    path = tiny_checkpoint(kind="qwen3")
    config = json.loads((path / "config.json").read_text()) | {"head_dim": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match="12") as refused:
        load(tmp_path, random_seed=1, on_progress=lambda *_: pytest.fail("weights were read"))
    assert refused.value.fields["option"] == "kv_dtype"
