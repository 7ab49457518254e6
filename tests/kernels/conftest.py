"""One torch thread for these tests: threads that wait for each other on busy cores cost ten times the work."""

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.kernels.attention import decode as attention_decode
from baton.kernels.attention import prefill as attention_prefill
from baton.kernels.mla import decode as mla_decode


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What memory that nobody wrote holds: NaN, or a number that is no index.
_UNWRITTEN = {
    torch.float64: (torch.int64, 0x7FF4000000000001),
    torch.float32: (torch.int32, 0x7FA00001),
    torch.bfloat16: (torch.int16, 0x7FA1),
    torch.float16: (torch.int16, 0x7D01),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.int64: (torch.int64, 0x5A5A5A5A5A5A5A5A),
    torch.int32: (torch.int32, 0x5A5A5A5A),
}


def _poisoned(create):
    def poisoned(*arguments, **named):
        found = create(*arguments, **named)
        if found.device.type == "cpu" and found.dtype in _UNWRITTEN:
            kind, bits = _UNWRITTEN[found.dtype]
            torch.tensor([], dtype=kind).set_(found.untyped_storage()).fill_(bits)
        return found

    return poisoned


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch):
    """A result that depends on what nobody wrote is found by every run, not by one whose memory held the worst."""
    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def nothing_decided():
    """Tests change what decisions depend on, which stay as they are while serving."""
    yield
    for module in (attention_decode, attention_prefill, mla_decode):
        module._FORMS._kept.clear()
    attention_prefill._KINDS._kept.clear()
