"""Limits of the hand-off for tests that are about something else, and what a busy machine adds to a time."""

from baton.core.config import KVTransferConfig

STALLS_S = 20.0  # that a machine which is busy elsewhere may add; laws of time are held under virtual time


def patient(**config) -> KVTransferConfig:
    """Leases that outlast a machine which is busy elsewhere: a process that stands still for seconds loses nothing."""
    return KVTransferConfig(**{"lease_s": 60.0, "commit_timeout_s": 60.0, **config})
