"""Starting, watching and ending a deployment, with stand-ins for router and workers. Ray is the real one."""

import functools
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from baton.cluster import deployment as deployment_module
from baton.cluster import private_files
from baton.cluster.deployment import Deployment, Factories
from baton.cluster.ray import crew
from baton.cluster.ray.restarts import Restarts
from baton.cluster.start_progress import StartProgress
from baton.core.config import ServeConfig
from baton.core.errors import (
    BatonError,
    ConfigInvalid,
    ModelMissing,
    PortInUse,
    RayLost,
    RayUnavailable,
    WorkerLost,
    WorkerStartFailed,
)
from baton.core.inside import ENVIRONMENT as SECRET_VARIABLE
from baton.core.inside import DeploymentSecret

sys.path.insert(0, str(Path(__file__).parent))
stubs = importlib.import_module("stubs")
sys.path.pop(0)

IGNORED = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


@pytest.fixture
def model(tmp_path):
    return stubs.write_model_directory(tmp_path / "model")


@pytest.fixture(autouse=True)
def workers_find_the_stubs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def make(model, prefill=stubs.stub_shell, decode=stubs.stub_shell, on_progress=None, **values):
    config = ServeConfig.from_mapping({"model": str(model), "grpc_port": 0, "start_timeout_s": 60} | values)
    shells = {"prefill": prefill, "decode": decode}
    parts = Factories(shells=shells, router_command=stubs.stub_router_command)
    return Deployment(config, on_progress=on_progress, parts=parts)


def our_processes():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def directory_of(processes):
    """The directory of the private Ray among `processes`; other deployments on this host have others."""
    for process in processes:
        for part in process.cmdline():
            if "--log_dir=/tmp/baton-" in part:
                return Path(*Path(part.partition("=")[2]).parts[:3])
    raise AssertionError("no private Ray is running")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ray_address", "device", "expected"), [("local", "cuda", 0), ("local", "cpu", 1), ("auto", "cuda", 1)]
)
def test_one_gpu_of_this_host_gets_one_worker(model, monkeypatch, ray_address, device, expected):
    started = []
    monkeypatch.setattr(deployment_module, "resolve_device", lambda asked: device)
    monkeypatch.setattr(deployment_module, "visible_gpus", lambda: 1)
    monkeypatch.setattr(deployment_module.Deployment, "_start_private", lambda self, *rest: started.append(self.config))
    monkeypatch.setattr(
        deployment_module.Deployment, "_start_in_cluster", lambda self, *rest: started.append(self.config)
    )
    monkeypatch.setattr(deployment_module.Deployment, "_wait_known", lambda self, deadline_s: None)
    monkeypatch.setattr(deployment_module, "SECRETS", model / "secrets")
    with make(model, ray_address=ray_address):
        pass
    (config,) = started
    assert config.prefill == expected


@pytest.mark.fast
@pytest.mark.parametrize(
    ("has_port", "has_met_ray", "was_there", "is_kept"),
    [
        (True, False, False, False),
        (True, False, True, True),
        (True, True, False, True),  # a worker may live on
        (False, True, False, False),  # the next `baton serve` could not find it
    ],
)
def test_a_start_that_meets_no_ray_leaves_no_secret(model, monkeypatch, has_port, has_met_ray, was_there, is_kept):
    def fail(deployment, deadline_s, num_total):
        if has_met_ray:
            deployment.address = "127.0.0.1:1"
        raise RayUnavailable("no Ray cluster answers at 127.0.0.1:1", address="127.0.0.1:1")

    monkeypatch.delenv(SECRET_VARIABLE, raising=False)  # which tests have
    folder = model / "secrets"
    monkeypatch.setattr(deployment_module, "SECRETS", folder)
    monkeypatch.setattr(deployment_module, "OLD_SECRETS", model / "old")
    monkeypatch.setattr(deployment_module.Deployment, "_start_in_cluster", fail)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if has_port else 0
    deployment = make(model, ray_address="127.0.0.1:1", device="cpu", grpc_port=port)
    file = folder / f"{deployment._name}.secret"
    if was_there:
        folder.mkdir()
        DeploymentSecret.of_file(file)
    with pytest.raises(RayUnavailable), deployment:
        pass
    assert [path.name for path in folder.glob("*")] == ([file.name] if is_kept else [])


