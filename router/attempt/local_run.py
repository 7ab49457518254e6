"""One attempt whose prompt the decode worker computes itself: one leg, which says everything."""

import asyncio

from baton.core.clock import Clock
from baton.core.requests.request import GenerationRequest
from baton.proto import wire, worker_pb2
from baton.router.attempt.channels import Channels
from baton.router.attempt.in_flight_tracker import Guest
from baton.router.attempt.leg import Leg
from baton.router.attempt.request_run import RequestRun
from baton.router.placement.policy import Pair


class LocalRun(RequestRun):
    """As `RequestRun`, without a prefill worker."""

    is_local = True

    def __init__(self, request: GenerationRequest, pair: Pair, *, channels: Channels, clock: Clock) -> None:
        super().__init__(request, pair, channels=channels, clock=clock)
        self._prefill = Leg("decode", pair.decode)  # for what is said of it; it is never started

    @property
    def prefill_worker(self) -> str:
        """Nobody."""
        return ""

    @property
    def decode_worker(self) -> str:
        """Who does it all, also if the request ended at its first token."""
        return self._decode.worker_id

    def start(self, guest: Guest) -> None:
        """Open the one leg."""
        now_s = self._clock.now_s()
        left_s = self.request.deadline_s - now_s
        self._timers.append(asyncio.get_running_loop().call_later(max(left_s, 0.0), self._expire))
        self._open_decode(now_s)
        self._decode.watch(guest, self.request.key, self._fail)
        if self._ended:  # it is lost already
            self._end()

    def _attend_request(self, now_s: float) -> worker_pb2.AttendRequest:
        return wire.attend_request(self.request, now_s, prefill_here=True)

    def _on_other(self, event: worker_pb2.DecodeEvent) -> None:
        if event.HasField("first_token"):
            self._on_first_token(event.first_token)
        elif event.HasField("prompt_logprobs"):
            self._on_prompt_logprobs(event.prompt_logprobs)
