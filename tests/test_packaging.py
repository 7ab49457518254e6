"""What the wheel ships, and that neither it nor the checkout takes names that belong to others."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")}
FOREIGN = ("kernels", "proto")

PROBE = """
import importlib.util, sys
if {first!r}: import baton
for name in ("kernels", "proto"):
    spec = importlib.util.find_spec(name)
    print(name, "" if spec is None else spec.origin or list(spec.submodule_search_locations))
import baton
print("baton", baton.__file__)
"""


def probe(*, cwd, first, path=""):
    """Where names resolve to, in a fresh interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": path} if path else {}
    command = [sys.executable, "-c", PROBE.format(first=first)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def is_ours(place):
    return place.startswith(
        (str(ROOT / "kernels"), str(ROOT / "proto"), f"['{ROOT / 'kernels'}", f"['{ROOT / 'proto'}")
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from this checkout without network or leftovers in it."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 80:
        pytest.skip("needs setuptools 80 or newer")
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    # setuptools writes beside its sources; a copy keeps the checkout clean and other tests undisturbed.
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() or path.name in PACKAGES:
            (source / path.name).symlink_to(path)
    build = [sys.executable, "-c", "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])", str(scratch)]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(scratch.glob("*.whl"))


def test_the_wheel_holds_the_rooms_and_their_data_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    metadata = {name for name in names if ".dist-info/" in name}
    code = set(names) - metadata
    assert {Path(name).parts[0] for name in code} == {"baton"}
    assert {Path(name).parts[1] for name in code if len(Path(name).parts) > 2} == PACKAGES
    beside = {Path(name).name for name in code if len(Path(name).parts) == 2}
    assert beside == {"__init__.py", "cluster.yaml", "cluster.local.yaml", "py.typed"}
    assert {Path(name).suffix for name in code if not name.startswith("baton/assets/tiny")} == {
        ".py",
        ".pyi",
        ".proto",
        ".jinja",
        ".json",
        ".toml",
        ".yaml",
        ".typed",
        ".md",
    }
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    for model in (path for path in (ROOT / "assets").iterdir() if (path / "config.json").exists()):
        shipped = {path.name for path in model.iterdir() if path.is_file()}
        assert {Path(name).name for name in code if name.startswith(f"baton/assets/{model.name}/")} == shipped


def test_an_installed_wheel_takes_no_foreign_name(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    found = probe(cwd=tmp_path, first=False, path=str(tmp_path / "site"))
    assert found["baton"].startswith(str(tmp_path / "site"))
    assert str(tmp_path) not in found["kernels"] + found["proto"]


@pytest.mark.fast
def test_in_the_checkout_foreign_names_are_not_ours_once_baton_is_imported():
    found = probe(cwd=ROOT, first=True)
    assert not any(is_ours(found[name]) for name in FOREIGN)


@pytest.mark.fast
def test_elsewhere_foreign_names_are_never_ours(tmp_path):
    found = probe(cwd=tmp_path, first=False)
    assert not any(is_ours(found[name]) for name in FOREIGN)


RAY_PROBE = """
import sys
sys.path.insert(0, {stubs!r})
import baton
import ray
import stubs
from baton.cluster.ray.actors import PrefillActor
from baton.core.config import ServeConfig
from baton.cluster.ray.session import RaySession
from pathlib import Path
session = RaySession("local", namespace="probe", temp_dir=Path({temp!r}), num_gpus=0)

@ray.remote
def in_task():
    import baton.core.errors
    import importlib.util
    specs = [importlib.util.find_spec(name) for name in ("kernels", "proto")]
    return [str(spec.origin or list(spec.submodule_search_locations)) if spec else "" for spec in specs]

print("task", *ray.get(in_task.remote()), sep="|")
session.close()
"""


@pytest.mark.ray
def test_in_a_ray_task_started_from_the_checkout_foreign_names_are_not_ours():
    import tempfile

    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as temp:
        script = RAY_PROBE.format(stubs=str(ROOT / "tests" / "cluster"), temp=f"{temp}/ray")
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("task|"))
    assert not any(is_ours(place) for place in line.split("|")[1:])


def outside(environment):
    """The environment of a process that finds no checkout."""
    return {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def dependencies():
    """Where this interpreter has what Baton depends on; on PYTHONPATH it brings no `.pth` files, so no checkout."""
    return next(path for path in sys.path if path.endswith("site-packages") and (Path(path) / "torch").is_dir())


@pytest.mark.ray
def test_the_demo_runs_from_the_wheel_alone(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    path = os.pathsep.join((str(tmp_path / "site"), dependencies()))
    environment = outside(os.environ) | {"PYTHONPATH": path}
    base = next(Path(sys.base_prefix, "bin").glob("python3"))
    where = [base, "-c", "import baton; print(baton.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(tmp_path / "site"))
    command = [base, "-m", "baton.cluster", "demo", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_the_demo_runs_in_an_empty_environment_with_the_wheel_installed(wheel, tmp_path):
    environment = outside(os.environ)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    pip = [tmp_path / "env" / "bin" / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(pip, cwd=tmp_path, env=environment, check=True, timeout=900)
    command = [tmp_path / "env" / "bin" / "baton", "demo", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
