"""Models and their transformers references, one each per directory and dtype."""

from functools import cache

import pytest
import torch

from baton.core.numerics import Numerics
from baton.model.loader import load_model
from baton.tests.model.reference import Reference


@pytest.fixture(scope="session")
def load():
    @cache
    def load_cached(path, dtype=torch.float32, numerics=Numerics.DEFAULT, with_mtp=True):
        return load_model(path, dtype=dtype, device=torch.device("cpu"), numerics=numerics, with_mtp=with_mtp)

    return load_cached


@pytest.fixture(scope="session")
def reference():
    return cache(Reference)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on busy cores cost ten times the work; tests of threads ask for theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
