"""Which incarnation of the router a worker's calls are meant for; the router's refusals name it. Opens no channel."""

import re

import grpc
import grpc.aio

from baton.core.errors import Unauthenticated
from baton.core.inside import ROUTER
from baton.proto import wire

_NAME = re.compile(f"{ROUTER}@[0-9a-f]{{16}}")


class RouterIncarnation:
    """The router's incarnation, as far as a worker knows it.

    Attributes:
        name: for proofs; empty before the router was met.
        is_meeting: whether the last call failed only because this was another incarnation.
    """

    def __init__(self) -> None:
        self.name = ""
        self.is_meeting = False  # only one call is repeated at once, whatever the other side sends

    def meets(self, error: grpc.RpcError) -> bool:
        """Return whether a call failed only because the router is a new incarnation; the next call then names it.

        A proof for an incarnation that another server made up is of no use to that server.
        """
        code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
        if self.is_meeting or code is not grpc.StatusCode.UNAUTHENTICATED:
            self.is_meeting = False
            return False
        typed = wire.error_from_rpc(error)
        incarnation = str(typed.fields.get("callee", "")) if isinstance(typed, Unauthenticated) else ""
        if not _NAME.fullmatch(incarnation) or incarnation == self.name:
            return False
        self.name, self.is_meeting = incarnation, True
        return True
