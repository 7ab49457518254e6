"""One request until it ends: a first attempt, and others elsewhere when a hand-off failed.

It chooses pairs and counts attempts; what happens within an attempt is `request_run`'s. A recompute gives the same
tokens (greedy, or drawn by the request's seed), so what the client has already is checked, and not sent again. Only
failed hand-offs are tried again, a few times and within the request's deadline: a request that loses a worker ends.
"""

import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

from baton.core.clock import Clock
from baton.core.errors import ProtocolError, TransferFailed, WorkersIncompatible
from baton.core.request import AttemptKey, GenerationRequest
from baton.proto import worker_pb2
from baton.router.channels import Channels
from baton.router.members import DECODE, PREFILL, Members
from baton.router.policy import Lives, Pair, Policy
from baton.router.refusals import Refusals
from baton.router.request_run import Emitted, RequestRun
from baton.router.token_order import TokenOrder

log = logging.getLogger(__name__)

MAX_RETRIES: Final = 2


class Attempts:
    """Iterate `events`, then `close` in any case.

    Args:
        request: its first attempt; its seed is fixed.
        policy: chooses pairs.
        members: who is alive.
        refusals: pairs that cannot work; it grows by what is found here.
        channels: to workers.
        clock: that deadlines are read from.
        spawn: runs a coroutine in the background and keeps hold of it.
        on_retry: called before each attempt but the first.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        policy: Policy,
        members: Members,
        refusals: Refusals,
        channels: Channels,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_retry: Callable[[], None],
    ) -> None:
        self.request = request
        self.num_retries = 0
        self.first: worker_pb2.FirstToken | None = None  # of the attempt whose first token the client got
        self.first_pair: Pair | None = None
        self._policy = policy
        self._members = members
        self._refusals = refusals
        self._channels = channels
        self._clock = clock
        self._spawn = spawn
        self._on_retry = on_retry
        self._order = TokenOrder(request.sampling.max_tokens)
        self._failed: set[Lives] = set()
        self._run: RequestRun | None = None

    @property
    def run(self) -> RequestRun:
        """The attempt that is under way, or was the last."""
        assert self._run is not None
        return self._run

    async def events(self) -> AsyncIterator[Emitted]:
        """Tokens in order, each once; ends after the one with a finish reason.

        Raises:
            BatonError: what ended the request; all tokens that had arrived were yielded before.
        """
        while True:
            pair = self._pick()
            self._run = run = self._start(pair)
            try:
                async for emitted in run.events():
                    if self.first is None:
                        self.first, self.first_pair = run.first, pair
                    new = self._take(emitted)
                    if new is not None:
                        yield new
                return
            except TransferFailed as error:
                if not self._may_retry(pair, error):
                    raise
                self.close()
                self.num_retries += 1
                self._on_retry()
                log.warning("%s is tried again: %s", run.request.key, error.message)

    def close(self) -> None:
        """End the attempt that is under way, if it has not ended."""
        if self._run is not None:
            self._run.close()
            self._spawn(self._run.drain())

    def _pick(self) -> Pair:
        """A pair that has not failed this request if there is one, else one that has.

        Raises:
            NoWorker: a role has no live worker.
            WorkersIncompatible: every live pair has refused.
        """
        prefill, decode = self._members.live(PREFILL), self._members.live(DECODE)
        refused = self._refusals.lives()
        try:
            return self._policy.pick(prefill, decode, refused | self._failed)
        except WorkersIncompatible:
            try:
                return self._policy.pick(prefill, decode, refused)
            except WorkersIncompatible as error:
                raise self._incompatible(error) from None

    def _incompatible(self, error: WorkersIncompatible) -> WorkersIncompatible:
        refusal = self._refusals.all()[0]
        who = f"{refusal.prefill.worker_id} and {refusal.decode.worker_id}"
        return WorkersIncompatible(f"{error.message}; {who}: {refusal.reason}", reason=refusal.reason, **error.fields)

    def _start(self, pair: Pair) -> RequestRun:
        key = AttemptKey(self.request.key.request_id, self.request.key.attempt + self.num_retries)
        request = dataclasses.replace(self.request, key=key)
        run = RequestRun(request, pair, channels=self._channels, members=self._members, clock=self._clock)
        run.start()
        return run

    def _take(self, emitted: Emitted) -> Emitted | None:
        first = len(self._order)
        try:
            new = self._order.take(emitted.index, emitted.token_ids)
        except ProtocolError as error:
            if not self.num_retries:
                raise
            # Default numerics promise equal tokens but for near-ties, and this was one.
            raise TransferFailed(f"a recompute gave other tokens: {error.message}", diverged=True) from error
        if new or emitted.finish_reason:
            logprobs = emitted.logprobs[len(emitted.token_ids) - len(new) :]
            prompt_logprobs = () if first else emitted.prompt_logprobs
            return Emitted(first, new, emitted.finish_reason, logprobs, prompt_logprobs)
        return None

    def _may_retry(self, pair: Pair, error: TransferFailed) -> bool:
        reason = error.fields.get("pair_refused")
        if reason:
            self._refusals.add(pair, str(reason))
            log.warning("%s and %s are not paired again: %s", *(life.worker_id for life in pair.lives), reason)
        self._failed.add(pair.lives)
        is_in_time = self._clock.now_s() < self.request.deadline_s
        return is_in_time and self.num_retries < MAX_RETRIES and not error.fields.get("diverged")
