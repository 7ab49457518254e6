"""Fixtures that several rooms' tests share."""

import functools
import gc
import inspect
import os
import signal
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

try:
    from hypothesis import Phase, settings
except ModuleNotFoundError:  # machines with GPUs do without
    pass
else:  # an example that takes long says that the machine is busy, not that the code is wrong
    settings.register_profile("baton", deadline=None)
    # Where it is enough that an example fails (`scripts/plant_faults.py`).
    settings.register_profile("unshrunk", deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    settings.load_profile(os.environ.get("BATON_TEST_PROFILE", "baton"))

if not Path("/dev/nvidiactl").exists():
    # Before anything imports Triton: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Before anything imports torch, and for every process that tests start: threads of one GEMM that wait for each other
# sleep. With more processes than cores they would spin for what the others need the cores for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What tests start in processes of its own is one deployment with what they run here (`baton.tests.inside`).
os.environ.setdefault("BATON_SECRET", "5e" * 32)

from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.shared_memory import owned_by

# Started by nohup or in the background, this process ignores these signals, and so would all that tests start: what is
# ignored is inherited, a handler is not.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)

GARBAGE_BYTES = 512 << 20
SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "PYTHONBREAKPOINT", "RAY_", "TORCHINDUCTOR_")  # the second by Ray
_after_collection = [0]  # resident bytes


FIRST = ("e2e", "runbook", "cluster", "test_packaging.py")


def pytest_ignore_collect(collection_path, config):
    """Of `make check`, files without a fast test are not imported, which takes as long as many a test."""
    wants_fast = config.option.markexpr.startswith("fast and")
    is_file = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if wants_fast and is_file and not _names_fast(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, obj):
    """Tests that are left out whole are not laid out case by case, which takes seconds in every process."""
    config = collector.config
    if not inspect.isfunction(obj) or not config.option.markexpr or any("::" in name for name in config.args):
        return None
    own = getattr(obj, "pytestmark", ())
    if any(_marks_a_case(mark) for mark in own):
        return None
    marks = {mark.name for mark in (*own, *collector.iter_markers())}
    if "fast" in marks and not _names_fast(collector.path):
        return None  # `pytest_collection_modifyitems` finds it
    chosen = _compiled(config.option.markexpr).evaluate(lambda name, **_: name in marks)
    return None if chosen else []


@functools.cache
def _compiled(expression):
    return Expression.compile(expression)


def _marks_a_case(mark):
    if mark.name != "parametrize":
        return False
    cases = mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"]
    return any(getattr(case, "marks", ()) for case in cases)


@functools.cache
def _names_fast(path):
    return "fast" in path.read_text(encoding="utf-8")


@pytest.hookimpl(tryfirst=True)  # before any is left out
def pytest_collection_modifyitems(items):
    """Files that take long by themselves begin first: in several processes none of them is what the others wait for."""
    hidden = {item.path for item in items if item.get_closest_marker("fast")}
    hidden = sorted(str(path) for path in hidden if not _names_fast(path))
    if hidden:
        raise pytest.UsageError(f"`make check` would leave out fast tests: nothing says `fast` in {', '.join(hidden)}")
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(FIRST))


def _environment():
    return {key: value for key, value in os.environ.items() if not key.startswith(SET_BY_OTHERS)}


def _changed(before):
    """Names of variables, for a message."""
    return ", ".join(sorted({key for key, _ in _environment().items() ^ before.items()}))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A module that sets a variable when it is imported sets it for the tests of all others, in every process."""
    before = _environment()
    report = yield
    if _changed(before):
        report.outcome = "failed"
        report.longrepr = f"importing {collector.nodeid} changes the environment: {_changed(before)}"
    return report


@pytest.fixture(autouse=True)
def the_environment_is_left_as_it_was():
    before = _environment()
    yield
    assert not _changed(before)


def pytest_collection_finish(session):
    """What is imported now stays: without it Python's collector looks at the rest often, and fast."""
    gc.collect()
    gc.freeze()
    _after_collection[:] = [_resident_bytes()]


@pytest.fixture(autouse=True)
def no_garbage_gathers():
    """Pools lie in cycles of few objects and many bytes, of which the collector knows only the objects.

    12 GB had gathered at worst; to let go of them stopped every thread for longer than a lease.
    """
    yield
    if _resident_bytes() - _after_collection[-1] > GARBAGE_BYTES:
        gc.collect()
        _after_collection[:] = [_resident_bytes()]


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A factory of tiny random model directories; equal arguments give the same directory."""
    written = {}

    def make(**options):
        key = repr(sorted(options.items()))
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp("model"), **options)
        return written[key]

    return make


@pytest.fixture(scope="session", autouse=True)
def no_shared_memory_is_left():
    """Whatever this process put into /dev/shm is gone at the end."""
    yield
    assert not owned_by({os.getpid()})
