"""Runbooks that look, and those that change what can be changed back, against one real deployment."""

import json
import os
import signal
import tarfile
import threading

import psutil
import pytest

from baton.cluster.admin import set_speculation
from baton.cluster.ray import certificates as ray_certificates
from baton.core.errors import BatonError
from baton.core.requests.sampling import SamplingParams
from baton.tests.runbook.conftest import CONFIG, Load, answer, incarnations, wait_until

pytestmark = pytest.mark.ray

LONG = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SAFE = {
    "collect-diagnostics": [],
    "kv-leak-audit": ["--watch", "2"],
    "acceptance-regression": ["--watch", "1", "--min-acceptance", "0.01"],
    "corruption-response": ["--rounds", "1"],
    "partition-triage": ["--rounds", "1"],
    "overload": ["--limit", "256"],
    "poison-request": ["--watch", "1"],
}


@pytest.mark.parametrize("name", SAFE)
def test_a_deployment_that_is_well_stays_as_it_is(runbook, standing, tmp_path, name):
    into = ["--into", str(tmp_path)] if name == "collect-diagnostics" else []
    before = standing()
    dry = runbook(name, *SAFE[name], *into, "--dry-run")
    assert dry.code == 0, dry.stderr
    assert not dry.data["changed"]
    assert not list(tmp_path.iterdir())
    assert standing() == before
    for _ in range(2):
        done = runbook(name, *SAFE[name], *into)
        assert done.code == 0, done.stderr
        assert done.data["ok"]
    assert standing() == before


