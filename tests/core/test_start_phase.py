"""How a phase of a start reads."""

import pytest

from baton.core.start_phase import GRAPHS, KERNELS, WARM_UP, WEIGHTS, StartPhase

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (StartPhase(WEIGHTS, 453, 1000), "weights 45 %"),
        (StartPhase(WEIGHTS, 0, 1000), "weights 0 %"),
        (StartPhase(KERNELS, 0, 136), "compiling kernels (136)"),
        (StartPhase(GRAPHS, 300, 901), "CUDA graphs 300 of 901"),
        (StartPhase(WARM_UP), "warming up"),
    ],
)
def test_a_phase_reads_as_operators_expect(phase, text):
    assert str(phase) == text
