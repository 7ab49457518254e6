"""Fixtures that several rooms' tests share."""

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # Before anything imports Triton: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from baton.tests.model.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A factory of tiny random model directories; equal arguments give the same directory."""
    written = {}

    def make(**options):
        key = repr(sorted(options.items()))
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp("model"), **options)
        return written[key]

    return make
