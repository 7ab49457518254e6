"""Routes of transfers, which the worker's thread adds while the push thread goes through them."""

import pytest

from baton.core.clock import VirtualClock
from baton.core.kv_transports import RAW
from baton.core.requests.request import AttemptKey
from baton.kvtransfer.sender.route import PushRoutes, Route

pytestmark = pytest.mark.fast


class Chooser:
    def sweep(self):
        pass


class Protocol:
    """Adds a route whenever it is asked about one, as another thread may at that moment."""

    def __init__(self):
        self.routes = None
        self.lost = []

    def write_deadline_s(self, attempt):
        self.routes.add(route(f"{attempt.request_id}+"))
        return 7.0

    def data_path_lost(self, address, now_s):
        self.lost.append(address)
        return []


class Raw(str):
    """The raw data path; adds a route whenever it is compared with one."""

    __hash__ = str.__hash__
    routes = None

    def __eq__(self, other):
        self.routes.add(route(f"at {len(self.routes._routes)}"))
        return str.__eq__(self, other)


def route(name, **more):
    return Route(AttemptKey(name, 1), f"address of {name}", None, None, 1, **more)


def made(*routes):
    protocol = Protocol()
    protocol.routes = PushRoutes(protocol, Chooser(), VirtualClock())
    for one in routes:
        protocol.routes.add(one)
    return protocol, protocol.routes


def test_a_route_that_is_added_meanwhile_does_not_end_the_renewal():
    held = [route(name, is_held=True) for name in "abc"]
    _, routes = made(*held)
    routes.renew()
    assert all(one.fence.enter(7.0) and not one.fence.enter(7.1) for one in held), "all three were renewed"
    assert routes.get(AttemptKey("c+", 1)) is not None


def test_a_route_that_is_added_meanwhile_does_not_end_the_search_for_lost_frames():
    raw = [route(name, data_path=Raw(RAW)) for name in "abc"]
    protocol, routes = made(*raw, route("shm", data_path="shm"))
    Raw.routes = routes
    assert routes.ask_for_lost(1.0) == []
    assert sorted(protocol.lost) == [f"address of {name}" for name in "abc"]
    assert len(routes._routes) == 7
