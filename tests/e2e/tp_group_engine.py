"""The one-process engine over a TP group of ranks, which are threads here, so that ranks can run the reference too."""

import torch

from baton.core.clock import MonotonicClock
from baton.engine.engine import Engine
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.local import LocalEngine
from baton.engine.scheduler import Scheduler
from baton.engine.step.runner import Runner
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.engine.graphs import graphed
from baton.tests.engine.recorded_group import RecordedGroup
from baton.tests.model.ranks import channel_of, on_ranks


class LedEngine(LocalEngine):
    """Rank 0's engine: its runner sends each plan to the other ranks. `balancer` is made of an exchange of experts."""

    def __init__(self, runner, channel, tokenizer, *, host_kv_bytes=0, verification=None, balancer=None, **options):
        super().__init__(runner._model, tokenizer, **options)
        self.pool = runner._pool
        self.runner.close()
        if runner.num_pools > 1:
            self.scheduler = scheduler_of_pools(runner, self.pool, overcommit=options.get("overcommit", False))
        self.runner = Rank0Runner(runner, channel, balancer(runner.experts) if balancer else None)
        self.engine = Engine(
            runner=self.runner,
            scheduler=self.scheduler,
            role=self._caller,
            clock=MonotonicClock(),
            max_num_batched_tokens=options["chunk_len"],
            scheduling=options["scheduling"],
            speculation=self.speculation,
            preempt_at=options.get("preempt_at", ()),
        )


def scheduler_of_pools(runner, pool, *, overcommit=False):
    """Over a pool at each rank."""
    sizes = pool.num_blocks, pool.layout.block_size
    allocators = [BlockAllocator(*sizes, first=rank * pool.num_blocks) for rank in range(runner.num_pools)]
    return Scheduler(allocators[0], num_slots=runner.max_num_seqs, overcommit=overcommit, others=allocators[1:])


def runner_of(path, tokenizer, group, options):
    """One rank's."""
    load = {"dtype": torch.float64, "device": torch.device("cpu"), "with_mtp": True} | options["model"]
    model = load_model(path, **load, communicator=group)
    layout = model.kv_layout(options["block_size"])
    return Runner(
        model,
        KVPool(
            layout,
            options["num_blocks"],
            torch.device("cpu"),
            rank=group.rank,
            size=group.size,
            num_state_slots=options["max_num_sequences"] if layout.has_state else 0,
        ),
        max_num_seqs=options["max_num_sequences"],
        num_draft_tokens=options["num_draft_tokens"],
        communicator=group,
        eos_token_ids=tokenizer.eos_token_ids,
        verification=options.get("verification"),
        lookup=options.get("lookup"),
        grammars=GrammarCompiler(tokenizer, model.config.vocab_size),
        host_kv_bytes=options.get("host_kv_bytes", 0),
    )


def run_over_ranks(size, path, tokenizer, work, *, model, graphs=None, **options):
    """`work(engine)` over a TP group of `size` ranks; what it returns.

    With `graphs`, sizes of batches and of tables, decode-only steps are replayed.
    """

    def rank_of(group):
        channel = channel_of(group)
        if graphs is not None:
            group = RecordedGroup(group)
        runner = runner_of(path, tokenizer, group, {"model": model, **options})
        try:
            if graphs is not None:
                runner.graphs = graphed(
                    runner._model, runner._pool, k=options["num_draft_tokens"], group=group, **graphs
                )
            if group.rank > 0:
                RankRunner(runner, channel).run()
                return None
            engine = LedEngine(runner, channel, tokenizer, **options)
            made = work(engine)
            engine.runner.close()
            return made
        finally:
            channel.close()

    return on_ranks(size, rank_of)[0]
