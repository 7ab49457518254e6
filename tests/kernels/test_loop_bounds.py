"""No kernel bounds an inner loop by what an outer loop carries: Triton 3.6 and 3.7.1 compile it wrongly, in silence.

A variable that a `for` changes for its next turn, and that only bounds of inner loops read, keeps its first value in
compiled code, not in the interpreter; so no test on a CPU would see it. A producer warp of a draft copied too little by
this, and its consumers waited forever.
"""

import ast
from pathlib import Path

import pytest

import baton.kernels

pytestmark = pytest.mark.fast
FILES = [path for path in sorted(Path(baton.kernels.__file__).parent.rglob("*.py")) if ".jit" in path.read_text()]


def names(node, kind):
    """Names in an expression or target that are read, or written."""
    found = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, kind)]
    if kind is ast.Load and isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.append(node.target.id)
    return found


def assigned(node):
    """What an assignment writes, and what it reads; None for other statements."""
    if not isinstance(node, ast.Assign | ast.AugAssign):
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name for target in targets for name in names(target, ast.Store)}, set(names(node, ast.Load))


def carried(body):
    """Names that a loop's body reads before it writes them."""
    read, written = {}, {}
    for node in body:
        pair = assigned(node)
        if pair is not None:
            for name in pair[0]:
                written.setdefault(name, node.lineno)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read.setdefault(node.id, node.lineno)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.setdefault(node.target.id, node.lineno)
    return {name for name in read.keys() & written.keys() if read[name] <= written[name]}


def bad_bounds(text):
    """(line, names) of inner loops of jitted functions whose bounds follow from what a loop around them carries."""
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or "jit" not in "".join(map(ast.unparse, function.decorator_list)):
            continue
        for outer in (node for node in ast.walk(function) if isinstance(node, ast.For)):
            if "static_range" in ast.unparse(outer.iter):  # unrolled
                continue
            body = sorted(
                (node for part in outer.body for node in ast.walk(part) if hasattr(node, "lineno")),
                key=lambda node: node.lineno,
            )
            reached = carried(body)
            for pair in filter(None, map(assigned, body * 2)):  # twice: what follows from a later line
                if pair[1] & reached:
                    reached |= pair[0]
            for inner in (node for node in body if isinstance(node, ast.For)):
                found = reached & set(names(inner.iter, ast.Load))
                if found and "static_range" not in ast.unparse(inner.iter):
                    yield inner.lineno, sorted(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_loop_is_bounded_by_what_an_outer_loop_carries(path):
    assert not list(bad_bounds(path.read_text()))


BODIES = {
    "as it is": ("for g in range(begin, n):\n  f(g)\nbegin = w", True),
    "its end": ("for g in range(0, begin):\n  f(g)\nbegin = w", True),
    "by another name": ("low = begin + 0 * w\nfor g in range(low, n):\n  f(g)\nbegin = w", True),
    "added to": ("for g in range(begin, n):\n  f(g)\nbegin += n", True),
    "in a branch": ("if w > 1:\n  for g in range(n + begin):\n    f(g)\nbegin = w", True),
    "of this turn": ("begin = w * 2\nfor g in range(begin, n):\n  f(g)", False),
    "of both loops": ("for g in range(w, n):\n  f(begin)\nbegin = w", False),
    "unrolled": ("for g in gl.static_range(begin):\n  f(g)\nbegin = w", False),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("decorator", ["triton.jit", "gluon.jit", "triton.jit(do_not_specialize=['n'])", "cache"])
def test_what_is_found(body, decorator):
    lines, is_bad = BODIES[body]
    inside = "".join(f"    {line}\n" for line in lines.splitlines())
    text = f"@{decorator}\ndef kernel(n, begin):\n  for w in range(n):\n{inside}"
    assert bool(list(bad_bounds(text))) == (is_bad and decorator != "cache")
