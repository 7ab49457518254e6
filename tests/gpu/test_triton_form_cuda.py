"""A model of real head sizes computed by Triton kernels on a GPU, beside its torch reference; steps do not wait."""

import pytest
import torch

from baton.core.numerics import KVDtype, Numerics, Quantization
from baton.kernels.implementation import Implementation
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.kernels.harness import relative_error
from baton.tests.model.harness import Paged

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZES = {"num_hidden_layers": 2, "vocab_size": 4096, "eos_token_id": 500}
KINDS = {"8b": ("qwen3-8b", SIZES), "30b-a3b": ("qwen3-30b-a3b", SIZES), "0.6b": ("qwen3-0.6b", SIZES)}
LENGTHS = (700, 1, 333)


def load(path, implementation, quantization=Quantization.NONE, dtype=torch.bfloat16, kv_dtype=KVDtype.AUTO):
    return load_model(
        path,
        dtype=dtype,
        device=CUDA,
        numerics=Numerics.DEFAULT,
        with_mtp=True,
        random_seed=3,
        implementation=implementation,
        quantization=quantization,
        kv_dtype=kv_dtype,
    )


def run(model, is_checked):
    """Hidden states of prompts beside each other in chunks, and of a decode step that must not wait for the host."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 4096, (length + 4,), generator=generator).to(CUDA) for length in LENGTHS]
    paged = Paged(model, num_sequences=3, capacity_len=768)
    first = [(0, 0, 650), (1, 0, 1), (2, 0, 333)]
    found = []
    for parts in (first, [(0, 650, 700)]):
        tokens = torch.cat([prompts[sequence][start:end] for sequence, start, end in parts])
        found.append(paged.trunk(tokens, paged.prefill_batch(parts)))
    batch = paged.decode_batch([0, 1, 2], list(LENGTHS), 4, bound=768)
    tokens = torch.cat([prompt[-4:] for prompt in prompts])
    paged.trunk(tokens, batch)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if is_checked else "default")
    try:
        decoded = paged.trunk(tokens, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.cat([*found, decoded])


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_as_near_as_the_references(kind, quantization, tmp_path):
    shape, sizes = KINDS[kind]
    path = write_shape(shape, tmp_path, **sizes)
    exact = run(load(path, Implementation.REFERENCE, dtype=torch.float32), is_checked=False)
    found = run(load(path, Implementation.TRITON, quantization), is_checked=True)
    wanted = run(load(path, Implementation.REFERENCE, quantization), is_checked=False)
    assert found.isfinite().all()
    error, usual, between = (relative_error(*pair) for pair in ((found, exact), (wanted, exact), (found, wanted)))
    print(
        f"{kind} {quantization.value}: {error:.4f} from float32, the reference {usual:.4f}; {between:.4f} between them"
    )
    # Both round at the same places: the kernels are as near to what is exact as the reference is. A router may choose
    # another expert where two are near each other, which moves such a token far.
    assert error < 1.05 * usual + 0.002
    assert between < (0.2 if kind == "30b-a3b" else usual)


DEEPSEEK = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 4096,
    "moe_intermediate_size": 512, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.mark.parametrize("num_heads", [16, 128])
def test_latents_are_attended_to_as_near_as_by_the_reference(num_heads, tmp_path):
    """DeepSeek-V3's heads; all experts are chosen, for which ones would be a matter of rounding."""
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    path = write_shape("deepseek-v3", tmp_path, **(SIZES | DEEPSEEK | heads))
    exact = run(load(path, Implementation.REFERENCE, dtype=torch.float32), is_checked=False)
    found = run(load(path, Implementation.TRITON), is_checked=True)
    wanted = run(load(path, Implementation.REFERENCE), is_checked=False)
    error, usual, between = (relative_error(*pair) for pair in ((found, exact), (wanted, exact), (found, wanted)))
    print(f"{num_heads} heads: {error:.4f} from float32, the reference {usual:.4f}; {between:.4f} between them")
    assert error < 1.1 * usual + 0.002
    assert between < 1.5 * usual


HYBRID = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_experts": 4,
    "num_experts_per_tok": 4,
}  # fmt: skip


def test_delta_nets_are_as_near_as_the_references(tmp_path):
    """Qwen3.5-35B-A3B's layers, chunks and a decode step that is computed twice; all experts are chosen."""
    path = write_shape("qwen3.5-35b-a3b", tmp_path, **(SIZES | HYBRID))
    exact = run(load(path, Implementation.REFERENCE, dtype=torch.float32), is_checked=False)
    found = run(load(path, Implementation.TRITON), is_checked=True)
    wanted = run(load(path, Implementation.REFERENCE), is_checked=False)
    assert found.isfinite().all()
    error, usual, between = (relative_error(*pair) for pair in ((found, exact), (wanted, exact), (found, wanted)))
    print(f"{error:.4f} from float32, the reference {usual:.4f}; {between:.4f} between them")
    assert error < 1.1 * usual + 0.002
    assert between < 1.5 * usual


def test_float8_kv_is_as_near_as_the_references(tmp_path):
    shape, sizes = KINDS["8b"]
    path, kv = write_shape(shape, tmp_path, **sizes), {"kv_dtype": KVDtype.FP8}
    exact = run(load(path, Implementation.REFERENCE, dtype=torch.float32, **kv), is_checked=False)
    found = run(load(path, Implementation.TRITON, **kv), is_checked=True)
    wanted = run(load(path, Implementation.REFERENCE, **kv), is_checked=False)
    assert found.isfinite().all()
    error, usual, between = (relative_error(*pair) for pair in ((found, exact), (wanted, exact), (found, wanted)))
    print(f"{error:.4f} from float32, the reference {usual:.4f}; {between:.4f} between them")
    # What lies next to a border of float8 goes to either side, in the reference as in the kernels.
    assert error < 1.05 * usual + 0.004
    assert between < usual + 0.004
