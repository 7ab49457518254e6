"""What a worker holds of requests and blocks, by its last report: all that must be given back once no request lives."""

from baton.proto import worker_pb2


def held(inventory: worker_pb2.Inventory) -> dict[str, int]:
    """How much of each countable resource; all zero when it holds nothing."""
    return {
        "blocks": inventory.num_blocks - inventory.num_blocks_free,
        "quarantined_blocks": inventory.num_blocks_quarantined,
        "incoming_transfers": inventory.num_kv_receives,
        "slots": inventory.num_slots_in_use,
        "attends": inventory.num_requests_held,
        "waiting_requests": inventory.num_requests_waiting,
        "running_requests": inventory.num_requests_running,
    }


def kv_cache_usage(inventory: worker_pb2.Inventory) -> float:
    """Share of its KV blocks that are held, 0 ... 1."""
    return held(inventory)["blocks"] / inventory.num_blocks if inventory.num_blocks else 0.0
