"""One torch thread for these tests: threads that wait for each other on busy cores cost ten times the work."""

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
