"""The methods that make a step's drafts."""

from enum import StrEnum


class DraftMethod(StrEnum):
    """A way to make drafts; a step without drafts has none."""

    HEAD = "head"  # the checkpoint's MTP head, or an EAGLE-3 drafter
    NGRAM = "ngram"  # looked up in the text so far
