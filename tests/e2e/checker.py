"""One checker for every fault: it writes down what clients were given, and replays each request where nothing fails.

The invariants, of whatever fault (`docs/concepts.md` promises them; the numbers are those that the tests print):

    I1  the tokens delivered are those of the run without a fault, or their beginning and then a typed error
    I2  every token once, in order, none left out
    I3  some time after the fault nothing is held for requests that are over
    I4  every request has ended by its deadline
    I5  workers that were not hit are healthy, in the life they were in
    I6  errors are typed, and of the codes that this fault may have
"""

import asyncio
import time
from dataclasses import dataclass, field

import grpc

from baton.client.messages import generate_request
from baton.core.errors import BatonError, MalformedMessage, ProtocolError
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.proto import inference_pb2_grpc, wire

DEADLINE_S = 90.0
LATE_S = 15.0  # of a busy machine, between a deadline and the word of it
UNTYPED = (MalformedMessage, ProtocolError)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a client."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(eq=False)
class Delivery:
    """What one client was given.

    Attributes:
        name: of the request.
        allowed: errors that are right here; empty: it is to be complete.
        must_fail: an error of those is the only right end.
        events: (when, index, token ids), as they came.
        error: what ended it, if not its finish.
        workers: of the attempt that finished it.
    """

    name: str
    ask: Ask
    allowed: tuple[type[BatonError], ...] = ()
    must_fail: bool = False
    deadline_s: float = DEADLINE_S
    events: list[tuple[float, int, tuple[int, ...]]] = field(default_factory=list)
    error: BaseException | None = None
    reason: str = ""
    stats: object = None
    workers: tuple[str, ...] = ()
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def token_ids(self):
        return [token for _, _, token_ids in self.events for token in token_ids]

    @property
    def is_over(self):
        return self.ended_s > 0


class Clients:
    """Clients of one router over one connection, as the public API has them.

    Args:
        address: of the router.
        tenant: of all requests, so that one fault's are not served from the caches of another's.
        channel: instead of a plain one.
        metadata: with every call.
    """

    def __init__(self, address, tenant, channel=None, metadata=()):
        self._channel = channel or grpc.aio.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._tenant = tenant
        self._metadata = metadata

    async def ask(self, delivery, pause=None):
        """One request to its end. `pause`: a coroutine function, awaited after each chunk."""
        message = generate_request(None, delivery.ask.prompt_token_ids, delivery.ask.sampling, "", self._tenant)
        message.request_id = delivery.name
        delivery.started_s = time.monotonic()
        call = self._stub.Generate(message, timeout=delivery.deadline_s, metadata=self._metadata)
        try:
            async for chunk in call:
                delivery.events.append((time.monotonic(), chunk.index, tuple(chunk.token_ids)))
                if chunk.HasField("finish"):
                    delivery.reason, delivery.stats = chunk.finish.reason, chunk.finish.stats
                    delivery.workers = (delivery.stats.prefill_worker, delivery.stats.decode_worker)
                if pause is not None:
                    await pause()
        except grpc.RpcError as error:
            delivery.error = wire.error_from_rpc(error)
        except asyncio.CancelledError:
            delivery.error = asyncio.CancelledError()
            raise
        finally:
            call.cancel()
            delivery.ended_s = time.monotonic()

    async def close(self):
        await self._channel.close(None)


class Replay:
    """The run without a fault: one process, one request at a time as far as tokens go, no drafts, in float64."""

    def __init__(self, model, tokenizer):
        self._model, self._tokenizer = model, tokenizer
        self._known = {}

    def learn(self, asks):
        """Run those that are new, together."""
        new = [ask for ask in dict.fromkeys(asks) if ask not in self._known]
        if not new:
            return
        block_len = 16
        num_blocks = sum((len(ask.prompt_token_ids) + ask.sampling.max_tokens) // block_len + 2 for ask in new)
        engine = LocalEngine(
            self._model,
            self._tokenizer,
            num_blocks=num_blocks,
            block_size=block_len,
            num_draft_tokens=0,
            chunk_len=64,
            max_num_sequences=len(new),
        )
        requests = [
            GenerationRequest(
                key=AttemptKey(f"replay-{number}", 1),
                prompt_token_ids=ask.prompt_token_ids,
                sampling=ask.sampling,
                deadline_s=1e12,
                num_draft_tokens=0,
            )
            for number, ask in enumerate(new)
        ]
        for ask, result in zip(new, engine.generate(requests), strict=True):
            self._known[ask] = list(result.token_ids)

    def tokens(self, ask):
        self.learn([ask])
        return self._known[ask]


class Checker:
    """I1, I2, I4 and I6, of what was delivered."""

    def __init__(self, replay):
        self._replay = replay
        self.num_replayed = 0

    def check(self, deliveries):
        """Every one.

        Raises:
            AssertionError: an invariant does not hold; it says which, and of whom.
        """
        self._replay.learn([one.ask for one in deliveries if one.events])
        for one in deliveries:
            self._check_order(one)
            self._check_tokens(one)
            self._check_end(one)
            self.num_replayed += 1

    @staticmethod
    def _check_order(one):
        num_tokens = 0
        for _, index, token_ids in one.events:
            assert index == num_tokens or not token_ids, f"I2 {one.name}: token {index} after {num_tokens}"
            num_tokens += len(token_ids)

    def _check_tokens(self, one):
        if not one.events:  # perhaps it cannot be replayed: what is refused may be no request at all
            return
        want = self._replay.tokens(one.ask)
        got = one.token_ids
        assert got == want[: len(got)], f"I1 {one.name}: delivered {got}, and without the fault {want}"
        if one.reason:
            assert got == want, f"I1 {one.name}: ended well after {len(got)} of {len(want)} tokens"
            assert one.stats.output_len == len(got), f"I1 {one.name}: its report counts {one.stats.output_len}"

    @staticmethod
    def _check_end(one):
        assert one.is_over, f"I4 {one.name}: has not ended"
        took_s = one.ended_s - one.started_s
        assert took_s <= one.deadline_s + LATE_S, f"I4 {one.name}: ended after {took_s:.1f} s"
        assert bool(one.reason) != (one.error is not None), f"I6 {one.name}: {one.reason!r} and {one.error!r}"
        if one.error is None:
            assert not one.must_fail, f"I6 {one.name}: was to be refused"
            return
        assert isinstance(one.error, BatonError | asyncio.CancelledError), f"I6 {one.name}: {one.error!r}"
        assert type(one.error) is not BatonError, f"I6 {one.name}: not typed: {one.error!r}"
        assert not isinstance(one.error, UNTYPED), f"I6 {one.name}: {one.error!r}"
        assert isinstance(one.error, one.allowed), f"I6 {one.name}: {one.error!r} is not right here"
