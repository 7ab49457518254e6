"""`baton keys`: a key is shown once, the file never holds it, and a slip changes nothing."""

import contextlib
import json
import os
import sys
import threading
from functools import partial

import pytest
from typer.testing import CliRunner

from baton.cluster import cli
from baton.cluster.commands.keys import create
from baton.cluster.outcome import ExitCode, run_command
from baton.router.access.api_keys import ApiKeys, digest_of, read_keys
from baton.tests.cluster.test_cli import flags_of

pytestmark = pytest.mark.fast


def baton(*arguments):
    result = CliRunner().invoke(cli.app, ["keys", *map(str, arguments), "--json"], standalone_mode=False)
    assert result.exception is None, result.exception
    return int(result.return_value or 0), json.loads(result.stdout), result.stderr


def test_a_key_from_its_making_to_its_end(tmp_path):
    file = tmp_path / "keys"
    code, made, said = baton("create", "ada", "--file", file, "--tenant", "acme", "--expires-days", 1)
    assert code == 0 and made["name"] == "ada" and made["key"] not in file.read_text() + said
    assert digest_of(made["key"]) in file.read_text() and os.stat(file).st_mode & 0o777 == 0o600
    _, other, _ = baton("create", "bob", "--file", file, "--tenant", "bolts")
    keys = ApiKeys(file)
    assert keys.authenticate(f"Bearer {made['key']}").tenant == "acme"
    assert keys.authenticate(f"Bearer {other['key']}").name == "bob"
    code, listed, _ = baton("list", "--file", file)
    assert code == 0 and [(row["name"], row["is_expired"]) for row in listed["keys"]] == [
        ("ada", False),
        ("bob", False),
    ]
    assert digest_of(made["key"]) not in json.dumps(listed)
    assert baton("revoke", "ada", "--file", file)[0] == 0
    assert [entry.name for entry in read_keys(file)] == ["bob"]
    assert os.stat(file).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("stdout", ["/dev/full", None])
def test_a_key_that_could_not_be_shown_is_not_in_the_file(tmp_path, monkeypatch, stdout):
    file = tmp_path / "keys"
    baton("create", "ada", "--file", file, "--tenant", "acme")
    with open(stdout or os.devnull, "w") as out:
        monkeypatch.setattr(sys, "stdout", out if stdout else None)
        assert run_command(False, partial(create, file=file, name="bob", tenant="acme", days=None)) == ExitCode.FAILED
        assert [entry.name for entry in read_keys(file)] == ["ada"]
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            out.close()


@pytest.mark.parametrize("command", ["create", "list", "revoke"])
def test_every_command_has_json_and_a_file(command):
    assert {"--json", "--file"} <= flags_of(f"keys {command}")


@pytest.mark.long
def test_what_is_wrong_changes_nothing(tmp_path):
    file = tmp_path / "keys"
    assert baton("list", "--file", file)[0] == 2
    assert baton("revoke", "ada", "--file", file)[0] == 2
    baton("create", "ada", "--file", file, "--tenant", "acme")
    before = file.read_text()
    for arguments in (
        ("create", "ada", "--tenant", "acme"),
        ("create", "", "--tenant", "acme"),
        ("create", "two\nlines", "--tenant", "acme"),
        ("create", "bob", "--tenant", ""),
        ("create", "bob", "--tenant", "x", "--expires-days", 0),
        ("create", "bob", "--tenant", "x", "--expires-days", "nan"),
        ("revoke", "bob"),
    ):
        code, data, _ = baton(*arguments, "--file", file)
        assert (code, data["error"]) == (2, "ConfigInvalid"), arguments
        assert file.read_text() == before
    assert baton("create", "a", "--tenant", "x", "--file", tmp_path / "no" / "folder")[0] == 2
    file.write_text("{broken")
    assert baton("create", "bob", "--tenant", "x", "--file", file)[0] == 2
    assert file.read_text() == "{broken"


def test_an_expired_key_is_seen_in_the_list(tmp_path):
    file = tmp_path / "keys"
    line = {"name": "old", "tenant": "a", "sha256": "a" * 64, "expires": "2020-01-01T00:00:00+00:00"}
    file.write_text(json.dumps(line))
    code, listed, _ = baton("list", "--file", file)
    assert code == 4 and listed["keys"][0]["is_expired"]


def test_two_at_once_lose_nothing(tmp_path):
    from baton.cluster.commands import keys
    from baton.cluster.outcome import Output

    file = tmp_path / "keys"
    threads = [
        threading.Thread(
            target=keys.create,
            args=(Output(True),),
            kwargs={"file": file, "name": f"k{i}", "tenant": "t", "days": None},
        )
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.name for entry in read_keys(file)} == {f"k{i}" for i in range(8)}
