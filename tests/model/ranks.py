"""A tensor-parallel group as threads of one process, over real gloo: what processes do, sooner started."""

import threading

import torch

from baton.engine.tp_group import GlooGroup, open_store


def on_ranks(size, work, timeout_s=30.0):
    """`work(communicator)` at every rank at once; results in rank order, or the first error."""
    stores = [open_store(0, size, 0, timeout_s)]
    stores += [open_store(rank, size, stores[0].port, timeout_s) for rank in range(1, size)]
    results, errors = [None] * size, []

    def run(rank):
        group = None
        try:
            group = GlooGroup(rank, size, stores[rank], timeout_s)
            with torch.inference_mode():
                results[rank] = work(group)
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        finally:
            if group is not None:
                group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
