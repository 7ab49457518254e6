"""Every gRPC option that the code sets is one that gRPC knows: what it does not know it ignores without a word."""

import ast
from pathlib import Path

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "client",
    "core",
    "proto",
    "worker",
    "prefill_worker",
    "decode_worker",
    "kvtransfer",
    "router",
    "cluster",
    "bench",
)


def options_of(path):
    """What looks like the name of one, in the first place of a pair."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant):
            name = node.elts[0].value
            if isinstance(name, str) and name.startswith("grpc."):
                yield name


@pytest.mark.long
def test_grpc_knows_every_option():
    library = Path(cygrpc.__file__).read_bytes()
    names = {name for package in PACKAGES for path in (ROOT / package).rglob("*.py") for name in options_of(path)}
    assert "grpc.keepalive_time_ms" in names, "none were found"
    assert b"grpc.nothing_of_this_name" not in library
    assert [name for name in sorted(names) if name.encode() + b"\0" not in library] == []


def test_servers_bear_the_pings_that_clients_send():
    """A server that takes a client's keepalive for abuse ends a connection that was only idle."""
    from baton.router.access import listener
    from baton.router.attempt import channels
    from baton.worker import host

    pings_ms = dict(channels.OPTIONS)["grpc.keepalive_time_ms"]
    for options in (host.SERVER_OPTIONS, listener.SERVER_OPTIONS):
        assert dict(options)["grpc.http2.min_ping_interval_without_data_ms"] <= pings_ms / 2
        assert dict(options)["grpc.keepalive_permit_without_calls"] == 1


def test_a_worker_notices_a_router_that_answers_no_pings():
    """Its reports wait for a busy router, so nothing but pings tells a dead one whose host is gone."""
    from baton.router.access import listener
    from baton.worker import host

    pings = dict(host.ROUTER_OPTIONS)
    assert pings["grpc.keepalive_time_ms"] + pings["grpc.keepalive_timeout_ms"] < 1e3 * host.HEARTBEAT_TIMEOUT_S
    least_ms = dict(listener.SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    assert least_ms <= pings["grpc.keepalive_time_ms"] / 2
