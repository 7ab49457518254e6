"""How drafts are looked up in the text so far, where no head makes them (`kernels.sampling.ngram`)."""

from dataclasses import dataclass
from typing import Final

from baton.core.errors import ConfigInvalid

MAX_MATCH_LEN: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookup:
    """Drafts are what followed the newest tokens where they stood before.

    Attributes:
        min_match_len: newest tokens that must have stood there.
        max_match_len: newest tokens that are compared; the place that agrees with most of them wins.

    Raises:
        ConfigInvalid: they are not in 1 ... 16, or the first is the larger one.
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
