"""What a heartbeat says of the time that steps over prompts take."""

from baton.core.pace import PrefillPace
from baton.proto import worker_pb2


def pace_to_proto(pace: PrefillPace) -> worker_pb2.PrefillPace | None:
    """The message; None before anything was measured. Any thread; its numbers may be of two steps."""
    if not pace.is_known:
        return None
    return worker_pb2.PrefillPace(fixed_s=pace.fixed_s, per_token_s=pace.per_token_s, draft_s=pace.draft_s)