@pytest.mark.fast
@pytest.mark.parametrize("has_new", [False, True])
def test_workers_that_an_older_version_started_are_adopted_with_their_secret(model, monkeypatch, has_new):
    def fail(deployment, deadline_s, num_total):
        raise RayUnavailable("no Ray cluster answers at 127.0.0.1:1", address="127.0.0.1:1")

    monkeypatch.delenv(SECRET_VARIABLE, raising=False)  # which tests have
    folders = model / "old", model / "new"
    monkeypatch.setattr(deployment_module, "OLD_SECRETS", folders[0])
    monkeypatch.setattr(deployment_module, "SECRETS", folders[1])
    monkeypatch.setattr(deployment_module.Deployment, "_start_in_cluster", fail)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    deployment = make(model, ray_address="127.0.0.1:1", device="cpu", grpc_port=port)
    kept = {}
    for folder in folders[: 1 + has_new]:
        folder.mkdir()
        kept[folder] = DeploymentSecret.of_file(folder / f"{deployment._name}.secret")
    with pytest.raises(RayUnavailable), deployment:
        pass
    assert deployment.secret == kept[folders[has_new]]
    for folder, secret in kept.items():
        assert DeploymentSecret.of_file(folder / f"{deployment._name}.secret") == secret


@pytest.mark.fast
def test_what_can_be_refused_is_refused_before_anything_starts(model, tmp_path):
    before = our_processes()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(PortInUse) as refused, make(model, grpc_port=listener.getsockname()[1]):
            pass
        assert refused.value.fields["port"] == listener.getsockname()[1]
        for name in ("http_port", "metrics_port"):
            with pytest.raises(PortInUse), make(model, **{name: listener.getsockname()[1]}):
                pass
    with pytest.raises(ModelMissing), make(tmp_path / "nowhere"):
        pass
    for key in ("nowhere", "config.json"):
        with pytest.raises(ConfigInvalid, match="kv_curve_key_file"), make(model, kv_curve_key_file=str(model / key)):
            pass
    assert our_processes() == before


@pytest.mark.fast
@pytest.mark.parametrize("name", ["api_keys_file", "admin_keys_file"])
def test_a_file_that_admits_nobody_is_refused_before_anything_starts(model, tmp_path, name):
    before = our_processes()
    late = {"name": "late", "tenant": "a", "sha256": "a" * 64, "expires": "2020-01-01T00:00:00+00:00"}
    for at, text in enumerate(("", "# made by hand\n\n", json.dumps(late))):
        path = tmp_path / f"{at}.keys"
        path.write_text(text)
        told = f"{name} {path} has no key that is in force.*baton keys create"
        with pytest.raises(ConfigInvalid, match=told) as refused, make(model, admin_port=0, **{name: str(path)}):
            pass
        assert refused.value.fields["keys"] == [name]
    assert our_processes() == before


@pytest.mark.ray
@IGNORED
def test_a_starting_worker_shows_what_it_does_until_it_is_ready(model):
    """Its load goes on only once that was shown."""
    shown = []

    class Seen(StartProgress):
        def __call__(self, num_done, num_total, text):
            shown.append(text)

        def worker(self, worker_id, phase):
            shown.append((worker_id, phase and str(phase)))
            if str(phase) == "weights 45 %":  # on a busy machine a report may precede that
                (model / "may_start").touch()

    with make(model, decode=stubs.held_shell, on_progress=Seen()) as deployment:
        assert set(deployment.workers) == {"prefill-0", "decode-0"}
    assert shown.index(("decode-0", "weights 45 %")) < shown.index("decode-0 is ready")
    assert {one[0] for one in shown if isinstance(one, tuple)} == {"decode-0"}


