"""docs/security.md and docs/security-setup.md: commands do what is said of them, flags and variables exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.client import access
from baton.cluster import flags as access_flags
from baton.core import inside
from baton.core.config import ServeConfig
from baton.core.tls_files import TlsFiles, TlsWatch, server_context
from baton.router.access.api_keys import read_keys
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
    assert "baton-" in run(BLOCKS[1], tmp_path)
    assert [entry.name for entry in read_keys(tmp_path / "clients.keys")] == []
    assert [entry.tenant for entry in read_keys(tmp_path / "operators.keys")] == ["operators"]


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
