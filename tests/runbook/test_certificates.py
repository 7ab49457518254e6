"""Certificates and authorities are replaced under streams, by the runbook, and put back where they will not do."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.client import Access, BatonClient
from baton.cluster.deployment import Deployment
from baton.cluster.doctor.wires import PairPath
from baton.core.clock import MonotonicClock
from baton.core.config import ServeConfig
from baton.core.errors import PreconditionUnmet
from baton.core.tls_files import TlsFiles
from baton.proto import admin_pb2
from baton.runbook import rotate_certificates
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Run
from baton.runbook.rotate_certificates import Replacement, days_left, fingerprint_of, is_trusted, pair_fits
from baton.tests.router.certificates import Authority
from baton.tests.runbook.conftest import CONFIG, RUNBOOKS, Done, Load, answer


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "one")


class TestFiles:
    pytestmark = pytest.mark.fast

    def test_a_pair_that_fits_is_trusted_by_its_own_authority_alone(self, authority, tmp_path):
        files, other = authority.files("host"), Authority(tmp_path / "two")
        pair_fits(files.cert_file, files.key_file)
        is_trusted(files.cert_file, files.key_file, files.ca_file, ["localhost"])
        with pytest.raises(PreconditionUnmet, match="not trusted"):
            is_trusted(files.cert_file, files.key_file, str(other.file), [])
        with pytest.raises(PreconditionUnmet, match="not trusted"):
            is_trusted(files.cert_file, files.key_file, files.ca_file, ["elsewhere.example"])
        with pytest.raises(PreconditionUnmet):
            pair_fits(files.cert_file, other.files("other").key_file)
        with pytest.raises(PreconditionUnmet, match="tls_cert_file"):
            pair_fits(str(tmp_path / "none"), files.key_file)

    def test_days_are_those_until_the_end(self, authority):
        assert 2.9 < days_left(authority.files("short", days=3).cert_file) < 3.1

    def test_a_replacement_keeps_what_was_and_the_mode(self, tmp_path):
        path, source = tmp_path / "key", tmp_path / "new"
        path.write_text("old")
        path.chmod(0o640)
        source.write_text("new")
        replacement = Replacement(str(path), str(source))
        replacement.undo()  # nothing was done yet
        assert path.read_text() == "old" and not replacement.is_done()
        replacement.do()
        assert path.read_text() == "new" and replacement.is_done()
        assert path.stat().st_mode & 0o777 == 0o640
        replacement.undo()
        assert path.read_text() == "old"
        assert sorted(file.name for file in tmp_path.iterdir()) == ["key", "key.before", "new"]


class Quiet(Site):
    """A deployment of which nothing is asked."""

    def status(self):
        return admin_pb2.StatusReply()


def port_of(cert_file):
    return PairPath("router", "127.0.0.1:1", True, "", fingerprint_of(cert_file))


@pytest.mark.fast
def test_the_way_back_is_a_replacement_by_what_was_kept(tmp_path):
    path, kept, source = (tmp_path / name for name in ("key", "key.before", "new"))
    path.write_text("old")
    source.write_text("new")
    Replacement(str(path), str(source)).do()
    back = Replacement(str(path), str(kept))
    assert not back.is_done()
    back.do()
    assert back.is_done()
    assert (path.read_text(), kept.read_text()) == ("old", "new")
    back.undo()
    assert (path.read_text(), kept.read_text()) == ("new", "old"), "or the old one would be nowhere"


@pytest.mark.fast
def test_a_certificate_and_its_key_go_there_and_back(authority, tmp_path, monkeypatch):
    """The ports are this test's: they show what is in the file."""
    host, new = authority.files("host"), authority.issue("new", days=30)
    monkeypatch.setenv("BATON_TLS_CA_FILE", host.ca_file)
    old = {path: Path(path).read_bytes() for path in (host.cert_file, host.key_file)}

    def rotate(cert_file, key_file):
        monkeypatch.setattr(rotate_certificates, "ports", lambda *_: [port_of(host.cert_file)])
        files = ("--cert-file", host.cert_file, "--new-cert-file", cert_file)
        files += ("--key-file", host.key_file, "--new-key-file", key_file)
        parser = argparse.ArgumentParser()
        rotate_certificates.RUNBOOK.options(parser)
        site = Quiet("nowhere", MonotonicClock(), 5.0)
        steps = rotate_certificates.RUNBOOK.steps(site, parser.parse_args([*files, "--min-days", "1"]))
        report = Run(MonotonicClock(), dry=False).carry_out([step for step in steps if "canaries" not in step.name])
        return report, site.found

    report, _ = rotate(new.cert_file, new.key_file)
    assert report.error is None
    assert Path(host.cert_file).read_bytes() == Path(new.cert_file).read_bytes()
    report, found = rotate(f"{host.cert_file}.before", f"{host.key_file}.before")
    assert report.error is None and report.is_changed
    assert {path: Path(path).read_bytes() for path in old} == old
    assert found["fingerprint"] == fingerprint_of(host.cert_file)
    assert Path(f"{host.key_file}.before").read_bytes() == Path(new.key_file).read_bytes()
    report, _ = rotate(f"{host.cert_file}.before", str(tmp_path / "nowhere"))
    assert (report.exit_code, report.next) == (3, "correct the path that is named")


