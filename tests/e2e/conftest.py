"""The bundled model, loaded once per dtype and numerics, for the end-to-end suites."""

from functools import cache
from pathlib import Path

import pytest
import torch

from baton.core.numerics import KVDtype, Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.model.loader import load_model

TINY = Path(__file__).parents[2] / "assets" / "tiny"
TINY_EAGLE3 = TINY.with_name("tiny-eagle3")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Workers run with one torch thread each; two that wait for each other on busy cores cost ten times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_directory(TINY)


@pytest.fixture(scope="session")
def load_tiny():
    @cache
    def load(dtype=torch.float64, numerics=Numerics.DEFAULT, device="cpu", **options):
        options = {"with_mtp": True, "kv_dtype": KVDtype.AUTO, **options}
        return load_model(TINY, dtype=dtype, device=torch.device(device), numerics=numerics, **options)

    return load


@pytest.fixture(scope="module")
def processes():
    """Of ranks, for a module that takes some."""
    from baton.tests.e2e.tp_groups import RankProcesses  # of which a machine with a GPU has not all that it imports

    started = RankProcesses()
    yield started
    started.close()
