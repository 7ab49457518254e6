"""What a decode worker reports of its CUDA graphs."""

from baton.engine.graphs.graphed_step import GraphedStep
from baton.proto import worker_pb2


def graph_counts(step: GraphedStep | None) -> worker_pb2.GraphCounts | None:
    """For a heartbeat; None without graphs. Any thread."""
    if step is None:
        return None
    counts = step.counts
    return worker_pb2.GraphCounts(
        num_captured=counts.num_captured,
        failed=dict(counts.failed),
        num_steps_replayed=counts.num_steps_replayed,
        num_steps_eager={reason.value: num for reason, num in counts.num_steps_eager.items()},
        num_sequences_padded=counts.num_sequences_padded,
    )
