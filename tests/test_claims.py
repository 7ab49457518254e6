"""Every claim of docs/claims.md names tests that exist, and says which of them the default suite leaves out."""

import ast
import functools
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "claims.md"
NAMED = re.compile(r"`([\w./]*)::(test_\w+)`( \((?:slow|GPU)\))?")


def rows():
    """(section, first cell, second cell) of every row."""
    found, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and section:
            found.append((section, *(cell.strip() for cell in line.strip("| ").split(" | "))))
    heads = {section: row for section, *row in reversed(found)}
    return [row for row in found if [*row[1:]] != heads[row[0]]]


def named_in(cell):
    """(file, test, whether it is left out of the default suite) of each that is named."""
    path, found = "", []
    for named, test, where in NAMED.findall(cell):
        path = named or path
        found.append((path, test, where.strip(" ()")))
    return found


@functools.cache
def marks_of(path):
    """Of each test of a file, whether it is slow as a whole."""
    tree = ast.parse((ROOT / path).read_text())
    of_all = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign) and _is_marks(node)]
    return {
        node.name: any("mark.slow" in text for text in [*of_all, *map(_plain, node.decorator_list)])
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _is_marks(node):
    return ast.unparse(node.targets[0]) == "pytestmark"


def _plain(decorator):
    """A mark of the whole test: what stands in `parametrize` is one of some cases."""
    return "" if "parametrize" in ast.unparse(decorator) else ast.unparse(decorator)


CLAIMS = [row for row in rows() if row[0] != "Not claimed"]


@pytest.mark.parametrize(("claim", "cell"), [row[1:] for row in CLAIMS], ids=[row[1][:50] for row in CLAIMS])
def test_a_claim_has_tests_that_are_run_where_the_page_says(claim, cell):
    assert claim.endswith(".")
    found = named_in(cell)
    assert found
    assert NAMED.sub("", cell).strip(" ,") == "", "something that is no test"
    for path, test, where in found:
        assert test in marks_of(path), f"{path} has no {test}"
        wanted = "GPU" if path.startswith("tests/gpu/") else "slow" if marks_of(path)[test] else ""
        assert where == wanted, (path, test)


def test_the_page_has_claims_and_says_what_it_does_not_claim():
    assert len(CLAIMS) > 30
    reasons = [row for row in rows() if row[0] == "Not claimed"]
    assert reasons
    for _, what, why in reasons:
        assert not what.endswith(".")
        assert why.endswith(".")
        assert not named_in(why)
