"""The fault matrix as a table: thirty faults, how each is really put in, and which states of requests it must hit."""

from baton.tests.e2e import process_faults as process
from baton.tests.e2e.fault_run import Row

ROWS = (
    Row(
        number=1,
        name="decode killed",
        how="SIGKILL while it decodes, and at last tokens; streams go on elsewhere",
        act=process.decode_killed,
        aims=("decoding", "finishing"),
        hits=("decode-0",),
    ),
    Row(
        number=2,
        name="prefill killed before its first push",
        how="SIGKILL while it asks for a landing; nothing was streamed, and nothing is noticed",
        act=process.prefill_killed_before_push,
        aims=("reserving",),
        hits=("prefill-0",),
    ),
    Row(
        number=3,
        name="prefill killed in its push",
        how="SIGKILL while it pushes, and while it commits; what had landed is thrown away",
        act=process.prefill_killed_in_push,
        aims=("pushing", "committing"),
        hits=("prefill-0", "prefill-1"),
    ),
    Row(
        number=4,
        name="worker stopped",
        how="SIGSTOP of all its processes until it is given up, then SIGCONT: its late words reach nobody",
        act=process.stopped,
        aims=("decoding", "pushing"),
    ),
)
