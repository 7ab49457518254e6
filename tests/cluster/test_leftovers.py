"""What a killed deployment leaves is removed, and nothing else: directories, processes, files in shared memory."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.cluster import leftovers
from baton.cluster.undertaker import Undertaker
from baton.kvtransfer import shared_region
from baton.kvtransfer.protocol import incarnation_file
from baton.kvtransfer.shared_region import SharedRegion

pytestmark = pytest.mark.fast

WRITES = (
    "import sys, time; file = open(sys.argv[1] + '/log', 'w'); sys.argv[1:] = []; print(1, flush=True); time.sleep(600)"
)
READS = "import sys, time; file = open(sys.argv[1] + '/owner.lock'); print(1, flush=True); time.sleep(600)"
# A deployment's process: it owns a directory and a region, has a child that writes there, and tells both.
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from baton.cluster.undertaker import Undertaker
from baton.kvtransfer.shared_region import SharedRegion
directory = Path(sys.argv[1])
undertaker = Undertaker(directory)
region = SharedRegion.create(link_bytes=4096, pool_bytes=[4096])
child = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[2], sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(undertaker.pid, child.pid, region.path, flush=True)
sys.stdin.read()
undertaker.dismiss()
"""


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Roots of this test's own: other deployments run on this host."""
    monkeypatch.setattr(leftovers, "ROOT", tmp_path)
    return tmp_path


def make_directory(root, name="baton-1"):
    directory = root / name
    directory.mkdir()
    return directory


def start(script, directory, *more):
    command = [sys.executable, "-c", script, str(directory), *more]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return process, process.stdout.readline().split()


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_directory_is_its_owners_as_long_as_that_lives(places):
    directory = make_directory(places)
    assert not leftovers.is_abandoned(directory), "nobody has claimed it: it may be anybody's"
    file = leftovers.claim(directory)
    assert not leftovers.is_abandoned(directory)
    assert leftovers.sweep() == []
    os.close(file)
    assert leftovers.is_abandoned(directory)
    assert leftovers.sweep() == [directory]
    assert not directory.exists()


def test_what_is_not_clearly_a_dead_deployments_is_let_be(places):
    foreign = make_directory(places, "other-1")
    os.close(leftovers.claim(foreign))
    unclaimed = make_directory(places, "baton-2")
    link = places / "baton-3"
    link.symlink_to(foreign)
    (places / "baton-4").write_text("a file")
    linked = make_directory(places, "baton-5")
    (linked / leftovers.OWNER).symlink_to(foreign / leftovers.OWNER)
    assert leftovers.sweep() == []
    assert all(path.exists() for path in (foreign, unclaimed, link, linked))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_what_is_another_users_is_let_be(places):
    directory = make_directory(places)
    os.close(leftovers.claim(directory))
    os.chown(directory, 65534, 65534)
    assert leftovers.sweep() == []
    os.chown(directory, 0, 0)
    os.chown(directory / leftovers.OWNER, 65534, 65534)
    assert leftovers.sweep() == []


@pytest.mark.long
def test_who_writes_there_is_ended_and_who_reads_there_is_not(places):
    directory = make_directory(places)
    os.close(leftovers.claim(directory))
    writer, _ = start(WRITES, directory)
    near, _ = start(WRITES, make_directory(places, "baton-11"))
    try:
        assert [process.pid for process in leftovers.users_of(directory)] == [writer.pid]
        with subprocess.Popen(["/usr/bin/tail", "-f", str(directory / "log")], stdout=subprocess.DEVNULL) as tail:
            assert leftovers.sweep() == [directory]
            assert tail.poll() is None
            tail.kill()
        assert writer.wait(30) is not None
        assert near.poll() is None
    finally:
        for process in (writer, near):
            end(process)


@pytest.mark.long
@pytest.mark.parametrize("in_order", [False, True])
def test_the_undertaker_clears_up_after_a_kill_and_only_then(places, in_order):
    directory = make_directory(places)
    driver, (undertaker, child, region) = start(DRIVER, directory, WRITES)
    found = [psutil.Process(int(undertaker)), psutil.Process(int(child))]
    region = Path(region.decode())
    assert region.exists()
    if in_order:
        driver.stdin.close()
        assert driver.wait(30) == 0
        psutil.wait_procs(found[:1], timeout=30)
        assert directory.exists()
        assert found[1].is_running()
        found[1].kill()
        driver.stdout.close()
    else:
        end(driver)
        _, left = psutil.wait_procs(found, timeout=30)
        assert left == []
        assert not directory.exists()
        assert not region.exists()


def test_memory_that_is_let_go_of_late_is_swept_too(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_region, "DIRECTORY", tmp_path)
    monkeypatch.setattr(incarnation_file, "DIRECTORY", tmp_path)
    late = tmp_path / f"{shared_region.PREFIX}1-x"
    owner = os.open(late, os.O_RDWR | os.O_CREAT)
    fcntl.flock(owner, fcntl.LOCK_EX)
    pauses = []

    def sleep(pause_s):
        assert late.exists()
        pauses.append(pause_s)
        if len(pauses) == 3:
            os.close(owner)

    leftovers.sweep_late_memory(3 * leftovers.SWEEP_EVERY_S, sleep)
    assert not late.exists()
    assert len(pauses) == 3


@pytest.mark.long
def test_an_undertaker_that_dies_is_followed_by_another(places):
    undertaker = Undertaker(make_directory(places))
    dead = undertaker.pid
    os.kill(dead, 9)
    deadline_s = time.monotonic() + 30.0
    while undertaker.pid == dead:
        undertaker.check()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    undertaker.dismiss()


def test_memory_is_swept_by_the_lock_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_region, "DIRECTORY", tmp_path)
    monkeypatch.setattr(incarnation_file, "DIRECTORY", tmp_path)
    region = SharedRegion.create(link_bytes=4096, pool_bytes=[4096])
    dead = tmp_path / f"{shared_region.PREFIX}1-x"
    dead.touch()
    leftovers.sweep_memory()
    assert not dead.exists()
    assert region.path.exists()
    region.close()
