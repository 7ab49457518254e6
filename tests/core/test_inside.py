"""Proofs of calls: who knows the secret gets in, once, where it was meant; nobody else does."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import inside
from baton.core.errors import ConfigInvalid, Unauthenticated
from baton.core.inside import (
    ROUTER,
    VALID_S,
    Caller,
    DeploymentSecret,
    WorkerIdentity,
    incarnation_name,
    worker_name,
)

pytestmark = pytest.mark.fast

SECRET = DeploymentSecret(b"s" * 32)
PREFILL, DECODE = worker_name("prefill", "prefill-0"), worker_name("decode", "decode-0")
METHOD = "/baton.v1.Prefill/Run"
CALLEE = incarnation_name(PREFILL, 7)
BEAT = "/baton.v1.Membership/Heartbeat"


def worker(secret=SECRET, now_s=lambda: 1000.0, epoch=7):
    key = secret.worker_key(PREFILL)
    return WorkerIdentity(role="prefill", worker_id="prefill-0", epoch=epoch, key=key).verifier(now_s)


def router_proof(method=METHOD, callee=CALLEE, now_s=1000.0, nonce="n", secret=SECRET):
    return Caller(ROUTER, secret.worker_key(PREFILL)).prove(method, callee, now_s, nonce)


def reason(verifier, header, method=METHOD):
    with pytest.raises(Unauthenticated) as refused:
        verifier.verify(method, header)
    return refused.value.fields["reason"]


def test_the_router_gets_in_once_and_its_proof_is_good_for_nothing_else():
    verifier = worker()
    assert verifier.verify(METHOD, router_proof()) == ROUTER
    assert reason(verifier, router_proof()) == "replayed"
    assert reason(verifier, router_proof(nonce="2"), "/baton.v1.Admin/Restart") == "unknown"
    assert reason(worker(epoch=8), router_proof()) == "callee"
    assert reason(worker(secret=DeploymentSecret(b"o" * 32)), router_proof()) == "unknown"
    other = WorkerIdentity(role="decode", worker_id="decode-0", epoch=7, key=SECRET.worker_key(DECODE))
    assert reason(other.verifier(lambda: 1000.0), router_proof()) == "unknown", "of another worker"
    assert reason(verifier, None) == "missing"


def test_no_worker_has_the_key_of_what_it_keeps_for_the_router():
    given = {SECRET.kv_key(), SECRET.worker_key(PREFILL), SECRET.worker_key(DECODE)}
    assert SECRET.desired_state_key() == DeploymentSecret.of_text(SECRET.text).desired_state_key()
    assert SECRET.desired_state_key() not in given


def test_time_ends_it():
    for now_s in (1000.0 - VALID_S - 1, 1000.0 + VALID_S + 1):
        assert reason(worker(now_s=lambda now_s=now_s: now_s), router_proof()) == "stale"
    for now_s in (1000.0 - VALID_S + 1, 1000.0 + VALID_S - 1):
        assert worker(now_s=lambda now_s=now_s: now_s).verify(METHOD, router_proof()) == ROUTER


def test_a_worker_speaks_for_itself_alone():
    router = SECRET.router_verifier(5, lambda: 1000.0)
    mine = SECRET.worker_key(DECODE)
    assert router.verify(BEAT, Caller(DECODE, mine).prove(BEAT, router.callee, 1000.0, "1")) == DECODE
    for name in (PREFILL, ROUTER, worker_name("prefill", "decode-0"), ""):
        assert reason(router, Caller(name, mine).prove(BEAT, router.callee, 1000.0, "2"), BEAT) == "unknown"
    # Nor is what it proves to the router of use at itself, which would be a reflection.
    own = WorkerIdentity(role="decode", worker_id="decode-0", epoch=7, key=mine).verifier(lambda: 1000.0)
    assert reason(own, Caller(DECODE, mine).prove(BEAT, own.callee, 1000.0, "3"), BEAT) == "unknown"


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
def test_a_proof_that_was_touched_is_none(at, new):
    good = router_proof().encode()
    at %= len(good)
    bad = good[:at] + new + good[at + len(new) :]
    verifier = worker()
    if bad != good:
        assert reason(verifier, bad.decode("latin-1")) in ("malformed", "unknown", "callee", "stale")
    assert verifier.verify(METHOD, good.decode()) == ROUTER, "what was refused used nothing up"


@given(st.text(max_size=80))
def test_any_text_is_refused(text):
    assert reason(worker(), text) in ("malformed", "unknown")


def test_a_proof_is_good_once_though_the_time_of_day_steps_forward_and_back():
    now = [1000.0]
    verifier = worker(now_s=lambda: now[0])
    assert verifier.verify(METHOD, router_proof(now_s=1000.0, nonce="first")) == ROUTER
    now[0] += 2 * VALID_S + 1
    assert verifier.verify(METHOD, router_proof(now_s=now[0], nonce="second")) == ROUTER
    now[0] -= 2 * VALID_S + 1
    assert reason(verifier, router_proof(now_s=1000.0, nonce="first")) == "stale"
    assert verifier.verify(METHOD, router_proof(now_s=1000.1, nonce="third")) == ROUTER, "what is sent now is not"


def test_what_is_forgotten_of_numbers_used_is_refused_as_old(monkeypatch):
    monkeypatch.setattr(inside, "MAX_NONCES", 4)
    verifier = worker()
    for number in range(8):
        verifier.verify(METHOD, router_proof(now_s=1000.0 + number / 10, nonce=str(number)))
    assert len(verifier._nonces) == 4
    for number in range(8):
        used = router_proof(now_s=1000.0 + number / 10, nonce=str(number))
        assert reason(verifier, used) == ("stale" if number < 4 else "replayed")


def test_a_secret_is_not_shown_and_comes_whole(tmp_path, monkeypatch):
    assert SECRET.text not in repr(SECRET) and str(SECRET.value) not in repr(SECRET)
    identity = WorkerIdentity(role="prefill", worker_id="p", epoch=1, key=b"12345678")
    assert "12345678" not in repr(identity) + repr(identity.caller)
    for bad in ("", "zz", "ab" * 31, "secret " * 9):
        with pytest.raises(ConfigInvalid) as refused:
            DeploymentSecret.of_text(bad)
        assert not bad or bad not in str(refused.value)
    monkeypatch.setenv(inside.ENVIRONMENT, SECRET.text)
    assert DeploymentSecret.of_process() == SECRET
    monkeypatch.delenv(inside.ENVIRONMENT)
    assert DeploymentSecret.given() is None
    assert DeploymentSecret.of_process() == DeploymentSecret.of_process() != SECRET


def test_a_file_is_made_for_its_owner_and_refused_to_others(tmp_path):
    path = tmp_path / "secret"
    made = DeploymentSecret.of_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert DeploymentSecret.of_file(path) == made
    path.chmod(0o640)
    with pytest.raises(ConfigInvalid, match="others may read it"):
        DeploymentSecret.of_file(path)
    with pytest.raises(ConfigInvalid):
        DeploymentSecret.of_file(tmp_path / "no" / "folder")