@pytest.mark.ray
@IGNORED
def test_it_starts_serves_restarts_workers_and_leaves_nothing(model, caplog):
    before, known = our_processes(), set(os.environ)
    own_child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with make(model, worker_threads=2) as deployment:
        assert set(deployment.workers) == {"prefill-0", "decode-0"}
        assert deployment.workers["prefill-0"]["OMP_NUM_THREADS"] == "2"
        assert deployment.workers["prefill-0"]["RAY_AUTH_MODE"] == "token"
        assert {worker["state"]["worker_id"] for worker in deployment.status()["workers"]} == set(deployment.workers)
        pids = deployment.worker_pids()
        assert pids["decode-0"] == deployment.workers["decode-0"]["pid"]
        dead = deployment.kill_actor("decode-0")
        assert dead == pids["decode-0"]
        again = deployment.worker_pids()
        assert again["decode-0"] != dead
        assert again["prefill-0"] == pids["prefill-0"]
        deployment.check()
        directory = directory_of(psutil.Process().children())
        assert directory.is_dir()
        assert deployment.workers["prefill-0"]["nice"] == 0
        tokens = {worker.pop("RAY_AUTH_TOKEN") for worker in deployment.workers.values()}
        assert len(tokens) == 1 and {len(token) for token in tokens} == {64}
        assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & (os.environ.keys() - known)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 20
    assert own_child.poll() is None  # not ours to end
    own_child.communicate()
    assert our_processes() == before
    assert not directory.exists()
    logs = private_files.kept_logs(directory)  # a worker was killed: its words are worth something
    assert_private(logs)
    assert f"a worker died in this run; the logs are in {logs}" in caplog.text
    shutil.rmtree(logs)


@pytest.mark.ray
@IGNORED
def test_a_worker_that_refuses_to_start_is_reported_with_its_own_error(model):
    before = our_processes()
    with pytest.raises(WorkerStartFailed, match=r"lacks lm_head\.weight") as failed:
        make(model, decode=stubs.refusing_shell).__enter__()
    assert failed.value.fields["worker_id"] == "decode-0"
    assert failed.value.fields["cause"] == "ModelTensorMissing"
    assert failed.value.fields["cause_fields"] == {"tensors": ["lm_head.weight"]}
    assert our_processes() == before
    logs = Path(failed.value.fields["logs"])
    assert failed.value.message.endswith(f"(logs: {logs})")
    assert_private(logs)
    said = [path.read_text() for path in logs.glob("worker-*.err")]
    assert any("lacks lm_head.weight" in text for text in said)
    shutil.rmtree(logs)


@pytest.mark.fast
def test_logs_are_kept_where_they_may_say_more_than_the_error():
    wrong_key = {"worker_id": "decode-0", "cause": "ConfigInvalid"}
    assert not private_files.is_worth_logs(ConfigInvalid("kv_memory_mib: too little", keys=["kv_memory_mib"]))
    assert not private_files.is_worth_logs(PortInUse("port 80", port=80))
    assert not private_files.is_worth_logs(WorkerStartFailed("decode-0 did not start: ConfigInvalid", **wrong_key))
    assert private_files.is_worth_logs(WorkerStartFailed("decode-0 did not start", **wrong_key | {"cause": "Odd"}))
    assert private_files.is_worth_logs(RayLost("its raylet is gone"))
    assert private_files.is_worth_logs(ValueError("a fault of our own"))


@pytest.mark.ray
@IGNORED
def test_a_wrong_key_that_only_a_worker_can_judge_leaves_no_logs(model, caplog, monkeypatch):
    kept = []
    monkeypatch.setattr(private_files, "keep_logs", kept.append)
    with pytest.raises(WorkerStartFailed, match="ConfigInvalid: kv_memory_mib") as failed:
        make(model, decode=stubs.misconfigured_shell).__enter__()
    assert "logs" not in failed.value.fields
    assert not kept
    assert "a worker died" not in caplog.text


def assert_private(logs):
    """A folder of kept logs: of this account alone, and nothing but words in it."""
    assert logs.stat().st_mode & 0o777 == 0o700
    files = list(logs.iterdir())
    assert files and all(path.is_file() and path.stat().st_mode & 0o777 == 0o600 for path in files)


@pytest.mark.fast
def test_kept_logs_are_few_and_hold_no_links(monkeypatch, tmp_path):
    monkeypatch.setattr(private_files, "ROOT", tmp_path)
    kept = []
    for at in range(private_files.MAX_KEPT + 2):
        folder = private_files.make_folder()
        assert folder.stat().st_mode & 0o777 == 0o700
        logs = folder / "ray" / "session_1" / "logs"
        logs.mkdir(parents=True)
        (folder / "ray" / "session_latest").symlink_to(logs.parent)
        (logs / "worker-a-01000000-1.err").write_text(f"life {at}")
        (logs / "empty.err").touch()
        (logs / "linked.log").symlink_to("/etc/passwd")
        with private_files.open_private(folder / "router.err", "wb") as file:
            file.write(b"words")
        assert (folder / "router.err").stat().st_mode & 0o777 == 0o600
        said = private_files.kept_logs(folder)
        assert private_files.keep_logs(folder) == said
        os.utime(said, (at, at))
        kept.append(said)
        assert {path.name for path in said.iterdir()} == {"worker-a-01000000-1.err", "router.err"}
        assert_private(said)
    assert [path.exists() for path in kept] == [False] * 2 + [True] * private_files.MAX_KEPT


