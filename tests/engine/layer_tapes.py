"""How many layers of a step a tape launches, of a model whose kernels bind as on a Hopper GPU: a process of its own.

    python -P -m baton.tests.engine.layer_tapes    # JSON: layers taped in each step, and of how many

See `kernel_launches`, whose models these are.
"""

import json
import tempfile

import torch

from baton.engine.graphs.backend import CallBackend
from baton.kernels import launch_tape
from baton.model.state_mixer import StateMixer
from baton.tests.engine import kernel_launches
from baton.tests.engine.test_piecewise import Setting, trunks_of

LAYERS = ["linear_attention"] * 3 + ["full_attention"]


def main():
    """Steps of an eight-layer hybrid, in pieces."""
    torch.set_num_threads(1)
    kernel_launches.stub()
    launch_tape._CREATE |= {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}  # which the stub has for `empty`
    sizes = kernel_launches.HYBRID | {"num_hidden_layers": 8, "layer_types": LAYERS * 2}
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(kernel_launches.load("qwen3.5-35b-a3b", sizes, {}, folder))
    trunks, found = trunks_of(setting, CallBackend()), []
    num_nets = sum(isinstance(mixer, StateMixer) for mixer in trunks[0]._mixers)
    with torch.inference_mode():
        for ids_T, batch in setting.steps():
            trunk = next(trunk for trunk in trunks if trunk.num_rows >= len(ids_T))
            before = trunk.num_taped
            trunk.replay(ids_T, batch, lambda layer: None)
            found.append(trunk.num_taped - before)
    print(json.dumps([found, num_nets]))


if __name__ == "__main__":
    main()
