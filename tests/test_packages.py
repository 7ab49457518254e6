"""The import order of the packages, the libraries each may use, their names, and their sizes."""

import ast
import functools
import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
WORKER = {"core", "proto", "kernels", "kvcache", "model", "engine", "kvtransfer"}
ROLE = {"core", "proto", "kvcache", "engine", "kvtransfer", "worker"}
ALLOWED = {
    "core": set(),
    "proto": {"core"},
    "assets": set(),
    "kernels": {"core"},
    "kvcache": {"core", "kernels"},
    "model": {"core", "kernels", "kvcache"},
    "engine": {"core", "kernels", "kvcache", "model"},
    "kvtransfer": {"core", "proto", "kernels", "kvcache"},
    "worker": WORKER,
    "prefill_worker": ROLE,
    "decode_worker": ROLE,
    "router": {"core", "proto"},
    "client": {"core", "proto"},
    "bench": WORKER | ROLE | {"assets", "router", "client", "prefill_worker", "decode_worker"},
    "cluster": WORKER | ROLE | {"assets", "router", "client", "prefill_worker", "decode_worker", "bench"},
    "runbook": {"core", "proto", "client", "cluster"},
}
TENSORS = {"kernels", "kvcache", "model", "engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "bench"}


def sources(package):
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def statements(body):
    """All of them, also those within others; expressions are most of a tree, and import nothing."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, block, ()))


@functools.cache
def imported_names(path):
    """Dotted names of everything a file imports, wherever in it."""
    found = set()
    for node in statements(tree_of(path).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_are_found_wherever_they_are(tmp_path):
    path = tmp_path / "nested.py"
    path.write_text("""
import one
def f():
    try:
        import two
    except ImportError:
        from three import x
    else:
        with y: import four
    finally:
        for z in (): import five
class C:
    if x: import six
    elif y: import seven
    match z:
        case 1: import eight
    while z: import nine
    async def g(self): import ten
""")
    counted = "one two three.x four five six seven eight nine ten"
    assert imported_names(path) == set(counted.split())


def packages_imported_by(path):
    return {name.split(".")[1] for name in imported_names(path) if name.startswith("baton.")}


def libraries_imported_by(path):
    return {name.split(".")[0] for name in imported_names(path)}


@pytest.mark.long
@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_lower_packages(package):
    for path in sources(package):
        assert packages_imported_by(path) <= ALLOWED[package] | {package}, path


def test_the_order_has_no_circle():
    done = set()
    while rest := ALLOWED.keys() - done:
        ready = {package for package in rest if ALLOWED[package] <= done}
        assert ready, f"circle among {sorted(rest)}"
        done |= ready


def test_every_room_is_declared_and_shipped():
    import tomllib

    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(ALLOWED)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    parts = {
        path.parent.relative_to(ROOT).parts for package in ALLOWED for path in (ROOT / package).rglob("__init__.py")
    }
    assert set(packages) == {"baton"} | {".".join(("baton", *names)) for names in parts}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_uses_only_its_libraries(package):
    for path in sources(package):
        libraries = libraries_imported_by(path)
        if package != "cluster" and path.name != "actor.py":
            assert "ray" not in libraries, f"{path}: ray belongs to cluster and the actor shells"
        assert "transformers" not in libraries, f"{path}: transformers costs half a gigabyte a process"
        if package not in TENSORS | {"cluster"}:
            assert not {"torch", "triton"} & libraries, f"{path}: no tensors here"


def test_cluster_imports_ray_and_torch_only_when_they_are_used():
    for path in sources("cluster"):
        for node in tree_of(path).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {"ray", "torch"} & {name.split(".")[0] for name in names}, path


@pytest.mark.parametrize("package", ALLOWED)
def test_every_file_says_what_it_is(package):
    for path in sources(package):
        assert ast.get_docstring(tree_of(path)), f"{path} has no docstring"


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_answers_to_its_full_name_only(package):
    import baton  # noqa: F401  (drops the checkout from sys.path)

    spec = importlib.util.find_spec(package)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    assert not any(ROOT / package in (Path(place), *Path(place).parents) for place in places if place)


def test_tests_for_gpus_are_marked_so_that_none_is_left_out():
    for path in (ROOT / "tests" / "gpu").rglob("test_*.py"):
        marks = [
            ast.unparse(node.value)
            for node in tree_of(path).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        assert any("pytest.mark.gpu" in mark for mark in marks), f"{path} sets no pytestmark with gpu"


def test_tests_marked_gpu_are_where_test_gpu_looks():
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "gpu" not in path.relative_to(ROOT / "tests").parts and path != Path(__file__):
            assert "mark.gpu" not in path.read_text(), path


def test_shared_memory_is_asked_by_owner():
    """Files of tests that run at the same time come and go there."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(tree_of(path)) if path.name != "shared_memory.py" else ():
            if isinstance(node, ast.Attribute) and node.attr in ("glob", "rglob", "iterdir"):
                place = ast.unparse(node.value)
                assert "/dev/shm" not in place and "DIRECTORY" not in place, f"{path}:{node.lineno}: use shared_memory"
