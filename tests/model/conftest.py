"""Models and their transformers references, one each per directory and dtype; the largest logit differences seen."""

from functools import cache

import pytest
import torch

from baton.core.numerics import Numerics
from baton.kernels.attention import decode as attention_decode
from baton.kernels.attention import prefill as attention_prefill
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


@pytest.fixture(autouse=True)
def nothing_decided():
    """Tests change what decisions depend on, which stay as they are while serving."""
    yield
    for module in (attention_decode, attention_prefill):
        module._FORMS._kept.clear()
    attention_prefill._KINDS._kept.clear()


LARGEST = pytest.StashKey[dict[tuple[str, torch.dtype], float]]()
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}


@pytest.fixture
def check_logits(request):
    """Assert that logits are within the tolerance of their dtype; the summary shows how near they were."""
    largest = request.config.stash.setdefault(LARGEST, {})

    def check(what, got, wanted):
        difference = float((got - wanted).abs().max())
        largest[what, got.dtype] = max(largest.get((what, got.dtype), 0.0), difference)
        assert difference <= TOLERANCES[got.dtype], f"{what}: {difference}"

    return check


def pytest_terminal_summary(terminalreporter, config):
    for (what, dtype), difference in sorted(config.stash.get(LARGEST, {}).items(), key=str):
        limit = TOLERANCES[dtype]
        terminalreporter.write_line(
            f"max |Δlogit| against transformers, {what}, {dtype}: {difference:.1e} of {limit:g}"
        )
