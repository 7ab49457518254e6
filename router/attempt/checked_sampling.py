"""The sampling values of a call: checked once, whatever number of prompts they are of, and completed for each."""

import secrets
from dataclasses import dataclass, replace
from typing import Final

from baton.core.requests.sampling import MAX_CHOICES, SamplingParams
from baton.proto import inference_pb2, wire
from baton.router.access.message_limits import check_message

ANY_ROOM: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """Values that are in range; a seed, and a length that was left open, are each prompt's own."""

    params: SamplingParams
    has_seed: bool
    has_max_tokens: bool

    def complete(self, room_len: int) -> SamplingParams:
        """For a prompt that leaves so much room: everything large is shared, nothing is copied."""
        seed = self.params.seed if self.has_seed else _draw_seed()
        max_tokens = self.params.max_tokens if self.has_max_tokens else max(1, min(self.params.max_tokens, room_len))
        return replace(self.params, seed=seed, max_tokens=max_tokens)


def check_sampling(asked: inference_pb2.Sampling, vocab_size: int, default_max_tokens: int) -> CheckedSampling:
    """Check values without the workers: a bad one is named even when nobody is there to serve a good one.

    Raises:
        InvalidRequest: too many of something, or a value out of range.
    """
    check_message(asked, "sampling.")
    params = wire.sampling_from_client(
        asked, room_len=ANY_ROOM, draw_seed=_draw_seed, default_max_tokens=default_max_tokens
    )
    params.validate(vocab_size)
    return CheckedSampling(params, asked.HasField("seed"), asked.HasField("max_tokens"))


def num_choices(sampling: inference_pb2.Sampling) -> int:
    """Answers to each prompt, within what a request may ask for."""
    return min(max(sampling.n, 1), MAX_CHOICES)


def _draw_seed() -> int:
    return secrets.randbits(63)
