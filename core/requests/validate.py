"""Checks whether a deployment can serve a request at all; all front ends and workers share this check.

It compares lengths and token ids with limits, and leaves other values to `core.requests.sampling`. It knows nothing
about load: a request that fits an idle deployment passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        _require_len(prompt_len, limits.max_prompt_len, "the prompt", "exceeds this deployment's max_prompt_tokens,")
    _require_len(prompt_len, limits.max_model_len - 1, "the prompt", "leaves no room for an answer within the model's")
    _require_len(prompt_len, limits.prefill_capacity_len, "the prompt", "exceeds a prefill worker's whole pool of")
    if sampling_is_checked:
        sampling.validate_lengths()
    else:
        sampling.validate(limits.vocab_size)
    total_len = prompt_len - num_forced + sampling.max_tokens
    _require_len(total_len, limits.max_model_len, "prompt and max_tokens", "exceed the model's")
    decode_len = total_len + limits.num_draft_tokens
    what = "prompt, max_tokens and drafts"
    _require_len(decode_len, limits.decode_capacity_len, what, "exceed a decode worker's whole pool of")
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


def _require_len(length: int, limit: int, what: str, why: str) -> None:
    if length > limit:
        raise PromptTooLong(f"{what} of {length} positions {why} {limit}", length=length, limit=limit)
