"""The one helper for asynchronous copies, and that nobody goes around it."""

import ast
from pathlib import Path

import pytest
import torch

from baton.kernels.copies import copy_to_host, host_buffer, to_device

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
HELPER = ROOT / "kernels" / "copies.py"
CPU = torch.device("cpu")


def sources():
    """Every Python file but tests, generated code and what lies in hidden folders."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if parts[0] != "tests" and not any(part.startswith((".", "__")) for part in parts[:-1]):
            yield path


def raw_copies(tree):
    """Lines that ask for an asynchronous copy, by keyword or, of `copy_`, by position."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        asked = keywords.get("non_blocking")
        is_asked = asked is not None and not (isinstance(asked, ast.Constant) and asked.value is False)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if is_asked or (name == "copy_" and len(node.args) > 1):
            yield node.lineno


@pytest.mark.long
def test_nobody_copies_asynchronously_but_the_helper():
    found = [f"{path}:{line}" for path in sources() for line in raw_copies(ast.parse(path.read_text()))]
    assert [place for place in found if not place.startswith(str(HELPER))] == []
    assert len(found) == 2


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("x.to(d, non_blocking=True)", 1),
        ("x.to(d, non_blocking=flag)", 1),
        ("x.cuda(non_blocking=True)", 1),
        ("x.copy_(y, True)", 1),
        ("x.copy_(y)", 0),
        ("x.to(d, non_blocking=False)", 0),
    ],
)
def test_the_search_finds_what_it_should(code, count):
    assert len(list(raw_copies(ast.parse(code)))) == count


def test_values_arrive():
    values = torch.arange(5)
    assert torch.equal(to_device(values, CPU), values)
    target = host_buffer(5, torch.int64, CPU)
    copy_to_host(target, values)
    assert torch.equal(target, values)


def test_pageable_targets_and_sources_elsewhere_are_refused():
    with pytest.raises(AssertionError, match="pageable"):
        copy_to_host(torch.empty(3), torch.empty(3, device="meta"))
    with pytest.raises(AssertionError):
        copy_to_host(torch.empty(3, device="meta"), torch.empty(3))
    with pytest.raises(AssertionError):
        to_device(torch.empty(3, device="meta"), CPU)
