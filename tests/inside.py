"""Calls that tests make as a router or as a worker of the deployment that all processes of a test run are one of."""

import grpc

from baton.core.inside import ROUTER, Caller, DeploymentSecret, incarnation_name, worker_name
from baton.proto import wire
from baton.proto.inside import InsideChannel


def worker_channel(channel, role, worker_id, epoch, secret=None):
    """`channel`, to a worker, with the proofs of its router."""
    name = worker_name(role, worker_id)
    caller = Caller(ROUTER, (secret or DeploymentSecret.of_process()).worker_key(name))
    callee = incarnation_name(name, epoch)
    return InsideChannel(channel, caller, lambda: callee)


def router_channel(channel, role, worker_id, callee, secret=None):
    """`channel`, to a router that is in the life `callee`, with the proofs of a worker."""
    name = worker_name(role, worker_id)
    return InsideChannel(
        channel, Caller(name, (secret or DeploymentSecret.of_process()).worker_key(name)), lambda: callee
    )


def node_channel(channel, node):
    """`channel`, to a worker that runs in this process."""
    state = node.state()
    return worker_channel(channel, state.role, state.worker_id, state.epoch)


def met(channel, secret=None):
    """`channel`, of threads, to a worker of which no more is known than the address."""
    try:
        channel.unary_unary("/baton.v1.Admin/Inventory")(b"", timeout=20.0)
    except grpc.RpcError as error:
        name, _, epoch = wire.error_from_rpc(error).fields["callee"].partition("@")
        caller = Caller(ROUTER, (secret or DeploymentSecret.of_process()).worker_key(name))
        return InsideChannel(channel, caller, lambda: f"{name}@{epoch}")
    raise AssertionError("a worker answers without a proof")
