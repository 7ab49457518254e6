"""Host cost of a decode step: the worker's loop and the runner, with a forward pass that costs nothing.

`python -m baton.bench.decode_bench.host --json` runs the loop of a decode worker (plan, launch, read one step late,
finish checks, counts, one event per sequence) over a constant batch, with a step that answers at once with fixed
accepted lengths. Everything else is Baton's. CPU time of the whole process is counted, so that no thread hides any of
it. A calibration loop in plain Python shows how fast the machine was. The sockets that events are sent to are not
included.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from baton.bench.result import result, spread
from baton.core.clock import MonotonicClock
from baton.core.config import SchedulingName
from baton.core.errors import BatonError
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.core.requests.validate import RequestLimits
from baton.decode_worker.request import DecodeRequest
from baton.decode_worker.worker import DecodeWorker
from baton.engine.finish import FinishChecker
from baton.engine.sequence import Phase
from baton.engine.sequence import Sequence as EngineSequence
from baton.engine.speculation.drafting import DraftSource
from baton.engine.speculation.verify import Verified
from baton.engine.step.plan import Resume
from baton.engine.step.runner import Runner, _Work
from baton.engine.step.step import DecodeSample, Extended, PromptSample
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import KVPool
from baton.kvtransfer.receiver.service import ReceiverService
from baton.model.model import Model
from baton.model.vocab import WHOLE
from baton.proto import worker_pb2

BATCHES = (1, 64, 256)
LIMITS_MS = {1: 0.35, 64: 0.8, 256: 2.0}
NUM_DRAFTS = 3
PROMPT_LEN = 1024
MAX_MODEL_LEN = 8192
BLOCK_SIZE = 16
VOCAB_SIZE = 151_936
CALIBRATION_LOOPS = 100_000


_NO_SOURCE = cast(DraftSource, None)  # for drafts that are never drawn


class _FakeModel:
    """A model without weights, with what a runner reads of it."""

    dtype = torch.float32
    vocab = WHOLE
    sampling_implementation = None
    deal = None
    config = SimpleNamespace(num_layers=1, hidden_size=8, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


class _Sink:
    """Counts the events of a stream."""

    def __init__(self) -> None:
        self.ended = False
        self.num_events = 0

    def emit(self, event: worker_pb2.DecodeEvent) -> None:
        """Count the event."""
        self.num_events += 1

    def end(self, error: BatonError | None = None) -> None:
        """Mark the stream as ended."""
        self.ended = True


class _NoIncoming:
    """A source of incoming transfers that never has one."""

    wakeup: Callable[[], None]

    def poll(self) -> list[Any]:
        """Return nothing."""
        return []


class _NoText:
    """A tokenizer that is never asked for text."""

    eos_token_ids: tuple[int, ...] = (VOCAB_SIZE - 1,)


class _Loop(DecodeWorker):
    """A decode worker whose loop is turned by the caller, with all sequences there from the start."""

    def fill(self, num_sequences: int) -> None:
        """Admit `num_sequences` sequences, each in a slot."""
        for index in range(num_sequences):
            key = AttemptKey(f"r{index}", 1)
            prompt = (1,) * PROMPT_LEN
            sampling = SamplingParams(max_tokens=MAX_MODEL_LEN - PROMPT_LEN - NUM_DRAFTS, temperature=0.0)
            request = GenerationRequest(
                key=key,
                prompt_token_ids=prompt,
                sampling=sampling,
                deadline_s=float("inf"),
                num_draft_tokens=NUM_DRAFTS,
            )
            checker = FinishChecker(sampling, self._tokenizer.eos_token_ids, self._tokenizer)
            sequence = EngineSequence(
                request=request,
                checker=checker,
                draft_cap=NUM_DRAFTS,
                submitted_s=0.0,
                phase=Phase.EXPECTED,
                is_received=True,
            )
            self._add(DecodeRequest(sequence, _Sink()))
            self.engine.scheduler.expect_now(sequence)
            assert self.engine.scheduler.give_blocks() == [sequence]
            sequence.token_ids += checker.accept([1])[0]
            sequence.resume = Resume(draft_token=2)
            self.engine.scheduler.make_ready(sequence)

    def turn(self) -> None:
        """Run one turn of the loop."""
        self.engine.step()

    @property
    def num_verified(self) -> int:
        """Number of sequence steps that were read."""
        return self.engine.tally.kept().num_rows


class _FakeRunner(Runner):
    """A runner whose steps accept 0, 1, 2, 3, 0, ... drafts of the sequences, whatever these are."""

    def _sampled(self, work: _Work) -> tuple[DecodeSample | None, PromptSample | None]:
        assert work.decode is not None
        state = work.decode.state
        batch_size = len(state.length_B)
        accepted_len_B = torch.arange(batch_size) % (NUM_DRAFTS + 1)
        sample = DecodeSample(
            verified=Verified(token_ids_BQ=torch.full((batch_size, NUM_DRAFTS + 1), 7), accepted_len_B=accepted_len_B),
            state=replace(state, length_B=state.length_B + accepted_len_B + 1),
            trunk_TD=state.hidden_BD,
            last_row_B=accepted_len_B,
            accepted_len_B=accepted_len_B,
            is_idle_B=None,
            source=_NO_SOURCE,
        )
        return sample, None

    def _extended(self, work: _Work) -> tuple[Extended | None, Extended | None]:
        assert work.decode is not None
        return Extended(work.decode.state.draft_token_B, work.decode.state.hidden_BD), None


def _loop(batch_size: int, scheduling: SchedulingName) -> _Loop:
    layout = KVLayout.of_attention(
        model_hash="none",
        num_layers=2,
        num_kv_heads=1,
        head_dim=1,
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
        has_mtp=True,
    )
    pool = KVPool(layout, batch_size * (MAX_MODEL_LEN // BLOCK_SIZE), torch.device("cpu"))
    model = cast(Model, _FakeModel())
    loop = _Loop(
        runner=_FakeRunner(model, pool, max_num_seqs=batch_size, num_draft_tokens=NUM_DRAFTS),
        pool=pool,
        tokenizer=cast(Tokenizer, _NoText()),
        limits=RequestLimits(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            num_draft_tokens=NUM_DRAFTS,
            prefill_capacity_len=MAX_MODEL_LEN,
            decode_capacity_len=MAX_MODEL_LEN,
        ),
        incoming=cast(ReceiverService, _NoIncoming()),
        max_queue_len=batch_size,
        clock=MonotonicClock(),
        on_fatal=_raise,
        max_num_batched_tokens=batch_size * (NUM_DRAFTS + 1),
        scheduling=scheduling,
    )
    loop.fill(batch_size)
    return loop


def _raise(error: BaseException) -> None:
    raise error


def calibrate_ms() -> float:
    """CPU milliseconds of a fixed loop in plain Python."""
    begin_s = time.process_time()
    total = 0
    for value in range(CALIBRATION_LOOPS):
        total += value
    return 1e3 * (time.process_time() - begin_s)


def measure(batch_size: int, scheduling: SchedulingName, *, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Measure one row: milliseconds of a step, by rounds."""
    loop = _loop(batch_size, scheduling)
    for _ in range(20):
        loop.turn()
    cpu_ms, wall_ms, loop_ms, calibration_ms = [], [], [], []
    for _ in range(num_rounds):
        calibration_ms.append(calibrate_ms())
        cpu_s, wall_s, loop_s = time.process_time(), time.monotonic(), time.thread_time()
        for _ in range(num_steps):
            loop.turn()
        cpu_ms.append(1e3 * (time.process_time() - cpu_s) / num_steps)
        wall_ms.append(1e3 * (time.monotonic() - wall_s) / num_steps)
        loop_ms.append(1e3 * (time.thread_time() - loop_s) / num_steps)
    assert loop.num_verified >= batch_size * num_steps * num_rounds
    return {
        "batch": batch_size,
        "mtp_k": NUM_DRAFTS,
        "scheduling": scheduling,
        "limit_ms": LIMITS_MS[batch_size],
        **spread("cpu_ms", cpu_ms),
        **spread("loop_cpu_ms", loop_ms),
        **spread("wall_ms", wall_ms),
        **spread("calibration_ms", calibration_ms),
    }


def bench_decode_host(batches: Sequence[int] = BATCHES, *, num_steps: int = 200, num_rounds: int = 5) -> dict[str, Any]:
    """Measure every batch size, with both ways of scheduling."""
    torch.set_num_threads(1)
    modes: tuple[SchedulingName, ...] = ("async", "sync")
    rows = [measure(batch, mode, num_steps=num_steps, num_rounds=num_rounds) for batch in batches for mode in modes]
    return result("decode_host", rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="CPU time of the host in one decode step, with a fake forward pass.")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--steps", type=int, default=200, help="steps a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    data = bench_decode_host(num_steps=options.steps, num_rounds=options.rounds)
    if options.json:
        print(json.dumps(data))
        return
    for row in data["rows"]:
        print(
            f"{row['scheduling']:5} B={row['batch']:<4} cpu {row['cpu_ms']:.3f} ms (limit {row['limit_ms']}), "
            f"loop thread {row['loop_cpu_ms']:.3f} ms, wall {row['wall_ms']:.3f} ms, "
            f"calibration {row['calibration_ms']:.2f} ms"
        )


if __name__ == "__main__":
    main()