class Secured:
    """A deployment with TLS, keys and an operators' port, and the runbook as an operator runs it."""

    def __init__(self, folder):
        self.one, self.two = Authority(folder / "one"), Authority(folder / "two")
        self.folder = folder
        self.host = self.one.files("host")
        self.operator = self.one.files("operator")
        self.keys = {name: self._key(name) for name in ("client", "operator")}
        self.config = {
            "admin_port": 0,
            "transport": "zmq",
            "kv_plaintext": True,
            "tls_cert_file": self.host.cert_file,
            "tls_key_file": self.host.key_file,
            "tls_ca_file": self.host.ca_file,
            "api_keys_file": str(folder / "clients"),
            "admin_keys_file": str(folder / "operators"),
        }

    def _key(self, name):
        command = [sys.executable, "-P", "-m", "baton.cluster", "keys", "create", name, "--tenant", "acme", "--json"]
        command += ["--file", str(self.folder / f"{name}s")]
        key = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["key"]
        path = self.folder / f"{name}.apikey"
        path.write_text(key)
        return path

    def access(self):
        return Access(tls=TlsFiles(ca_file=str(self.one.file)), api_key=self.keys["client"].read_text())

    def run(self, deployment, *arguments):
        script = str(RUNBOOKS / "rotate_certificates.py")
        command = [sys.executable, "-P", script, "--json", "--address", deployment.admin_address]
        command += ["--client-address", deployment.address, "--client-api-key-file", str(self.keys["client"])]
        environment = os.environ | {
            "BATON_TLS_CA_FILE": str(self.one.file),
            "BATON_TLS_CERT_FILE": self.operator.cert_file,
            "BATON_TLS_KEY_FILE": self.operator.key_file,
            "BATON_API_KEY_FILE": str(self.keys["operator"]),
        }
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, env=environment)
        assert done.stdout, done.stderr
        return Done(done.returncode, json.loads(done.stdout), done.stderr)

    def pair(self, new):
        return [
            *("--cert-file", self.host.cert_file, "--new-cert-file", new.cert_file),
            *("--key-file", self.host.key_file, "--new-key-file", new.key_file),
        ]


@pytest.mark.ray
@pytest.mark.slow
def test_certificates_and_authority_change_under_streams(tmp_path):
    secured = Secured(tmp_path)
    one, two, host = secured.one, secured.two, secured.host
    with Deployment(ServeConfig.from_mapping(CONFIG | secured.config)) as deployment:

        def rotate(*arguments):
            return secured.run(deployment, *arguments)

        with BatonClient(deployment.address, access=secured.access()) as client:
            epochs = {name: worker["epoch"] for name, worker in deployment.workers.items()}
            want, load = tuple(answer(client)[0]), Load(client)
            old = Path(host.cert_file).read_bytes()
            new = one.issue("new")
            done = rotate(*secured.pair(new), "--dry-run")
            assert done.code == 0, done.data
            assert Path(host.cert_file).read_bytes() == old
            for bad in (two.issue("foreign"), one.issue("late", days=2), TlsFiles(cert_file="/none", key_file="/none")):
                assert rotate(*secured.pair(bad)).code == 3
                assert Path(host.cert_file).read_bytes() == old
            for _ in range(2):
                done = rotate(*secured.pair(new))
                assert done.code == 0, done.data
                assert Path(host.cert_file).read_bytes() == Path(new.cert_file).read_bytes()
            assert not done.data["changed"]
            assert done.data["found"]["fingerprint"] == fingerprint_of(new.cert_file)
            assert len(done.data["found"]["ports"]) == 5, "the operators' port and four workers'"

            both, alone = tmp_path / "both.pem", tmp_path / "alone.pem"
            both.write_bytes(one.file.read_bytes() + two.file.read_bytes())
            alone.write_bytes(two.file.read_bytes())
            authorities = ("--ca-file", host.ca_file, "--new-ca-file")
            assert rotate(*authorities, str(alone)).code == 3, "ports show the old authority's"
            done = rotate(*authorities, str(both))
            assert done.code == 0, done.data
            done = rotate(*secured.pair(two.issue("foreign")))
            assert done.code == 0, done.data
            answers, errors = load.end()
            assert not errors
            assert set(answers) == {want}
            status = deployment.status()
            assert {worker["state"]["worker_id"] for worker in status["workers"] if worker["alive"]} == set(epochs)
            assert all(f"{worker['num_epochs']}" == "1" for worker in status["workers"])
        for arguments in ([], ["--cert-file", "x"], secured.pair(new)[:4]):
            assert rotate(*arguments).code in (2, 3)