def test_diagnostics_hold_what_they_promise_and_no_secret(runbook, deployment, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log").write_text("api_key=abc123 and Authorization: Bearer xyz789\nall is well\n")
    done = runbook("collect-diagnostics", "--into", str(tmp_path), "--logs", str(logs))
    assert done.code == 0, done.stderr
    with tarfile.open(done.data["found"]["archive"]) as archive:
        files = {member.name.partition("/")[2]: archive.extractfile(member).read() for member in archive}
    assert {"status.json", "inventory.json", "doctor.json", "environment.json", "MANIFEST.json"} <= set(files)
    assert len(json.loads(files["status.json"])["workers"]) == CONFIG["prefill"] + CONFIG["decode"]
    assert any(name.startswith("decode-0/") for name in files), "the log of a worker of this host"
    text = files["logs-0/a.log"].decode()
    assert "all is well" in text
    assert "abc123" not in text
    assert "xyz789" not in text


def test_every_worker_process_leaves_out_what_it_loaded_and_counts_what_collections_take(client):
    """The collection with which it begins to serve is the first that counts."""
    wait_until(lambda: all(worker.state.inventory.gc_seconds > 0 for worker in client.inventory().workers))


def test_diagnostics_that_lack_something_are_partial_and_say_what(runbook, tmp_path):
    lacking = ("--metrics", "http://127.0.0.1:1/metrics", "--logs", str(tmp_path / "nowhere"))
    done = runbook("collect-diagnostics", "--into", str(tmp_path), *lacking)
    assert done.code == 4
    assert sorted(done.data["fields"]["missing"]) == ["logs-0", "metrics-0.txt"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("drain-node", ["--worker", "decode-7"], 2),
        ("drain-node", [], 2),
        ("drain-node", ["--node", "10.9.8.7"], 2),
        ("replace-decode", ["--worker", "prefill-0"], 2),
        ("replace-prefill", ["--worker", "nobody"], 2),
        ("hung-tp-group", ["--worker", "nobody"], 2),
        ("hung-tp-group", ["--worker", "decode-0", "--watch", "0.5"], 3),  # it is well
        ("overload", ["--limit", "1"], 3),  # there is no overload
        ("overload", ["--limit", "-1"], 2),
        ("overload", ["--limit", "none"], 1),  # the router was started with a limit
        ("drain-node", ["--worker", "decode-0", "--worker", "decode-1"], 3),  # nobody would be left
        ("collect-diagnostics", ["--into", "/nonexistent"], 3),
        ("acceptance-regression", ["--min-acceptance", "2"], 2),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_changed(runbook, standing, name, arguments, code):
    before = standing()
    done = runbook(name, *arguments)
    assert done.code == code, done.stderr
    assert done.data["exit_code"] == code
    assert done.data["next"]
    assert standing() == before


def test_a_bad_address_is_a_precondition(runbook):
    for name in ("kv-leak-audit", "partition-triage", "collect-diagnostics"):
        done = runbook(name, address="127.0.0.1:1")
        assert done.code == 3
        assert done.data["next"]


def test_a_drained_worker_gets_nothing_until_it_is_put_back(runbook, client, standing):
    before = standing()
    dry = runbook("drain-node", "--worker", "decode-0", "--dry-run")
    assert dry.code == 0, dry.stderr
    assert standing() == before
    for _ in range(2):
        done = runbook("drain-node", "--worker", "decode-0")
        assert done.code == 0, done.stderr
        assert {answer(client)[1].decode_worker for _ in range(4)} == {"decode-1"}
    assert standing() != before
    for _ in range(2):
        assert runbook("drain-node", "--worker", "decode-0", "--undo").code == 0
    assert standing() == before


def test_a_drain_that_is_not_over_in_time_is_taken_back(runbook, client, standing):
    before = standing()
    stream = client.generate("import os\n", sampling=LONG)
    tokens = list(next(stream).token_ids)
    busy = {worker.state.worker_id for worker in client.status().workers if worker.num_streams}
    name = next(name for name in ("decode-0", "decode-1") if name in busy)
    done = runbook("drain-node", "--worker", name, "--timeout", "2", "--grace", "100", "--force")
    for chunk in stream:
        tokens += chunk.token_ids
    assert len(tokens) == LONG.max_tokens
    if done.code == 0:  # the stream was over before the time was
        assert runbook("drain-node", "--worker", name, "--undo").code == 0
    else:
        assert done.code == 124, done.stderr
        assert not done.data["changed"]
    assert standing() == before


def test_too_few_accepted_drafts_are_not_made_any_more(runbook, client, deployment):
    want = answer(client)[0]
    done = runbook("acceptance-regression", "--watch", "1", "--min-acceptance", "1", "--dry-run")
    assert done.code == 0, done.stderr
    assert drafts(client) == {2}
    for _ in range(2):
        done = runbook("acceptance-regression", "--watch", "1", "--min-acceptance", "1")
        assert done.code == 0, done.stderr
        assert drafts(client) == {0}
    assert answer(client)[0] == want
    set_speculation(deployment.address, 2)
    assert drafts(client) == {2}


def drafts(client):
    return {
        worker.state.speculation.num_draft_tokens
        for worker in client.inventory().workers
        if worker.state.role == "decode"
    }


def test_under_overload_the_router_holds_less_and_then_more_again(runbook, client, standing):
    before = standing()
    assert runbook("overload", "--limit", "3", "--force", "--dry-run").code == 0
    assert standing() == before
    for _ in range(2):
        done = runbook("overload", "--limit", "3", "--force")
        assert done.code == 0, done.stderr
        assert client.status().max_queue_len == 3
    assert runbook("overload", "--limit", "256").code == 0
    assert standing() == before


def test_a_decode_worker_is_replaced_under_another_life(runbook, client, standing):
    before, want = standing(), answer(client)[0]
    assert runbook("replace-decode", "--worker", "decode-1", "--dry-run").code == 0
    assert standing() == before
    for _ in range(2):
        epoch = incarnations(client)["decode-1"]
        done = runbook("replace-decode", "--worker", "decode-1")
        assert done.code == 0, done.stderr
        assert done.data["found"]["epochs"]["before"] == f"{epoch:016x}"
        assert incarnations(client)["decode-1"] != epoch
    assert {tuple(answer(client)[0]) for _ in range(4)} == {tuple(want)}


@pytest.mark.slow
def test_a_prefill_worker_is_replaced_and_no_stream_notices(runbook, client, standing):
    before, want = standing(), answer(client)[0]
    assert runbook("replace-prefill", "--worker", "prefill-1", "--dry-run").code == 0
    assert standing() == before
    load = Load(client)
    for _ in range(2):
        epoch = incarnations(client)["prefill-1"]
        done = runbook("replace-prefill", "--worker", "prefill-1")
        assert done.code == 0, done.stderr
        assert incarnations(client)["prefill-1"] != epoch
    answers, errors = load.end()
    assert not errors
    assert set(answers) == {tuple(want)}


def test_a_worker_that_hangs_is_found_and_ended(runbook, client, deployment):
    """SIGSTOP: its connections stay open, Ray notices nothing."""
    want, before = answer(client)[0], epochs(client)
    pids = deployment.worker_pids()
    os.kill(pids["decode-0"], signal.SIGSTOP)
    try:
        wait_until(lambda: "decode-0" not in incarnations(client))
        triage = runbook("partition-triage", "--rounds", "1")
        assert triage.code == 4, triage.stderr
        assert "its port answers" in triage.data["found"]["silent"]["decode-0"]
        audit = runbook("kv-leak-audit", "--watch", "2")
        assert audit.code == 4, audit.stderr
        assert audit.data["found"]["silent"] == ["decode-0"]
        assert runbook("replace-decode", "--worker", "decode-0").code == 3
        assert runbook("hung-tp-group", "--worker", "decode-0", "--watch", "1", "--dry-run").code == 0
        assert epochs(client) == before
        done = runbook("hung-tp-group", "--worker", "decode-0", "--watch", "1")
        assert done.code == 0, done.stderr
        assert list(done.data["found"]["stacks"]) == [str(pids["decode-0"])]
    finally:
        try:
            os.kill(pids["decode-0"], signal.SIGCONT)
        except ProcessLookupError:
            pass
    assert runbook("hung-tp-group", "--worker", "decode-0", "--watch", "1").code == 3, "it is well now"
    assert {tuple(answer(client)[0]) for _ in range(4)} == {tuple(want)}


@pytest.mark.slow
def test_blocks_that_wait_for_a_stopped_peer_are_found_and_gone_when_it_goes_on(runbook, client, deployment, standing):
    """A prefill worker is stopped in the middle of a push, and so may still write into the blocks it was granted."""
    before, pids = standing(), deployment.worker_pids()
    prompt = [300 + index % 97 for index in range(1500)]
    load = threading.Thread(target=lambda: list(client.generate(token_ids=prompt, sampling=SHORT)), daemon=True)
    load.start()
    wait_until(lambda: any(w.state.inventory.num_kv_receives for w in client.inventory().workers if is_decode(w)))
    prefill = [worker.state for worker in client.inventory().workers if not is_decode(worker)]
    pushing = next(state.worker_id for state in prefill if state.inventory.num_requests_held)
    os.kill(pids[pushing], signal.SIGSTOP)
    try:
        load.join(60)
        assert not load.is_alive(), "the stream moves to another pair"
        wait_until(lambda: any(w.state.inventory.num_blocks_quarantined for w in client.inventory().workers))
        found = runbook("kv-leak-audit", "--watch", "3")
        assert found.code == 1, found.stderr
        assert "quarantined blocks" in found.data["message"]
        assert "may still write" in found.data["next"]
    finally:
        os.kill(pids[pushing], signal.SIGCONT)
    assert standing() == before
    assert runbook("kv-leak-audit", "--watch", "2").code == 0


def is_decode(worker):
    return worker.state.role == "decode"


def epochs(client):
    return {worker.state.worker_id: worker.state.epoch for worker in client.status().workers}


@pytest.mark.slow
def test_a_request_that_workers_died_of_is_shown_and_taken_again(runbook, client, deployment, standing):
    """Here the deaths are the test's; the router sees no difference."""
    stream = client.generate("class Poison:\n", sampling=LONG)
    next(stream)
    died = []
    with pytest.raises(BatonError):
        for chunk in stream:
            busy = [w.state.worker_id for w in client.status().workers if w.num_streams and w.state.role == "decode"]
            if chunk.token_ids and busy and len(died) < 2 and busy[0] not in died:
                died.append(busy[0])
                deployment.kill_actor(busy[0])
    assert sorted(died) == ["decode-0", "decode-1"]
    shown = runbook("poison-request", "--watch", "1")
    assert shown.code == 0, shown.stderr
    (one,) = shown.data["found"]["quarantined"]
    assert sorted(one["workers"]) == sorted(died)
    before = standing()
    assert runbook("poison-request", "--watch", "1", "--clear", one["fingerprint"], "--dry-run").code == 0
    assert standing() == before
    assert runbook("poison-request", "--watch", "1", "--clear", one["fingerprint"]).code == 0
    again = runbook("poison-request", "--watch", "1", "--clear", one["fingerprint"])
    assert again.code == 3, "it is not refused any more"
    assert not runbook("poison-request", "--watch", "1").data["found"]["quarantined"]


def test_a_head_is_started_again_by_what_the_operator_says(runbook, deployment, standing, tmp_path, monkeypatch):
    head = deployment._ray.ray.get_runtime_context().gcs_address
    use_ray_of(deployment, monkeypatch)
    mark, before = tmp_path / "started", standing()
    given = ("--ray-address", head, "--command", f"echo again >> {mark}", "--settle-s", "1")
    dry = runbook("head-restart", *given, "--force", "--dry-run")
    assert dry.code == 0, dry.stderr
    assert not dry.data["changed"]
    assert not mark.exists()
    done = runbook("head-restart", *given)  # it answers
    assert done.code == 0, done.stderr
    assert not done.data["changed"]
    assert not mark.exists()
    done = runbook("head-restart", *given, "--force")
    assert done.code == 0, done.stderr
    assert mark.read_text() == "again\n"
    assert len(done.data["found"]["epochs"]) == CONFIG["prefill"] + CONFIG["decode"]
    assert standing() == before


def use_ray_of(deployment, monkeypatch):
    """What its operator has in the environment: token and certificate."""
    (head,) = [one for one in psutil.Process().children(recursive=True) if one.name() == "gcs_server"]
    environment = head.environ()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *ray_certificates.TLS_VARIABLES):
        monkeypatch.setenv(name, environment[name])


@pytest.mark.parametrize("lacking", ["token", "its token", "certificate", "its certificate"])
def test_a_head_that_does_not_take_the_operator_is_told_at_once(
    runbook, deployment, standing, tmp_path, monkeypatch, lacking
):
    """And nothing is started: a run that waits would wait out its time."""
    use_ray_of(deployment, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    match lacking:
        case "token":
            monkeypatch.delenv("RAY_AUTH_TOKEN")
        case "its token":
            monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
        case "certificate":
            monkeypatch.delenv("RAY_USE_TLS")
        case "its certificate":
            for name, value in ray_certificates.private_settings(tmp_path / "other", "127.0.0.1").items():
                monkeypatch.setenv(name, value)
    head = deployment._ray.ray.get_runtime_context().gcs_address
    mark, before = tmp_path / "started", standing()
    given = ("--ray-address", head, "--command", f"touch {mark}", "--force")
    done = runbook("head-restart", *given, "--timeout", "600")
    assert (done.code, done.data["error"]) == (3, "RayAccessRefused"), done.stderr
    assert not done.data["changed"] and not mark.exists()
    assert standing() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--command", " "], 2),
        (["--command", "true", "--settle-s", "-1"], 2),
        (["--command", "true", "--redis", "127.0.0.1:1"], 3),
        (["--command", "true", "--redis", "nowhere"], 3),
        (["--command", "exit 9", "--ray-address", "127.0.0.1:1"], 4),
        (["--command", "true", "--ray-address", "127.0.0.1:1", "--timeout", "20"], 124),
    ],
)
def test_a_head_that_does_not_come_is_told_by_the_exit_code(runbook, standing, monkeypatch, arguments, code):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # there is no head that could ask for a token
    before = standing()
    done = runbook("head-restart", *arguments)
    assert done.code == code, done.stderr
    assert done.data["next"]
    assert standing() == before
