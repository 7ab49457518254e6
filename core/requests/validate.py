"""Checks whether a deployment can serve a request at all; all front ends and workers share this check.

It compares lengths and token ids with limits, and leaves other values to `core.requests.sampling`. It knows nothing
about load: a request that fits an idle deployment passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong
from baton.core.requests.request import GenerationRequest
from baton.core.requests.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What an idle deployment can hold.

    Attributes:
        max_model_len: positions of prompt and output together.
        vocab_size: exclusive upper bound of token ids.
        num_draft_tokens: drafts that a sequence may write past its last token.
        prefill_capacity_len: positions in the pool of a prefill worker, which holds the prompt.
        decode_capacity_len: positions in the pool of a decode worker, which holds prompt, output and drafts.
        max_prompt_len: the operator's limit of prompt positions; None: all that fit.
    """

    max_model_len: int
    vocab_size: int
    num_draft_tokens: int
    prefill_capacity_len: int
    decode_capacity_len: int
    max_prompt_len: int | None = None


def validate_request(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    limits: RequestLimits,
    *,
    num_forced: int = 0,
    sampling_is_checked: bool = False,
    tokens_are_known: bool = False,
) -> None:
    """Check a tokenized request whose last `num_forced` tokens already belong to the answer.

    With `sampling_is_checked`, its values were checked with another `max_tokens`; with `tokens_are_known`, the model's
    own tokenizer made its tokens.

    Raises:
        EmptyPrompt: there is no token.
        PromptTooLong: the prompt, or prompt and `max_tokens`, exceed the model's length or a worker's whole pool.
        InvalidSampling: a sampling value is out of range, or not supported.
        InvalidRequest: a token id is not one of the model's.
    """
    prompt_len = len(prompt_token_ids)
    if prompt_len == 0:
        raise EmptyPrompt("the prompt holds no token", field="prompt")
    if limits.max_prompt_len is not None:
        _require_prompt(prompt_len, limits.max_prompt_len, f"max_prompt_tokens here is {limits.max_prompt_len}")
    require_room(prompt_len, limits.max_model_len)
    pool_len = limits.prefill_capacity_len
    _require_prompt(prompt_len, pool_len, f"a prefill worker's whole pool holds {pool_len}")
    if sampling_is_checked:
        sampling.validate_lengths()
    else:
        sampling.validate(limits.vocab_size)
    lens = prompt_len - num_forced, sampling.max_tokens
    _require_total(*lens, limits.max_model_len, _CONTEXT.format(limits.max_model_len))
    pool_len = limits.decode_capacity_len - limits.num_draft_tokens
    _require_total(*lens, pool_len, f"a decode worker's whole pool holds {pool_len} besides drafts")
    if tokens_are_known or (max(prompt_token_ids) < limits.vocab_size and min(prompt_token_ids) >= 0):
        return
    for position, token_id in enumerate(prompt_token_ids):
        if not 0 <= token_id < limits.vocab_size:
            message = f"token {token_id} at position {position} is not one of the model's {limits.vocab_size}"
            raise InvalidRequest(message, field="prompt", at=position, value=token_id)


def validate_attempt(request: GenerationRequest, limits: RequestLimits) -> None:
    """Check what a router sent to a worker; workers do not trust their peers to have checked it.

    Raises:
        InvalidRequest: as for `validate_request`, or there are more drafts than the deployment makes, the choice is
            beyond `n`, or forced tokens leave no prompt before them or nothing to generate after them.
    """
    num_forced = request.num_forced
    if num_forced and not 0 < num_forced < min(request.prompt_len, request.sampling.max_tokens):
        message = f"{num_forced} forced tokens of {request.prompt_len}, with max_tokens {request.sampling.max_tokens}"
        raise InvalidRequest(message, field="num_forced_tokens", value=num_forced)
    validate_request(request.prompt_token_ids, request.sampling, limits, num_forced=num_forced)
    if not 0 <= request.num_draft_tokens <= limits.num_draft_tokens:
        message = f"{request.num_draft_tokens} draft tokens; this deployment makes at most {limits.num_draft_tokens}"
        raise InvalidRequest(message, field="num_draft_tokens", value=request.num_draft_tokens)
    if not 0 <= request.choice < request.sampling.n:
        raise InvalidRequest(f"choice {request.choice} of {request.sampling.n}", field="choice", value=request.choice)


def require_room(prompt_len: int, max_model_len: int) -> None:
    """Check that the model's length leaves room for an answer behind a prompt.

    Raises:
        PromptTooLong: it does not.
    """
    _require_prompt(prompt_len, max_model_len - 1, f"{_CONTEXT.format(max_model_len)}, with the answer")


def readable_end(token_ids: Sequence[int], num_kept: int | None, max_model_len: int) -> Sequence[int]:
    """Return as much of a prompt's end as the model can read, so that no more is copied or checked.

    Args:
        token_ids: the whole prompt.
        num_kept: `truncate_prompt_tokens`; None keeps the whole prompt, and what is not positive is judged later.
        max_model_len: positions of prompt and output together.

    Raises:
        PromptTooLong: what is kept of the prompt leaves no room for an answer.
    """
    if num_kept is None or num_kept > 0:
        require_room(len(token_ids) if num_kept is None else min(len(token_ids), num_kept), max_model_len)
    return token_ids[-max_model_len:]


# litellm and agents learn from these words that a shorter prompt would be served: "prompt is too long", "this model's
# maximum context length is 3 tokens", and "exceed context limit: 1 + 2 > 3", of which they compute `max_tokens`.
_CONTEXT: Final = "this model's maximum context length is {} tokens"


def _require_prompt(length: int, limit: int, why: str) -> None:
    if length > limit:
        raise PromptTooLong(f"the prompt is too long: it has {length} tokens; {why}", length=length, limit=limit)


def _require_total(prompt_len: int, max_tokens: int, limit: int, why: str) -> None:
    if prompt_len + max_tokens > limit:
        what = f"input length and `max_tokens` exceed context limit: {prompt_len} + {max_tokens} > {limit}"
        raise PromptTooLong(f"{what}; {why}", length=prompt_len + max_tokens, limit=limit)
