"""What a prefill worker's commit must say before its sequence is decoded.

The KV is fenced and digested, but the few values beside it come from another process over a network: a peer of
another build must cost its own request, never this worker. Everything here is checked before a slot is taken.
"""

from baton.core.errors import TransferFailed
from baton.core.requests.request import GenerationRequest
from baton.engine.step.plan import Resume
from baton.kvtransfer.receiver.service import Completed, ReserveWanted


def check_reserve(reserve: ReserveWanted, request: GenerationRequest) -> None:
    """Both workers heard of the request from the router; they must have heard the same.

    Raises:
        TransferFailed: the lengths differ. An incoming transfer smaller than the sequence would silently lose its end.
    """
    wanted = (reserve.prompt_len, reserve.capacity_len)
    own = (request.prompt_len, request.capacity_len)
    if wanted != own:
        raise TransferFailed(f"the prefill worker reserves (prompt, capacity) {wanted}; the router said {own}")


def resume_of(
    complete: Completed, request: GenerationRequest, *, vocab_size: int, hidden_bytes: int
) -> tuple[int, Resume]:
    """The first token, and where decoding begins, as a commit describes it.

    Args:
        complete: the transfer.
        request: as the router sent it.
        vocab_size: tokens of the model.
        hidden_bytes: of a hidden state.

    Raises:
        TransferFailed: a value is missing, out of range or of the wrong size.
    """
    state = complete.state
    _require(complete.prompt_len == request.prompt_len, f"a prompt of {complete.prompt_len} tokens")
    _require(state.first_token < vocab_size, f"first token {state.first_token}")
    if not state.draft_tokens:
        _require(request.num_draft_tokens == 0, "no draft, and the request has drafts")
        return state.first_token, Resume()
    _require(len(state.draft_tokens) == 1, f"{len(state.draft_tokens)} drafts")
    _require(state.draft_tokens[0] < vocab_size, f"draft token {state.draft_tokens[0]}")
    _require(len(state.hidden) == hidden_bytes, f"a hidden state of {len(state.hidden)} bytes for {hidden_bytes}")
    return state.first_token, Resume(state.draft_tokens[0], state.hidden)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise TransferFailed(f"the commit of the prefill worker cannot be: {what}")
