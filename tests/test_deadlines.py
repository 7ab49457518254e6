"""Every unary call of Baton has a deadline: the other end may never answer."""

import ast
from pathlib import Path

import pytest

from baton.proto import admin_pb2, inference_pb2, worker_pb2

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "client", "cluster", "decode_worker", "prefill_worker", "proto", "router", "runbook", "worker")
UNARY = {
    method.name
    for module in (admin_pb2, inference_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.server_streaming and not method.client_streaming
}


def unary_calls(tree):
    """Calls of a stub's method; by its name, through `getattr`, or of a method that was given as `method`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(of, name) if name in UNARY and not ast.unparse(of).endswith("_pb2"):  # a message
                yield node
            case ast.Call(func=ast.Name("getattr")) as found if "Stub" in ast.unparse(found):
                yield node
            case ast.Name("method") if [ast.unparse(one) for one in node.args] == ["request"]:
                yield node


def without_deadline(source):
    return [
        call.lineno
        for call in unary_calls(ast.parse(source))
        if not any(word.arg == "timeout" and ast.unparse(word.value) != "None" for word in call.keywords)
    ]


@pytest.mark.long
def test_every_unary_call_has_a_deadline():
    num_calls = 0
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "_pb2" not in path.name:
                source = path.read_text()
                assert not without_deadline(source), path
                num_calls += len(list(unary_calls(ast.parse(source))))
    assert num_calls >= 13  # or it does not find them


@pytest.mark.parametrize(
    "source",
    [
        "stub.Inventory(request)",
        "stub.Status(request, timeout=None)",
        "getattr(admin_pb2_grpc.AdminStub(channel), name)(request)",
    ],
)
def test_a_call_without_a_deadline_is_found(source):
    assert without_deadline(source) == [1]
