"""Canaries are clients: where they would be refused, a runbook says so before its first step."""

import importlib
import json
from concurrent import futures

import grpc
import pytest

from baton.client.access import Access
from baton.cluster.cli import RUNBOOKS, runbook_names
from baton.core.clock import MonotonicClock
from baton.core.errors import Overloaded, PermissionDenied, PreconditionUnmet, Unauthenticated
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, wire
from baton.runbook.common.canary import require_client
from baton.runbook.common.command import main
from baton.runbook.common.site import Site

pytestmark = pytest.mark.fast


class Operators(admin_pb2_grpc.AdminServicer):
    def Status(self, request, context):
        return admin_pb2.StatusReply(model="stub")


class Clients(inference_pb2_grpc.InferenceServicer):
    error = None

    def GetModel(self, request, context):
        if self.error is not None:
            context.set_trailing_metadata(((wire.ERROR_KEY, self.error.to_wire()),))
            context.abort(getattr(grpc.StatusCode, self.error.grpc_code), "no")
        return inference_pb2.Model(name="stub")


@pytest.fixture
def ports():
    """The operators' address, the clients', and who answers there."""
    clients, addresses, servers = Clients(), [], []
    for add, servicer in (
        (admin_pb2_grpc.add_AdminServicer_to_server, Operators()),
        (inference_pb2_grpc.add_InferenceServicer_to_server, clients),
    ):
        server = grpc.server(futures.ThreadPoolExecutor(2))
        add(servicer, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        server.start()
        servers.append(server)
    yield *addresses, clients
    for server in servers:
        server.stop(None)


def site_of(address, client_address=""):
    return Site(address, MonotonicClock(), 10.0, client_address, Access())


def test_the_operators_port_is_named_and_what_to_give(ports):
    operators, clients, _ = ports
    with pytest.raises(PreconditionUnmet, match="give --client-address"):
        require_client(site_of(operators))
    require_client(site_of(operators, clients))


@pytest.mark.parametrize("kind", [Unauthenticated, PermissionDenied])
def test_a_key_that_lets_no_client_in_is_told(ports, kind):
    operators, address, clients = ports
    clients.error = kind("no API key")
    with pytest.raises(PreconditionUnmet, match="no API key; give a client's key"):
        require_client(site_of(operators, address))


def test_whatever_else_is_wrong_is_the_runbooks_to_find(ports):
    operators, address, clients = ports
    clients.error = Overloaded("full", retry_after_s=100.0)
    require_client(site_of(operators, address))
    require_client(site_of("127.0.0.1:1"))


def test_nothing_is_begun_and_the_exit_code_is_that_of_a_precondition(ports, capsys):
    operators, _, _ = ports
    runbook = importlib.import_module("baton.runbook.poison_request").RUNBOOK
    assert main(runbook, ["--address", operators, "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["error"] == "PreconditionUnmet"
    assert "--client-address" in said["message"]


@pytest.mark.parametrize("name", [name.replace("-", "_") for name in runbook_names()])
def test_a_runbook_that_sends_canaries_says_so(name):
    text = (RUNBOOKS / f"{name}.py").read_text()
    sends = "runbook.common.canary" in text or "runbook.common.replace" in text
    assert importlib.import_module(f"baton.runbook.{name}").RUNBOOK.sends_canaries == sends
