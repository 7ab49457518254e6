"""Which rows and tuning points there are: those of every module in `bench/kernel_cases`, in order of names.

A module that cannot be imported is a failure of its own, and no reason to leave out the others.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench import kernel_cases
from baton.bench.kernel_bench.case import ERRORS, KernelCase, TuningPoint, failure_of


@dataclass(frozen=True, slots=True, order=True)
class CasePlace:
    """Where a case or a point is found again, in another process too.

    Attributes:
        module: of `bench.kernel_cases`.
        index: in what its function gives.
    """

    module: str
    index: int


@dataclass(frozen=True, slots=True)
class Found:
    """All that was looked for.

    Attributes:
        cases: or points, by their places.
        failures: of modules.
    """

    cases: dict[CasePlace, Any]
    failures: list[dict[str, Any]]


def module_names() -> list[str]:
    """Of all modules."""
    return sorted(module.name for module in pkgutil.iter_modules(kernel_cases.__path__))


def of_module(name: str, function: str) -> Sequence[Any]:
    """What `cases` or `tuning` of one module gives; nothing if it has no such function."""
    module = importlib.import_module(f"{kernel_cases.__name__}.{name}")
    return getattr(module, function, list)()


def find_cases(only: Sequence[str] = (), *, is_cpu: bool = False) -> Found:
    """The cases to run.

    Args:
        only: those with one of these words in "module kernel shape"; all if there is none.
        is_cpu: leave out what needs a GPU.
    """
    found = _find("cases", only)
    cases = {place: case for place, case in found.cases.items() if not (is_cpu and case.only_gpu)}
    return Found(cases, found.failures)


def find_points(only: Sequence[str] = ()) -> Found:
    """The points to tune; `only` as of `find_cases`, with sizes after the shape."""
    return _find("tuning", only)


def case_at(place: CasePlace) -> KernelCase:
    """One case."""
    case: KernelCase = of_module(place.module, "cases")[place.index]
    return case


def point_at(place: CasePlace) -> TuningPoint:
    """One point."""
    point: TuningPoint = of_module(place.module, "tuning")[place.index]
    return point


def _find(function: str, only: Sequence[str]) -> Found:
    cases: dict[CasePlace, Any] = {}
    failures: list[dict[str, Any]] = []
    for name in module_names():
        try:
            listed = list(of_module(name, function))
        except ERRORS as error:
            failures.append({"kernel": name, "shape": "", "system": function, **failure_of(error)})
            continue
        for index, case in enumerate(listed):
            if _is_asked(only, (name, case.kernel, case.shape, str(getattr(case, "size", "")))):
                cases[CasePlace(name, index)] = case
    return Found(cases, failures)


def _is_asked(only: Sequence[str], words: Iterable[str]) -> bool:
    text = " ".join(words)
    return not only or any(part in text for part in only)
