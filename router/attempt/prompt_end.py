"""The end of a prompt, where a client would rather have it cut than refused."""

from collections.abc import Sequence

from baton.core.errors import InvalidRequest


def end_of(token_ids: Sequence[int], num_tokens: int, room_len: int) -> Sequence[int]:
    """The last tokens of a prompt: so many, or with -1 as many as leave room for the answer.

    Raises:
        InvalidRequest: it is neither.
    """
    if num_tokens == 0 or num_tokens < -1:
        message = f"truncate_prompt_tokens = {num_tokens}: a number of tokens, or -1 for as many as fit"
        raise InvalidRequest(message, field="truncate_prompt_tokens")
    return token_ids[-max(1, room_len if num_tokens == -1 else num_tokens) :]
