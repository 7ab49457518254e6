"""Collects rows and tuning points from every module in `bench/kernel_cases`, in order of names.

A module that cannot be imported is a failure of its own, and does not affect the others.
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
    """Where to find a case or a point, also from another process.

    Attributes:
        module: module of `bench.kernel_cases`.
        index: index in the list that its function returns.
    """

    module: str
    index: int


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that was found.

    Attributes:
        cases: cases or points, by place.
        failures: failures of modules.
    """

    cases: dict[CasePlace, Any]
    failures: list[dict[str, Any]]


def module_names() -> list[str]:
    """Names of all modules."""
    return sorted(module.name for module in pkgutil.iter_modules(kernel_cases.__path__))


def of_module(name: str, function: str) -> Sequence[Any]:
    """Return a module's `cases` or `tuning`; nothing if it has no such function."""
    module = importlib.import_module(f"{kernel_cases.__name__}.{name}")
    return getattr(module, function, list)()


def find_cases(only: Sequence[str] = (), *, is_cpu: bool = False) -> Found:
    """Find the cases to run.

    Args:
        only: words, one of which must be in "module kernel shape"; all cases if empty.
        is_cpu: whether to leave out what needs a GPU.
    """
    found = _find("cases", only)
    cases = {place: case for place, case in found.cases.items() if not (is_cpu and case.only_gpu)}
    return Found(cases, found.failures)


def find_points(only: Sequence[str] = ()) -> Found:
    """Find the points to tune; `only` as in `find_cases`, with sizes after the shape."""
    return _find("tuning", only)


def case_at(place: CasePlace) -> KernelCase:
    """Return one case."""
    case: KernelCase = of_module(place.module, "cases")[place.index]
    return case


def point_at(place: CasePlace) -> TuningPoint:
    """Return one point."""
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
