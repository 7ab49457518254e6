"""The identities and records of a request that every package shares.

A *request* is what a client sends; an *attempt* is one try at it (the router counts up); the pair names everything
either worker holds for it.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum

from baton.core.requests.sampling import SamplingParams
from baton.core.telemetry.span import TraceContext


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One chosen (or prompt) token, judged by the model's raw logits: before penalties, masks and temperature.

    Attributes:
        token_id: the token.
        logprob: its log-probability; always finite.
        rank: 1 + the number of tokens that are likelier.
        top: (token id, log-probability) of the likeliest tokens, the likeliest first, equals by id; the token itself
            is among them only if it is one of them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    """One try at one request; the identity every message, incoming transfer and sequence carries."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class FinishReason(Enum):
    """Why generation ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A tokenized, validated request on its way to the workers.

    Attributes:
        key: identity of this attempt.
        prompt_token_ids: at least one token.
        sampling: validated parameters.
        deadline_s: reading of the holder's own monotonic clock after which the request ends.
        num_draft_tokens: k for this request; at most the deployment's.
        tenant: whose request it is; KV is shared only within a tenant.
        choice: which of the request's `n` answers this is; every draw depends on it.
        num_forced: the last so many of `prompt_token_ids` are the answer's first, made by earlier attempts: they are
            prefilled, and the answer goes on behind them. `sampling` counts them as generated.
        priority: where the router makes it wait: 0 low, 1 normal, 2 high.
        trace: the span that this is done for; None if none is recorded.
        split_only: whether a prefill worker computes its prompt wherever there is one.
        keeps_drafts: its client gave the seed: where drafts decide which tokens are drawn, all its steps draft alike.
    """

    key: AttemptKey
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float
    num_draft_tokens: int = 0
    tenant: str = ""
    choice: int = 0
    num_forced: int = 0
    priority: int = 1
    trace: TraceContext | None = None
    split_only: bool = False
    keeps_drafts: bool = False

    @property
    def prompt_len(self) -> int:
        """Tokens to prefill: the prompt, and what is forced."""
        return len(self.prompt_token_ids)

    @property
    def forced_token_ids(self) -> tuple[int, ...]:
        """What earlier attempts have made of the answer."""
        return self.prompt_token_ids[self.prompt_len - self.num_forced :]

    @property
    def capacity_len(self) -> int:
        """Positions its KV may ever occupy: prompt, output, and drafts past the last token."""
        return self.prompt_len - self.num_forced + self.sampling.max_tokens + self.num_draft_tokens


def choices_of(request: GenerationRequest) -> tuple[GenerationRequest, ...]:
    """The request once for each of its `n` answers, by choice; only the first reports prompt logprobs."""
    if request.sampling.n == 1:
        return (request,)
    quiet = dataclasses.replace(request.sampling, prompt_logprobs=None)
    return tuple(
        dataclasses.replace(request, sampling=quiet if choice else request.sampling, choice=choice)
        for choice in range(request.sampling.n)
    )


@dataclass(slots=True)
class SpeculationCounts:
    """Draft accounting of one request; always proposed = accepted + rejected.

    `num_steps_by_accepted` counts the steps by the drafts that were accepted in them, 0 first.
    """

    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_steps_by_accepted: list[int] = field(default_factory=list)

    @property
    def num_rejected_tokens(self) -> int:
        """Drafts proposed and not emitted."""
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def num_accepted_at(self) -> list[int]:
        """Steps in which the draft at each place was accepted, the first place first; all drafts accepted together."""
        steps = self.num_steps_by_accepted
        return [sum(steps[place:]) for place in range(1, len(steps))]

    def add_step(self, *, num_proposed: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verify step of one sequence."""
        assert 0 <= num_accepted <= num_proposed
        assert num_accepted <= num_emitted <= num_accepted + 1
        self.num_verify_steps += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        self.num_emitted_tokens += num_emitted
        steps = self.num_steps_by_accepted
        if num_proposed >= len(steps):
            steps.extend([0] * (num_proposed + 1 - len(steps)))
        steps[num_accepted] += 1
