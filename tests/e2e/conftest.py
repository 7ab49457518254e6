"""The bundled model, loaded once per dtype and numerics, for the end-to-end suites."""

from functools import cache
from pathlib import Path

import pytest
import torch

from baton.core.numerics import KVDtype, Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.model.loader import load_model

TINY = Path(__file__).parents[2] / "assets" / "tiny"


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
    def load(dtype=torch.float64, numerics=Numerics.DEFAULT, with_mtp=True, device="cpu", kv_dtype=KVDtype.AUTO):
        place = torch.device(device)
        return load_model(TINY, dtype=dtype, device=place, numerics=numerics, with_mtp=with_mtp, kv_dtype=kv_dtype)

    return load
