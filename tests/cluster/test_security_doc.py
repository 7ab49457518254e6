"""docs/security.md and docs/security-setup.md: commands do what is said of them, flags and variables exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.client import access
from baton.cluster import flags as access_flags
from baton.cluster.commands import serve
from baton.cluster.outcome import Output
from baton.core import inside
from baton.core.config import ServeConfig
from baton.core.tls_files import TlsFiles, TlsWatch, server_context
from baton.router.access.api_keys import digest_of, read_keys
from baton.tests.cluster.test_cli import flags_of
from baton.tests.core.test_tls_files import Echo, ask

pytestmark = pytest.mark.fast

DOCS = Path(__file__).parents[2] / "docs"
SETUP = (DOCS / "security-setup.md").read_text()
TEXT = (DOCS / "security.md").read_text() + SETUP
BLOCKS = re.findall(r"```sh\n(.*?)```", SETUP, re.DOTALL)
COMMON = {"--tls-ca-file", "--tls-cert-file", "--tls-key-file", "--tls-server-name", "--api-key-file", "--address"}


def run(block, folder):
    baton = f"baton() {{ '{sys.executable}' -P -m baton.cluster \"$@\"; }}\n"
    done = subprocess.run(
        ["bash", "-ec", baton + block], cwd=folder, capture_output=True, text=True, timeout=60, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_certificates_are_good_both_ways(tmp_path):
    run(BLOCKS[0], tmp_path)
    host, operator = (
        TlsFiles(
            cert_file=str(tmp_path / f"{name}.pem"),
            key_file=str(tmp_path / f"{name}.key"),
            ca_file=str(tmp_path / "ca.pem"),
        )
        for name in ("host", "operator")
    )
    echo = Echo(server_context(TlsWatch(host)))
    try:
        assert ask(echo.port, host.ca_file, operator) == b"hello\n"
        assert ask(echo.port, host.ca_file, host) == b"hello\n"
    finally:
        echo.close()
    assert os.stat(host.key_file).st_mode & 0o077 == 0


@pytest.mark.long
def test_the_keys_are_made_listed_and_revoked(tmp_path):
    assert run(BLOCKS[1], tmp_path).splitlines()[1].split()[:2] == ["ada", "acme"]
    for name, holders in (("ada", "clients"), ("oncall", "operators")):
        (entry,) = read_keys(tmp_path / f"{holders}.keys")
        kept = tmp_path / f"{name}.key"
        assert (entry.name, entry.sha256) == (name, digest_of(kept.read_text().strip()))
        assert kept.stat().st_mode & 0o077 == 0
    (revoke,) = re.findall(r"`(baton keys revoke [^`]+)`", SETUP)
    run(revoke, tmp_path)
    assert not read_keys(tmp_path / "clients.keys")


@pytest.mark.long
def test_the_files_that_commands_name_were_made_by_those_before(tmp_path):
    for block in BLOCKS[:2]:
        run(block, tmp_path)
    named = set(re.findall(r"\b[a-z]+\.(?:pem|keys?)\b", "".join(BLOCKS[2:])))
    assert {"host.pem", "ada.key", "operators.keys"} <= named
    assert named <= {path.name for path in tmp_path.iterdir()}
    used = set(re.findall(r"\$([A-Z_]+)", "".join(BLOCKS)))
    assert not used, "variables that no command sets"


@pytest.mark.long
def test_the_recipe_for_several_hosts_names_files_that_the_setup_makes(tmp_path):
    for block in BLOCKS[:2]:
        run(block, tmp_path)
    recipe = (DOCS / "several-hosts.md").read_text()
    secrets = set(re.findall(r"secrets/([a-z.]+)", recipe))
    assert secrets <= {path.name for path in tmp_path.iterdir()}
    assert {"host.pem", "host.key", "ca.pem", "clients.keys", "operators.keys"} <= secrets
    copied = set(re.findall(r"~/.baton_tls/([a-z.]+)", recipe)) | set(re.findall(r"~/([a-z]+\.keys)", recipe))
    assert len(copied) == 5 and copied <= secrets
    assert "DNS.1 = baton.internal" in SETUP and "--tls-server-name baton.internal" in recipe


@pytest.mark.long
def test_every_flag_and_variable_exists():
    flags = set(re.findall(r"--[a-z][a-z-]+[a-z]", TEXT))
    known = {f"--{name.replace('_', '-')}" for name in ServeConfig.model_fields} | COMMON
    known |= {"--tenant", "--expires-days", "--max-priority", "--file", "--prompt", "--json"}
    assert flags <= known
    for command in ("generate", "status", "doctor", "speculation"):
        assert flags_of(command) >= COMMON
    variables = set(re.findall(r"BATON_[A-Z_]+", TEXT))
    assert variables == {*access.VARIABLES.values(), access.KEY_VARIABLE, inside.ENVIRONMENT}
    assert access_flags.KEY_VARIABLE == access.KEY_VARIABLE
    assert {f"BATON_{name.upper()}" for name in access_flags._ACCESS} == {*access.VARIABLES.values()}


def announced(capsys, **config):
    """The commands that `baton serve` tells its operator to try, as arguments."""
    config = ServeConfig(http_port=8000, **config)
    at = SimpleNamespace(
        config=config,
        address="127.0.0.1:50051",
        admin_address="127.0.0.1:50052",
        workers={},
        http_url="https://127.0.0.1:8000" if config.tls.is_on else "http://127.0.0.1:8000",
        metrics_url="",
    )
    serve._announce(at, Output(as_json=False), "tiny")
    shown = capsys.readouterr().out.splitlines()
    tried = [shlex.split(line.removeprefix("try: ")) for line in shown if line.startswith("try: ")]
    return {arguments[0]: set(arguments[1:]) for arguments in tried}


TLS = {"tls_cert_file": "host.pem", "tls_key_file": "host.key", "tls_ca_file": "ca.pem", "transport": "grpc"}


def test_what_serve_says_to_try_gets_in(capsys):
    plain = announced(capsys)
    assert not plain["baton"] & COMMON - {"--address"}
    assert not plain["curl"] & {"--cacert", "--cert"}
    keys = announced(capsys, **TLS, admin_port=50052, api_keys_file="clients.keys", admin_keys_file="operators.keys")
    assert {"--tls-ca-file", "ca.pem", "--api-key-file"} <= keys["baton"]
    assert {"--cacert", "ca.pem"} <= keys["curl"]
    assert not keys["baton"] & {"--tls-cert-file"} and not keys["curl"] & {"--cert"}
    for asked in ({}, {"admin_port": 50052, "tls_client_ca_file": "ca.pem"}):  # clients show certificates
        shown = announced(capsys, **TLS, **asked)
        assert {"--tls-cert-file", "host.pem", "--tls-key-file", "host.key", "--tls-ca-file"} <= shown["baton"]
        assert {"--cert", "host.pem", "--key", "host.key"} <= shown["curl"]
    shown = announced(capsys, **TLS, admin_port=50052, tls_client_ca_file="clients.pem")  # another CA
    assert {"--tls-cert-file", "CLIENT_CERT_FILE", "--tls-key-file", "CLIENT_KEY_FILE"} <= shown["baton"]
    assert {"--cert", "CLIENT_CERT_FILE", "--key", "CLIENT_KEY_FILE"} <= shown["curl"]
    assert not {"host.pem", "host.key"} & (shown["baton"] | shown["curl"])
    shown = announced(capsys, **TLS, tls_server_name="baton.internal")  # the certificate names no address
    assert {"--tls-server-name", "baton.internal", "127.0.0.1:50051"} <= shown["baton"]
    assert {"--connect-to", "baton.internal:8000:127.0.0.1:8000"} <= shown["curl"]
    assert "https://baton.internal:8000/v1/completions" in shown["curl"]
    assert "--tls-server-name" not in keys["baton"] and "--connect-to" not in keys["curl"]
    assert {word for word in keys["baton"] | shown["baton"] if word.startswith("--")} <= set(flags_of("generate"))
