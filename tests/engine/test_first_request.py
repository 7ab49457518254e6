"""The first requests of a worker: nothing is imported on their way, which would take seconds."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.fast
PROGRAM = """
import sys
import torch
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.graphs.backend import CallBackend
from baton.model.loader import load_model
from baton.tests.engine.graphs import bundled_engine, with_graphs
from baton.tests.engine.kernel_asked import ASKED
from baton.tests.engine.conftest import TINY
from baton.tests.engine.toy_engine import request_of

cpu = torch.device("cpu")
model = load_model(TINY, dtype=torch.float32, device=cpu, numerics=Numerics.DEFAULT, with_mtp=True)
engine = bundled_engine(model, Tokenizer.from_directory(TINY), 2)
with_graphs(engine, backend=CallBackend(), rows=(32, 64, 96))
before = set(sys.modules)
for asked in ASKED[::3]:
    engine.generate([request_of([3 + place] * length, max_tokens=6, **asked) for place, length in enumerate((9, 100))])
assert engine.runner.graphs.counts.num_steps_piecewise
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.long
def test_nothing_is_imported_after_the_start():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
