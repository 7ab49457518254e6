"""The bundled model in float64, and prompts for it."""

from pathlib import Path

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.model.loader import load_model

TINY = Path(__file__).parents[2] / "assets" / "tiny"


@pytest.fixture(scope="session")
def tiny_directory():
    return TINY


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return Tokenizer.from_directory(TINY)


@pytest.fixture(scope="session")
def tiny_model():
    return load_model(TINY, dtype=torch.float64, device=torch.device("cpu"), numerics=Numerics.DEFAULT, with_mtp=True)


@pytest.fixture(scope="session")
def tiny_model_invariant():
    return load_model(TINY, dtype=torch.float32, device=torch.device("cpu"), numerics=Numerics.INVARIANT, with_mtp=True)


@pytest.fixture(scope="session")
def tiny_prompts(tiny_tokenizer):
    """Of lengths around block and chunk borders, one of a single token, one long."""
    ids = tiny_tokenizer.encode((Path(__file__).parents[2] / "core" / "errors.py").read_text())
    return [tuple(ids[at * 40 : at * 40 + length]) for at, length in enumerate((1, 2, 15, 16, 17, 33, 48, 75, 130))]
