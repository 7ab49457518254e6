"""The hand-off under keys and certificates that change: it goes on, and what was good before is good no more."""

import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import zmq.auth

from baton.core.config import KVTransferConfig
from baton.kvtransfer.transports import zmq_sockets as zmq_curve
from baton.kvtransfer.transports.over_grpc import GrpcTransport
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.tests.kvtransfer.transport_ends import Ends, make_certificates, make_curve_key

pytestmark = pytest.mark.fast

LOOK_S = 0.6  # after so long a change has been seen by whoever looked


def repeat_until_heard(ends, message, timeout_s=10.0):
    """As the protocol does: what is lost on the way is said again."""
    end_s = time.monotonic() + timeout_s
    while message not in [bytes(item.control) for item in ends.at_d if item.control]:
        assert time.monotonic() < end_s, (ends.p.counts, ends.d.counts)
        ends.p.send(ends.d.address, message)
        again_s = time.monotonic() + 0.2
        while time.monotonic() < again_s:
            ends.pump()


def pump_for(ends, seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        ends.pump()


def test_a_curve_key_that_is_replaced_while_it_is_read_is_seen(tmp_path, monkeypatch):
    path, new = (Path(make_curve_key(tmp_path, name)["curve_key_file"]) for name in ("one", "two"))
    load = zmq.auth.load_certificate

    def load_late(where):
        found = load(where)
        if new.exists():
            os.replace(new, path)
        return found

    monkeypatch.setattr(zmq.auth, "load_certificate", load_late)
    monkeypatch.setattr(zmq_curve, "CHECK_S", 0.0)
    keys = zmq_curve.CurveKeys(path)
    assert keys.renew()
    assert not keys.renew()


@pytest.mark.long
def test_a_new_curve_key_is_followed_by_both_ends(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ends = Ends("zmq-curve", tmp_path).meet()
    key = ends.config.curve_key_file
    old = str(tmp_path / "old")
    shutil.copy(key, old)
    new = make_curve_key(tmp_path, "new")["curve_key_file"]
    time.sleep(LOOK_S)
    os.replace(new, key)
    repeat_until_heard(ends, b"with the new key")
    ends.reply(b"both ways")
    assert "connections are made again" in caplog.text
    stranger = ZmqTransport(config=KVTransferConfig(curve_key_file=old))
    stranger.send(ends.d.address, b"let me in")
    ends.at_d.clear()
    pump_for(ends, LOOK_S)
    assert ends.at_d == []
    late = ZmqTransport(config=KVTransferConfig(curve_key_file=key))  # one that starts after the change
    late.send(ends.d.address, b"hello")
    ends.pump_until(lambda: ends.at_d)
    # Half a file is not taken.
    open(key, "w").close()
    pump_for(ends, LOOK_S)
    ends.say(b"as before")
    assert "stays in use" in caplog.text
    for transport in (stranger, late):
        transport.close()
    ends.close()


@pytest.mark.long
def test_new_certificates_serve_streams_that_are_made_anew(tmp_path):
    ends = Ends("grpc-mtls", tmp_path).meet()
    config = ends.config
    ends.say(b"before")
    # Another authority altogether, in all files at once; the stream that is open does not end for it.
    fresh = make_certificates(_folder(tmp_path / "fresh"))
    for name in ("tls_ca_file", "tls_key_file", "tls_cert_file"):
        os.replace(fresh[name], getattr(config, name))
    pump_for(ends, LOOK_S)
    ends.say(b"still")
    assert ends.p.counts.data_paths_failed == 0
    late = GrpcTransport(config=config)
    late.send(ends.d.address, b"hello")
    ends.pump_until(lambda: bytes(ends.at_d[-1].control) == b"hello")
    late.close()
    # When the other side comes again, both ends use what is in the files now.
    address = ends.d.address
    ends.d.close()
    ends.d = ends.listen(address)
    repeat_until_heard(ends, b"after")
    assert ends.p.counts.data_paths_failed > 0
    ends.close()


def _folder(path):
    path.mkdir()
    return path
