"""Runners and engines whose steps are replayed from recorded graphs."""

import torch

from baton.core.start_phase import no_phase
from baton.engine.graphs.graphed_step import GraphedStep
from baton.engine.graphs.key import GraphSizes
from baton.engine.local import LocalEngine
from baton.tests.engine.recorder import RecorderBackend

NO_LIMIT = 1 << 40


def graphed(
    model, pool, *, k, sizes, widths=None, backend=None, group=None, max_entries=NO_LIMIT, rows=(), on_phase=no_phase
):
    """A captured step."""
    widths = widths or (2, -(-model.config.max_model_len // pool.layout.block_size))
    all_sizes = GraphSizes(
        sizes=sizes,
        widths=widths,
        num_draft_tokens=k,
        max_entries=max_entries,
        rows=rows,
        has_mtp=pool.layout.has_mtp,
        num_owners=1 if model.deal is None else model.deal.size,
    )
    step = GraphedStep(model, pool, all_sizes, backend or RecorderBackend(), group)
    with torch.inference_mode():
        step.capture(on_phase)
    return step


def with_graphs(engine, *, sizes=(1, 3, 4), **options):
    """The engine, its decode-only steps replayed from now on."""
    runner = engine.runner
    assert runner.graphs is None
    runner.graphs = graphed(runner._model, engine.pool, k=runner.num_draft_tokens, sizes=sizes, **options)
    return engine


def bundled_engine(model, tokenizer, k):
    """Of the bundled model, few sequences in small chunks."""
    return LocalEngine(
        model,
        tokenizer,
        num_blocks=200,
        block_size=16,
        num_draft_tokens=k,
        chunk_len=64,
        max_num_sequences=4,
    )


def assert_all_replayed(engine):
    """Every step that only decoded; those with chunks beside are launched, and not counted."""
    counts = engine.runner.graphs.counts
    assert counts.num_steps_replayed > 0
    assert not any(counts.num_steps_eager.values())
    assert not counts.failed
