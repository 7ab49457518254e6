"""One torch thread for these tests: threads that wait for each other on busy cores cost ten times the work."""

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.kernels import attention_decode, attention_prefill


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_decided():
    """Tests change what decisions depend on, which stay as they are while serving."""
    yield
    for module in (attention_decode, attention_prefill):
        module._FORMS._kept.clear()
    attention_prefill._KINDS._kept.clear()
