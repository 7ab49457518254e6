"""Decides whether a decode worker may compute a prompt itself, and counts the choices. Pure.

`local_cost` estimates the cost, and the policy decides what is cheaper. This module knows the operator's mode and which
decode workers are able. If no prefill worker takes requests, prompts go to decode workers, unless the mode is `never`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.requests.request import GenerationRequest
from baton.router.placement.members import Incarnation, Member

AUTO: Final = "auto"
NEVER: Final = "never"
ALWAYS: Final = "always"
MODES: Final = (AUTO, NEVER, ALWAYS)
LOCAL: Final = "local"
SPLIT: Final = "split"
ONLY_WAY: Final = "no_prefill_worker"
NO_OTHER: Final = "no_other_prefill_worker"  # for this request; others may have one

log = logging.getLogger(__name__)


class LocalPrefill:
    """The local prefill mode and choices of one router.

    Args:
        mode: one of MODES.
        has_prefill: whether any prefill worker takes requests.
    """

    def __init__(self, mode: str = NEVER, has_prefill: Callable[[], bool] = lambda: False) -> None:
        assert mode in MODES
        self.mode = mode
        self.has_prefill = has_prefill
        self.choices: Counter[tuple[str, str]] = Counter()  # number of attempts, by path and reason
        self.is_only_way = False
        self._had_prefill = False  # whether there was ever a prefill worker

    def able(
        self, decode: Sequence[Member], excluded: Set[tuple[Incarnation, Incarnation]] = frozenset()
    ) -> list[Member]:
        """Decode workers that can compute a prompt."""
        if self.mode == NEVER:
            return []
        return [
            member
            for member in decode
            if member.state.can_prefill and (member.incarnation, member.incarnation) not in excluded
        ]

    def suffices(self, decode: Sequence[Member]) -> bool:
        """Whether requests can be served without any prefill worker."""
        return bool(self.able(decode))

    def required(
        self,
        prefill: Sequence[Member],
        decode: Sequence[Member],
        excluded: Set[tuple[Incarnation, Incarnation]],
        request: GenerationRequest | None = None,
    ) -> list[Member]:
        """Decode workers one of which must compute the prompt; empty if a prefill worker may."""
        self._had_prefill = self._had_prefill or bool(prefill)
        if prefill and (self.mode != ALWAYS or _is_split_only(request)):
            return []
        return self.able(decode, excluded)

    def optional(
        self,
        decode: Sequence[Member],
        excluded: Set[tuple[Incarnation, Incarnation]],
        request: GenerationRequest | None,
    ) -> list[Member]:
        """Decode workers that may compute the prompt although a prefill worker may too."""
        return [] if _is_split_only(request) else self.able(decode, excluded)

    def split_reason(self, able: Sequence[Member], known: bool, request: GenerationRequest | None) -> str:
        """Why a prefill worker was chosen; `known` is whether the cost at any of the able decode workers is known."""
        if self.mode == NEVER:
            return NEVER
        if _is_split_only(request):
            return "asked"
        if not able:
            return "not_able"
        return "cheaper" if known else "not_known"

    def chosen(self, path: str, reason: str) -> None:
        """Count an attempt's path, and log when decode workers start to compute prompts for lack of prefill workers."""
        self.choices[path, reason] += 1
        if reason == ONLY_WAY and not self.is_only_way and self._had_prefill:  # otherwise it is intended: --prefill 0
            log.warning("no prefill worker takes requests: decode workers compute prompts until one does")
        self.is_only_way = reason == ONLY_WAY

    def required_reason(self, prefill: Sequence[Member]) -> str:
        """Why `required` returned any workers; `prefill` are those that the request may use."""
        if prefill:
            return ALWAYS
        return NO_OTHER if self.has_prefill() else ONLY_WAY


def _is_split_only(request: GenerationRequest | None) -> bool:
    return request is not None and request.split_only


class LocalPrefillCollector(Collector):
    """Exports one router's choices."""

    def __init__(self, local: LocalPrefill) -> None:
        self._local = local

    def collect(self) -> Iterator[Metric]:
        """Yield the current counts."""
        chosen = CounterMetricFamily(
            "baton_prefill_choices",
            "Attempts whose prompt went to a prefill worker (split) or to the decode worker (local), by the reason",
            labels=("path", "reason"),
        )
        for (path, reason), count in tuple(self._local.choices.items()):
            chosen.add_metric((path, reason), count)
        yield chosen
