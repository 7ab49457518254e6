"""Limits of the hand-off for tests that are about something else."""

from baton.core.config import KVTransferConfig


def patient(**config) -> KVTransferConfig:
    """Leases that outlast a machine which is busy elsewhere: a process that stands still for seconds loses nothing."""
    return KVTransferConfig(**{"lease_s": 60.0, "commit_timeout_s": 60.0, **config})
