"""States of a file: another one for every way in which somebody may change it."""

import errno
import os

import pytest

from baton.core.files import file_state

pytestmark = pytest.mark.fast


def test_every_change_is_another_state(tmp_path):
    path = tmp_path / "file"
    states = [file_state(path)]
    assert states == [errno.ENOENT]
    path.write_bytes(b"one")
    states.append(file_state(path))
    assert file_state(str(path)) == states[-1]
    path.write_bytes(b"longer")
    states.append(file_state(path))
    os.utime(path, ns=(1, 1))
    states.append(file_state(path))
    other = tmp_path / "other"
    other.write_bytes(b"length")
    os.utime(other, ns=(1, 1))
    other.rename(path)
    states.append(file_state(path))
    assert len(set(states)) == len(states)
    assert file_state(path / "below") == errno.ENOTDIR
