"""Settings of prompt lookup, which finds drafts in the text so far (`kernels.sampling.ngram`)."""

from dataclasses import dataclass
from typing import Final

from baton.core.errors import ConfigInvalid

MAX_MATCH_LEN: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookup:
    """Drafts are the tokens that followed an earlier occurrence of the newest tokens.

    Attributes:
        min_match_len: number of newest tokens that must match.
        max_match_len: number of newest tokens that are compared; the longest match wins.

    Raises:
        ConfigInvalid: a length is not in 1 ... 16, or the first exceeds the second.
    """

    min_match_len: int = 2
    max_match_len: int = 4

    def __post_init__(self) -> None:
        for key, value in (("prompt_lookup_min", self.min_match_len), ("prompt_lookup_max", self.max_match_len)):
            if not 1 <= value <= MAX_MATCH_LEN:
                raise ConfigInvalid(f"{key}: {value} is not in 1 ... {MAX_MATCH_LEN}", keys=[key])
        if self.min_match_len > self.max_match_len:
            message = f"prompt_lookup_min: {self.min_match_len} is more than prompt_lookup_max, {self.max_match_len}"
            raise ConfigInvalid(message, keys=["prompt_lookup_min", "prompt_lookup_max"])