@pytest.mark.fast
def test_an_error_names_the_logs_once(tmp_path):
    error = WorkerStartFailed("decode-0 did not start", worker_id="decode-0")
    for _ in range(2):
        private_files.say_where(error, tmp_path / "baton-x")
    assert str(error) == f"decode-0 did not start (logs: {tmp_path / 'baton_logs-x'})"


@pytest.mark.ray
@pytest.mark.slow
@IGNORED
def test_a_worker_process_that_dies_while_starting_is_reported(model):
    before = our_processes()
    with pytest.raises(WorkerStartFailed, match="prefill-0 did not start"):
        make(model, prefill=stubs.dying_shell).__enter__()
    assert our_processes() == before


@pytest.mark.ray
@pytest.mark.slow
@IGNORED
def test_a_worker_that_stays_silent_is_a_timeout(model):
    before = our_processes()
    with pytest.raises(WorkerStartFailed, match=r"decode-0.*: not ready within 10 s") as failed:
        make(model, decode=stubs.slow_shell, start_timeout_s=10).__enter__()
    assert failed.value.fields["timed_out"] is True
    assert our_processes() == before


@pytest.mark.ray
@IGNORED
def test_a_router_that_is_killed_comes_back_on_its_port_and_finds_the_same_workers(model, caplog):
    with make(model) as deployment:
        address, pids = deployment.address, deployment.worker_pids()
        for _ in range(2):
            dead = deployment.router_pid()
            os.kill(dead, signal.SIGKILL)
            check_until(deployment, lambda: len(workers_of(deployment)) == 2)
            assert deployment.router_pid() != dead
            assert (deployment.address, deployment.worker_pids()) == (address, pids)
    said = [record.getMessage() for record in caplog.records if "started again" in record.getMessage()]
    assert len(said) == 2
    assert all("the router was ended by SIGKILL" in text for text in said)


@pytest.mark.ray
@pytest.mark.parametrize("victim", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)])
@IGNORED
def test_a_part_of_a_private_ray_that_ends_is_named_and_ends_the_deployment(model, victim):
    before, start_s = our_processes(), 0.0
    with pytest.raises(RayLost, match=f"the {victim} .* has ended") as lost, make(model) as deployment:
        directory = deployment._dir
        # Else Ray looks at the parent, and ends a process without a word if that is 1.
        assert os.environ["RAY_RAYLET_PID"] == str(os.getpid())
        (pid,) = (pid for pid, kind in deployment._ray.pids().items() if kind == victim)
        start_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        check_until(deployment, lambda: False)
    logs = Path(lost.value.fields["logs"])
    assert lost.value.fields == {"process": victim, "pid": pid, "logs": str(logs)}
    assert_private(logs)
    shutil.rmtree(logs)
    assert time.monotonic() - start_s < 30.0  # not the minute that Ray waits for its head
    assert our_processes() == before
    assert not directory.exists()


