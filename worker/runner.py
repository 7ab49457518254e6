"""The runner of a worker's rank, as its configuration asks for it."""

from baton.core.config import WorkerConfig
from baton.engine.graphs.graphed_step import graphed_step
from baton.engine.step.runner import OpenPush, Runner
from baton.model.parallel import Communicator
from baton.worker.loading import LoadedWorker, reach_of


def decode_runner(config: WorkerConfig, loaded: LoadedWorker, communicator: Communicator | None) -> Runner:
    """For a worker that decodes, and computes prompts; warmed up, its CUDA graphs captured."""
    graphs = graphed_step(
        loaded.model,
        loaded.pool,
        config.graphs,
        max_num_sequences=config.max_num_seqs,
        num_draft_tokens=config.num_draft_tokens,
        max_model_len=config.max_model_len,
        communicator=communicator,
    )
    runner = Runner(
        loaded.model,
        loaded.pool,
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=config.num_draft_tokens,
        communicator=communicator,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        verification=config.verification,
        grammars=loaded.grammars,
        graphs=graphs,
        host_kv_bytes=config.host_kv_bytes,
    )
    runner.warm_up(reach_of(config, loaded.model))
    return runner


def prefill_runner(
    config: WorkerConfig, loaded: LoadedWorker, communicator: Communicator | None, open_push: OpenPush
) -> Runner:
    """For a worker that computes prompts alone, and pushes their KV; warmed up."""
    runner = Runner(
        loaded.model,
        loaded.pool,
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=0,
        communicator=communicator,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        grammars=loaded.grammars,
        open_push=open_push,
    )
    runner.warm_up(reach_of(config, loaded.model), decodes=False)
    return runner
