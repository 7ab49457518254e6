"""Chunks on their way to a GPU through pinned memory that is used again and again: every byte is that of the file."""

import pytest
import torch
from safetensors.torch import save_file

from baton.model.checkpoint import tensor_reader
from baton.model.checkpoint.tensor_reader import TensorRead, TensorReader
from baton.model.checkpoint.weights import Cut, read_headers

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPE = (4099, 512)


@pytest.mark.parametrize("target_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cut", [None, Cut(0, 1027, 2050), Cut(1, 128, 256)], ids=str)
def test_memory_is_not_written_to_before_the_gpu_has_what_was_in_it(cut, target_dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 256 << 10)  # far more chunks than threads
    wholes = {str(at): torch.randn(*SHAPE).bfloat16() for at in range(8)}
    save_file(wholes, tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    wanted = {name: one if cut is None else one.narrow(cut.dim, cut.first, cut.count) for name, one in wholes.items()}
    targets = {name: torch.empty(one.shape, dtype=target_dtype, device=CUDA) for name, one in wanted.items()}
    busy = torch.randn(4096, 4096, device=CUDA)
    for _ in range(20):  # copies wait in the stream behind it
        busy = busy @ busy * 1e-3
    with TensorReader(CUDA) as reader:
        reader.fill([TensorRead(name="t", stored=headers[name], target=targets[name], cut=cut) for name in wholes])
    for name, one in wanted.items():
        assert torch.equal(targets[name].cpu(), one.to(target_dtype))