def check_until(deployment, is_so, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        deployment.check()
        assert time.monotonic() < deadline_s
        deployment.wait(0.1)


def workers_of(deployment):
    """That the router has heard of; none while there is no router."""
    try:
        return {worker["state"]["worker_id"] for worker in deployment.status()["workers"]}
    except BatonError:
        return set()


@pytest.mark.ray
@pytest.mark.slow
@IGNORED
def test_our_folders_answer_to_no_foreign_name_in_an_actor(model):
    with make(model, prefill=stubs.probing_shell) as deployment:
        found = deployment.workers["prefill-0"]
    root = str(Path(__file__).parents[2])
    assert not any(found[name].startswith(root) and ".venv" not in found[name] for name in ("kernels", "proto"))
    assert found["transformers"].startswith("transformers.models.qwen3")


@pytest.mark.ray
@IGNORED
def test_who_dies_is_started_again_by_ray_then_by_us_and_a_role_without_a_worker_ends_it(model, monkeypatch, caplog):
    monkeypatch.setattr(deployment_module, "MAX_RESTARTS", 1)
    monkeypatch.setattr(crew, "Restarts", functools.partial(Restarts, max_starts=1))
    with make(model) as deployment:
        dead = set()
        for _ in ("Ray", "we", "Ray"):  # it starts each actor of ours again
            dead.add(deployment.kill_actor("decode-0"))
            deadline_s = time.monotonic() + 30
            while pid_of(deployment, "decode-0") in {None, *dead}:
                deployment.check()
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        deployment.check()
        deployment.kill_actor("decode-0")
        with pytest.raises(WorkerLost, match="no decode worker is left: decode-0"):
            while time.monotonic() < deadline_s + 30:
                start_s = time.monotonic()
                deployment.check()
                assert time.monotonic() - start_s < 5
                time.sleep(0.05)
    said = [record.levelname for record in caplog.records if "decode-0" in record.getMessage()]
    assert said == ["WARNING", "ERROR"]


def pid_of(deployment, worker_id):
    """Of its present incarnation; None while there is none."""
    try:
        return deployment.worker_pids(timeout_s=0.5)[worker_id]
    except deployment._ray.ray.exceptions.RayError:
        return None


SERVE = """
import sys
import types
sys.path.insert(0, {here!r})
import stubs
from baton.cluster import deployment
from baton.cluster.commands import serve
from baton.cluster.outcome import Output
from baton.core.config import ServeConfig
parts = deployment.Factories(
    shells={{"prefill": stubs.stub_shell, "decode": stubs.stub_shell}}, router_command=stubs.stub_router_command
)
plain = deployment.Deployment
serve.Deployment = lambda config, **options: plain(config, parts=parts, **options)
serve.require_servable = lambda config: types.SimpleNamespace(notes=(), facts={{"names": ["stub"]}})
config = ServeConfig.from_mapping({{"model": {model!r}, "grpc_port": 0}})
sys.exit(serve.serve(config, Output(True)))
"""


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("while_starting", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_signal_ends_everything(model, number, while_starting, tmp_path):
    script = textwrap.dedent(SERVE).format(here=str(Path(__file__).parent), model=str(model))
    with (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=err, process_group=0)
    assert process.stdout is not None
    if while_starting:
        while b"starting Ray" not in (tmp_path / "err").read_bytes():
            time.sleep(0.02)
        time.sleep(1.0)
    else:
        assert b'"address"' in process.stdout.readline()
    tree = psutil.Process(process.pid).children(recursive=True)
    if not while_starting:  # it is for this process alone: else Ray would end before the streams do
        assert [child for child in tree if os.getpgid(child.pid) == process.pid] == []
    directory = directory_of(tree)
    os.killpg(process.pid, number)
    assert process.wait(30) == (1 if while_starting else 0), (tmp_path / "err").read_text()
    assert process.stdout.read() == b""
    process.stdout.close()
    assert [child for child in tree if child.is_running() and child.status() != "zombie"] == []
    assert not directory.exists()


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_driver_leaves_nothing(model, tmp_path):
    script = textwrap.dedent(SERVE).format(here=str(Path(__file__).parent), model=str(model))
    with (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=err)
    assert process.stdout is not None
    assert b'"address"' in process.stdout.readline()
    tree = psutil.Process(process.pid).children(recursive=True)
    assert sum("Agent" in child.name() for child in tree) == 2  # which by themselves end after half a minute or more
    directory = directory_of(tree)
    process.kill()
    process.wait(15)
    process.stdout.close()
    _, left = psutil.wait_procs(tree, timeout=10)
    assert left == []
    assert not directory.exists()


@pytest.mark.ray
@pytest.mark.slow
def test_what_a_driver_and_its_undertaker_leave_is_swept_by_the_next_start(model, tmp_path):
    script = textwrap.dedent(SERVE).format(here=str(Path(__file__).parent), model=str(model))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert b'"address"' in process.stdout.readline()
    tree = psutil.Process(process.pid).children(recursive=True)
    directory = directory_of(tree)
    (undertaker,) = (child for child in tree if "baton.cluster.undertaker" in child.cmdline())
    undertaker.kill()
    process.kill()
    process.wait(15)
    process.stdout.close()
    assert directory.exists()
    with make(model):
        assert not directory.exists()
        assert psutil.wait_procs(tree, timeout=10)[1] == []
