"""A tensor-parallel group as threads of one process, over real gloo: what processes do, sooner started."""

import threading

import torch

from baton.engine.tp import join as tp_group_join
from baton.engine.tp.collectives import GlooGroup, open_store
from baton.engine.tp.plan import PlanChannel, plan_codec


def on_ranks(size, work, timeout_s=30.0, num_groups=1):
    """`work(communicator, ...)` at every rank at once; results in rank order, or the first error."""
    stores = [_stores(size, timeout_s) for _ in range(num_groups)]
    results, errors = [None] * size, []

    def run(rank):
        groups = []
        try:
            for of_group in stores:
                groups.append(GlooGroup(rank, size, of_group[rank], timeout_s))
            with torch.inference_mode():
                results[rank] = work(*groups)
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        finally:
            for group in groups:
                group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _stores(size, timeout_s):
    first = open_store(0, size, 0, timeout_s)
    return [first, *(open_store(rank, size, first.port, timeout_s) for rank in range(1, size))]


def channel_of(group, codec=None):
    """The plan channel beside a group, as every rank calls it."""
    codec = codec or plan_codec()
    if group.rank == 0:
        listener = tp_group_join.RankListener(codec, group.size)
        group.broadcast_bytes(f"{listener.address} {listener.token}".encode())
        return PlanChannel(listener.accept(10.0), group)
    address, token = group.broadcast_bytes(b"").decode().split()
    return PlanChannel(tp_group_join.join(codec, group.rank, group.size, address, token), group)
