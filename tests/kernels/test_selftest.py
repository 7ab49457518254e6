"""The start-up self-test passes where invariance holds, and names what breaks it where it does not."""

import time
from functools import partial

import pytest
import torch

from baton.core.errors import NumericsUnsupported
from baton.core.numerics import Quantization
from baton.kernels import selftest
from baton.kernels.gemm import linear
from baton.kernels.implementation import Implementation
from baton.kernels.selftest import check_invariance

CPU = torch.device("cpu")
SHAPES = [(512, 256), (256, 80), (160, 256), (8, 256), (256, 512), (4096, 256)]  # the bundled model's


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.fast), torch.bfloat16, torch.float64], ids=str
)
def test_it_holds_here_and_leaves_threads_alone(dtype):
    torch.set_num_threads(2)
    start_s = time.process_time()
    check_invariance(SHAPES, dtype, CPU)
    assert time.process_time() - start_s < 20  # on busy processors, threads that wait for each other burn time
    assert torch.get_num_threads() == 2


@pytest.mark.fast
def test_a_gemm_that_depends_on_its_outputs_is_named_where_ranks_share_them(monkeypatch):
    right = linear.linear_invariant

    def careless(x_TK, weight_NK):
        return right(x_TK, weight_NK) * (1 + 1e-6 * weight_NK.shape[0])

    monkeypatch.setattr(linear, "linear_invariant", careless)
    shapes = [(64, 48)]
    check_invariance(shapes, torch.float32, CPU)
    with pytest.raises(NumericsUnsupported, match="cut over 2 ranks") as caught:
        check_invariance(shapes, torch.float32, CPU, num_ranks=2)
    assert caught.value.fields["operation"] == "linear"


@pytest.mark.fast
def test_a_gemm_that_depends_on_its_batch_is_named(monkeypatch):
    def careless(x_TK, weight_NK):
        return linear.linear(x_TK, weight_NK) * (1 + 1e-6 * x_TK.shape[0])

    monkeypatch.setattr(linear, "linear_invariant", careless)
    with pytest.raises(NumericsUnsupported, match="linear of shape") as caught:
        check_invariance([(40, 32)], torch.float32, CPU)
    assert caught.value.fields["operation"] == "linear"
    assert caught.value.fields["shape"] == [40, 32]


@pytest.mark.fast
def test_attention_that_depends_on_its_chunk_is_named(monkeypatch):
    from baton.kernels.attention import invariant as attention_invariant
    from baton.kernels.attention import paged as attention

    monkeypatch.setattr(attention_invariant, "attention_decode_invariant", attention.attention_decode)
    with pytest.raises(NumericsUnsupported, match="attention_decode"):
        check_invariance([(16, 16)], torch.float32, CPU)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_delta_net_that_depends_on_its_chunk_is_named(dtype, monkeypatch):
    from baton.kernels.delta_net import layer

    check = partial(check_invariance, [(16, 16)], dtype, CPU, delta_net=(16, 32, 2))
    check()
    right = layer.causal_conv

    def careless(mixed, weight, ring, rows):
        return right(mixed, weight, ring, rows) * (1 + 1e-3 * rows.num_rows)

    monkeypatch.setattr(layer, "causal_conv", careless)
    with pytest.raises(NumericsUnsupported, match="chunks of 21 and 13"):
        check()


@pytest.mark.slow
def test_it_checks_a_delta_nets_kernels_where_they_compute(monkeypatch):
    """The form by tiles depends on where a prompt is cut."""
    import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
    from baton.core.numerics import Numerics
    from baton.kernels import ops, selftest

    of_triton = ops.Ops(Numerics.INVARIANT, implementation=Implementation.TRITON)
    check = partial(selftest._check_delta_net, of_triton, (16, 16, 2), torch.float32, CPU)
    check()
    right = ops.delta_layer
    monkeypatch.setattr(ops, "delta_layer", lambda *args, invariant, **named: right(*args, invariant=False, **named))
    with pytest.raises(NumericsUnsupported, match="delta_layer"):
        check()


@pytest.mark.slow
def test_it_checks_the_kernels_where_they_compute(monkeypatch):
    import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
    from baton.kernels.attention import ordered_triton as attention_ordered_triton

    options = {"implementation": Implementation.TRITON, "quantization": Quantization.FP8}
    check = partial(check_invariance, [(48, 128)], torch.bfloat16, CPU, **options)
    monkeypatch.setattr(selftest, "_NUM_ROWS", 70)
    monkeypatch.setattr(selftest, "_BATCHES", ((0, 1), (3, 17), (0, 70)))
    check(num_ranks=2)
    right = attention_ordered_triton.launch_decode

    def careless(query_BQAD, *others):
        right(query_BQAD * 1.01, *others)

    monkeypatch.setattr(attention_ordered_triton, "launch_decode", careless)
    with pytest.raises(NumericsUnsupported, match="attention_decode"):
        check()


@pytest.mark.fast
@pytest.mark.long
def test_wide_weights_are_checked_in_part():
    assert selftest._MAX_OUTPUTS < 150_000
    check_invariance([(150_000, 16)], torch.float32, CPU)
