"""What decode steps did and who waits, between the core's types and the messages of a heartbeat."""

from collections.abc import Mapping

from baton.core.distribution import Distribution
from baton.core.errors import MalformedMessage
from baton.core.telemetry.step_report import RowCounts, StepReport
from baton.proto import worker_pb2


def report_to_proto(report: StepReport) -> worker_pb2.StepCounts:
    """For a heartbeat."""
    return worker_pb2.StepCounts(
        num_steps=report.num_steps,
        computed=_rows_to_proto(report.computed),
        kept=_rows_to_proto(report.kept),
        cut=_rows_to_proto(report.cut),
        late=_rows_to_proto(report.late),
        failed=_rows_to_proto(report.failed),
        step_seconds=distribution_to_proto(report.step_s),
        host_gap_seconds=distribution_to_proto(report.host_gap_s),
        step_tokens=distribution_to_proto(report.step_tokens),
        step_sequences=distribution_to_proto(report.step_sequences),
    )


def report_from_proto(message: worker_pb2.StepCounts) -> StepReport:
    """From a heartbeat.

    Raises:
        MalformedMessage: numbers in it do not fit together.
    """
    rows = [_rows_from_proto(item) for item in (message.computed, message.kept, message.cut)]
    rows += [_rows_from_proto(item) for item in (message.late, message.failed)]
    if len({len(item.proposed_at) for item in rows} | {len(item.accepted_at) for item in rows}) > 1:
        raise MalformedMessage("counts of decode steps with different numbers of drafts")
    computed, kept, cut, late, failed = rows
    return StepReport(
        num_steps=message.num_steps,
        computed=computed,
        kept=kept,
        cut=cut,
        late=late,
        failed=failed,
        step_s=distribution_from_proto(message.step_seconds),
        host_gap_s=distribution_from_proto(message.host_gap_seconds),
        step_tokens=distribution_from_proto(message.step_tokens),
        step_sequences=distribution_from_proto(message.step_sequences),
    )


def waiting_to_proto(waiting: Mapping[str, int]) -> list[worker_pb2.Waiting]:
    """Requests by what they wait for."""
    return [worker_pb2.Waiting(reason=reason, num_requests=num) for reason, num in waiting.items()]


def _rows_to_proto(rows: RowCounts) -> worker_pb2.RowCounts:
    return worker_pb2.RowCounts(
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
        proposed_at=rows.proposed_at,
        accepted_at=rows.accepted_at,
    )


def _rows_from_proto(message: worker_pb2.RowCounts) -> RowCounts:
    return RowCounts(
        num_rows=message.num_rows,
        num_tokens=message.num_tokens,
        proposed_at=tuple(message.proposed_at),
        accepted_at=tuple(message.accepted_at),
    )


def distribution_to_proto(found: Distribution) -> worker_pb2.Distribution:
    """A histogram as a message."""
    return worker_pb2.Distribution(bounds=found.bounds, counts=found.counts, total=found.total)


def distribution_from_proto(message: worker_pb2.Distribution) -> Distribution:
    """The histogram in a message.

    Raises:
        MalformedMessage: its counts do not fit its bounds.
    """
    return Distribution.checked(message.bounds, message.counts, message.total)
