"""Each token of an answer exactly once, in order, whichever worker's event comes first. Pure."""

from collections.abc import Sequence

from baton.core.errors import ProtocolError


class TokenOrder:
    """The tokens emitted so far.

    A worker that leaves a gap, contradicts itself or exceeds `max_tokens` is broken, and nothing it says can be
    streamed.
    """

    __slots__ = ("_max_tokens", "token_ids")

    def __init__(self, max_tokens: int, token_ids: Sequence[int] = ()) -> None:
        self._max_tokens = max_tokens
        self.token_ids: list[int] = list(token_ids)  # those of earlier attempts to begin with

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Accept tokens whose first has this index in the answer; returns those that are new.

        Raises:
            ProtocolError: a gap, a repeated token that differs, or too many tokens.
        """
        have = len(self.token_ids)
        if index == have and have + len(token_ids) <= self._max_tokens:  # as a rule
            self.token_ids.extend(token_ids)
            return list(token_ids)
        if index > have:
            raise ProtocolError(f"a worker skipped from token {have} to {index}", expected=have, index=index)
        num_old = min(have - index, len(token_ids))
        if list(token_ids[:num_old]) != self.token_ids[index : index + num_old]:
            raise ProtocolError(f"a worker repeated token {index} with another value", index=index)
        new = list(token_ids[num_old:])
        if have + len(new) > self._max_tokens:
            raise ProtocolError(f"a worker sent more than {self._max_tokens} tokens", limit=self._max_tokens)
        self.token_ids.extend(new)
        return new
