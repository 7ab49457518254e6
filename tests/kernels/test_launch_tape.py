"""Launches of one layer over another's tensors: the same results, or no tape."""

import dataclasses

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels.launch_tape import Launched, local, record

pytestmark = pytest.mark.fast


class Descriptor:
    """As Triton's: it has a tensor under `base`."""

    def __init__(self, base):
        self.base = base


def kernel(out, *tensors):
    """What a device does with a launch's arguments, and torch does not hear of."""
    out.numpy()[:] = sum(getattr(tensor, "base", tensor).numpy() for tensor in tensors)


def launch(*arguments):
    """As `kernels.launcher.Launcher` does."""
    kernel(*arguments)
    if local.recording is not None:
        local.recording.launches.append(Launched(lambda stream, given: kernel(*given), arguments))


def layers():
    return [(torch.full((4,), 1.0 + layer), torch.full((4,), 10.0 * layer)) for layer in range(3)]


MEMORY = torch.zeros(8)  # what tests take is filled, which is an operation


def attend(key, value):
    out, part = MEMORY.view(2, 4).unbind()
    launch(part, key)
    launch(out, Descriptor(value), part)
    return (out,)


def test_a_layer_is_launched_over_its_own_tensors():
    first, second, third = layers()
    (made,), tape = record(lambda: attend(*first), first)
    assert made.tolist() == [1.0] * 4
    for layer in (second, third, first):
        tape.replay(0, layer)
        assert tape.made[0] is made
        assert made.tolist() == attend(*layer)[0].tolist()


def other_operation(key, value):
    out = attend(key, value)[0]
    out += 1
    return (out,)


def through_a_view(key, value):
    out = MEMORY[:4]
    launch(out, key[:4], value)
    return (out,)


def through_an_address(key, value):
    out = attend(key, value)[0]
    launched = local.recording.launches
    launched.append(Launched(lambda stream, given: None, (key.data_ptr() | 1 << 45, value)))
    return (out,)


def without_values(key, value):
    out = MEMORY[:4]
    launch(out, key)
    return (out,)


def nothing_at_all(key, value):
    return (MEMORY[:4],)


def spoiled(key, value):
    out = attend(key, value)
    local.recording.is_whole = False
    return out


@pytest.mark.parametrize(
    "work", [other_operation, through_a_view, through_an_address, without_values, nothing_at_all, spoiled]
)
def test_what_cannot_be_repeated_is_no_tape(work):
    first = layers()[0]
    assert record(lambda: work(*first), first)[1] is None


def test_a_recording_ends_with_its_work():
    def fail():
        raise ValueError("a wrong argument")

    with pytest.raises(ValueError, match="a wrong argument"):
        record(fail, ())
    assert local.recording is None
    attend(*layers()[0])


def test_tritons_own_descriptors_are_moved_whole():
    """Triton reads `base` of what it is given at each launch; the recorded one stays as it was."""
    key, other, value = torch.zeros(32, 64), torch.ones(32, 64), torch.zeros(4)
    descriptor, seen = TensorDescriptor.from_tensor(key, [16, 64]), []

    def work():
        local.recording.launches.append(Launched(lambda stream, given: seen.append(given), (descriptor, value)))

    tape = record(work, (key, value))[1]
    tape.replay(0, (other, value))
    [(moved, _)] = seen
    assert moved.base is other
    assert dataclasses.replace(moved, base=key) == descriptor
    assert descriptor.base is key
