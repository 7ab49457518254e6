"""What a worker reports of how its model is computed: the form, why it is that one, and what fell back to another.

Counts are of this process, which loads one model; of the ranks of a TP group only the first one's are told.
"""

from collections.abc import Sequence

import torch

from baton.core.numerics import Numerics
from baton.core.quantization import Quantization
from baton.kernels import tuning
from baton.kernels.compiles import COMPILES
from baton.kernels.gemm.scaled_mm import LIBRARY
from baton.kernels.implementation import Implementation
from baton.model.model import Model
from baton.proto import worker_pb2


def form_of(model: Model) -> str:
    """The word for what computes it: triton or reference; in invariant numerics ordered (by Triton) or invariant."""
    is_invariant = model.numerics is Numerics.INVARIANT
    if model.implementation is Implementation.TRITON:
        return "ordered" if is_invariant else "triton"
    return "invariant" if is_invariant else "reference"


def compute_report(model: Model, quantization: Quantization, chosen: Sequence[str] = ()) -> worker_pb2.Compute:
    """For a heartbeat; `chosen` says what was chosen at start, and why. Any thread."""
    device = model.device
    return worker_pb2.Compute(
        form=form_of(model),
        why=model.why_no_triton,
        quantization=quantization.value,
        num_library_refused=LIBRARY.num_refused,
        library_refused=[f"{outputs}x{inputs}" for outputs, inputs in sorted(LIBRARY.refused)],
        untuned=tuning.untuned(),
        num_kernels_starting=COMPILES.num_starting,
        num_kernels_serving=COMPILES.num_serving,
        late_kernels=COMPILES.late,
        chosen=chosen,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )
