"""What an operator last asked of the decode workers' drafts: told at once, and again to whoever was not there."""

from collections.abc import Sequence

from baton.core.errors import InvalidRequest
from baton.proto import worker_pb2


class DesiredSpeculation:
    """The mode that decode workers should be in; None until an operator sets one."""

    def __init__(self) -> None:
        self.mode: worker_pb2.SpeculationMode | None = None

    def set_mode(self, mode: worker_pb2.SpeculationMode, limits: Sequence[int]) -> None:
        """Wish for `mode`.

        Args:
            mode: a number of drafts, or auto.
            limits: the most drafts that each decode worker can make.

        Raises:
            InvalidRequest: it names no mode, or more drafts than one of them can make.
        """
        kind = mode.WhichOneof("mode")
        if kind is None or (kind == "auto" and not mode.auto):
            raise InvalidRequest("neither a number of draft tokens nor auto", field="mode")
        if kind == "num_draft_tokens" and mode.num_draft_tokens > min(limits):
            message = f"{mode.num_draft_tokens} draft tokens: this deployment was started with at most {min(limits)}"
            raise InvalidRequest(message, field="num_draft_tokens", value=mode.num_draft_tokens, limit=min(limits))
        self.mode = worker_pb2.SpeculationMode()
        self.mode.CopyFrom(mode)
