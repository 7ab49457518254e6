"""The one-process engine over a gang of ranks, which are threads here: each role has a group and a model of its own.

In a product prefill and decode never share a process; here they do, so that the reference can be run by ranks too.
"""

import itertools

import torch

from baton.engine.decode import DecodeRunner
from baton.engine.gang import FollowDecode, FollowPrefill, LeadDecode, LeadPrefill
from baton.engine.grammar import GrammarCompiler
from baton.engine.local import LocalEngine
from baton.engine.plan_messages import Stop
from baton.engine.preemption import Preemption
from baton.engine.prefill import PrefillRunner
from baton.engine.step_pipeline import StepPipeline
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.model.ranks import channel_of, on_ranks

_names = itertools.count()


class LedEngine(LocalEngine):
    """Rank 0's engine: its runners tell the other ranks what they do."""

    def __init__(self, runners, channel, tokenizer, *, scheduling, host_kv_bytes=0, **options):
        prefill, decode = runners
        super().__init__(prefill._model, tokenizer, scheduling=scheduling, **options)
        self.pool = prefill._pool
        self._prefill = LeadPrefill(prefill, channel)
        self._decode = LeadDecode(decode, channel)
        self._steps = StepPipeline(self._decode, scheduling, self.speculation)
        self._preemption = Preemption(self._scheduler._allocator, self._scheduler, self._decode, self._steps)


def runners_of(path, tokenizer, groups, options):
    """Both runners of one rank, over one pool."""
    prefill_group, decode_group = groups
    load = {"dtype": torch.float64, "device": torch.device("cpu"), "with_mtp": True}
    models = [load_model(path, **load, **options["model"], communicator=group) for group in groups]
    layout, num_blocks = models[0].kv_layout(options["block_size"]), options["num_blocks"]
    pool = KVPool(layout, num_blocks, torch.device("cpu"), rank=prefill_group.rank, size=prefill_group.size)
    grammars = GrammarCompiler(tokenizer, models[0].config.vocab_size)
    ends = {"eos_token_ids": tokenizer.eos_token_ids, "grammars": grammars}
    prefill = PrefillRunner(models[0], pool, prefill_group, **ends)
    slots, drafts = options["max_num_sequences"], options["num_draft_tokens"]
    host = options.get("host_kv_bytes", 0)
    return prefill, DecodeRunner(models[1], pool, slots, drafts, decode_group, host_kv_bytes=host, **ends)


def run_over_ranks(size, path, tokenizer, work, *, model, **options):
    """`work(engine)` over a gang of `size` ranks; what it returns."""

    def rank_of(*groups):
        runners = runners_of(path, tokenizer, groups, {"model": model, **options})
        channel = channel_of(groups[0])
        try:
            if groups[0].rank == 0:
                engine = LedEngine(runners, channel, tokenizer, **options)
                made = work(engine)
                engine._decode.close()
                return made
            prefill, decode = FollowPrefill(runners[0], channel), FollowDecode(runners[1], channel)
            while not isinstance(plan := channel.hear(0.02 if decode._launched else None), Stop):
                assert plan is None or prefill.take(plan, lambda layer: None) or decode.take(plan)
                decode.look()
            runners[1].close()
            return None
        finally:
            channel.close()

    return on_ranks(size, rank_of, num_groups=2)[0]
