"""`python -m baton.cluster.ray.table HOST:PORT`: queries a cluster's head for nodes and actors, without joining.

Prints one JSON object. It runs as a separate process, because Ray's client may block, or end its process, when a head
goes away.
"""

import importlib
import json
import sys
from typing import Any

from baton.cluster.ray.session import import_ray, prepare_environment, require_ray, require_token, require_token_taken
from baton.core.errors import BatonError

EXIT_PRECONDITION = 3


def read_table(address: str) -> dict[str, Any]:
    """Return the addresses of live nodes, and the state and node of each named actor.

    Raises:
        BatonError: there is no token to use, nothing answers there, or it is another version of Ray.
    """
    prepare_environment()
    import_ray()
    require_token(address)
    require_ray(address)
    require_token_taken(address)
    # There is no public way to query a head without joining; the version is pinned.
    state: Any = importlib.import_module("ray._private.state")
    raylet: Any = importlib.import_module("ray._raylet")
    table = state.GlobalState()
    table._initialize_global_state(
        raylet.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    )
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in table.node_table() if node["Alive"]}
    actors = [
        {"name": actor["Name"], "state": actor["State"], "node": nodes.get(actor["Address"]["NodeID"], "")}
        for actor in table.actor_table(None).values()
        if actor["Name"] and actor["State"] != "DEAD"
    ]
    return {"nodes": sorted(nodes.values()), "actors": sorted(actors, key=lambda actor: str(actor["name"]))}


def main() -> int:
    """Print the table, or the error."""
    try:
        print(json.dumps(read_table(sys.argv[1])))
    except BatonError as error:
        print(json.dumps({"error": error.to_wire()}))
        return EXIT_PRECONDITION
    return 0


if __name__ == "__main__":
    sys.exit(main())
