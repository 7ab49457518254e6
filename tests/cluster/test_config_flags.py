"""The flags of `baton serve` and its help: all of them as `ServeConfig` declares its keys."""

import itertools
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError
from typer.main import get_command
from typer.testing import CliRunner

from baton.cluster import cli, resolve
from baton.cluster.commands import serve
from baton.cluster.outcome import ExitCode
from baton.core.config import ServeConfig
from baton.core.config_key import keys_of

pytestmark = pytest.mark.fast

KEYS = keys_of(ServeConfig)


def parameters(command):
    """Of a command, by name; without --help."""
    made = get_command(cli.app).commands[command]
    flags = {flag.name: flag for flag in made.get_params(typer.Context(made))}
    return {name: flag for name, flag in flags.items() if name != "help"}


def test_the_flags_are_the_keys_of_the_configuration_in_its_order():
    assert list(KEYS) == list(ServeConfig.model_fields)
    assert list(parameters("serve")) == ["config", *KEYS, "json"]


def test_a_flag_is_what_its_key_declares():
    flags = parameters("serve")
    for name, key in KEYS.items():
        flag = flags[name]
        assert flag.opts == [key.flag]
        assert flag.secondary_opts == ([f"--no-{key.flag[2:]}"] if key.kind is bool else []), name
        assert flag.help.replace("\\[", "[") == key.help
        assert flag.rich_help_panel == key.panel
        assert flag.metavar == (f"<{key.metavar}>" if key.metavar else None)
        assert flag.default is None


def test_a_panel_is_in_one_piece():
    panels = [panel for panel, _ in itertools.groupby(key.panel for key in KEYS.values())]
    assert len(panels) == len(set(panels))


def test_the_help_shows_every_flag_its_meaning_and_its_default():
    result = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "240"})
    assert result.exit_code == 0
    shown = {
        line.split()[1]: " ".join(line.strip("│ \n").split()) for line in result.output.splitlines() if "--" in line
    }
    for key in KEYS.values():
        assert shown[key.flag].endswith(" ".join(key.help.split())), key.name
        assert f"<{key.metavar}>" in shown[key.flag] or not key.metavar


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.choices])
def test_what_is_named_as_a_choice_is_one_and_nothing_else_is(name):
    def check(text):
        ServeConfig.model_validate({name: KEYS[name].kind(text)})

    for choice in KEYS[name].choices:
        check(choice)
    with pytest.raises(ValidationError):
        check("3" if KEYS[name].kind is int else "pigeon")


def test_a_default_that_is_shown_as_it_is_typed_is_the_one_that_holds():
    checked = 0
    for name, key in KEYS.items():
        own = ServeConfig.model_fields[name].default
        if own in (None, "", ()):
            continue
        values = {"on": True, "off": False} if key.kind is bool else {key.default: key.kind(key.default)}
        assert getattr(ServeConfig.model_validate({name: values[key.default]}), name) == own, name
        checked += 1
    assert checked > 40


def test_a_command_gets_every_flag_that_is_given_and_none_for_the_others(monkeypatch):
    told = []
    monkeypatch.setattr(resolve, "read_config", lambda path, flags: told.append((path, flags)))
    monkeypatch.setattr(serve, "serve", lambda config, output: ExitCode.OK)
    given, arguments = {}, []
    for name, key in KEYS.items():
        if key.kind is bool:
            given[name] = key.default == "off"
            arguments += [key.flag if given[name] else f"--no-{key.flag[2:]}"]
        else:
            value = {int: 7, float: 0.5, str: "seven", list[str]: "seven"}[key.kind]
            given[name] = [value] if key.kind == list[str] else value
            arguments += [key.flag, str(value)]
    assert CliRunner().invoke(cli.app, ["serve", *arguments, "--config", "x.yaml"]).exit_code == 0
    assert told.pop() == (Path("x.yaml"), given)
    assert CliRunner().invoke(cli.app, ["serve"]).exit_code == 0
    assert told.pop() == (None, dict.fromkeys(KEYS))


def test_flags_of_other_commands_say_the_same():
    for command, condition in (("check", ""), ("generate", "with --local: ")):
        common = {name: flag for name, flag in parameters(command).items() if name in KEYS and flag.opts[0][:2] == "--"}
        own = {name for name in common if name.startswith("tls_")}  # of the client
        assert len(common.keys() - own) > 9
        for name in common.keys() - own:
            assert common[name].help.replace("\\[", "[") == condition + KEYS[name].help
