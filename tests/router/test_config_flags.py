"""The router's flags: what a configuration says reaches it, with the defaults and the bounds of `ServeConfig`."""

import pytest

from baton.core.config import ServeConfig
from baton.router.__main__ import parse
from baton.router.access.flags import KEYS, flags_of

pytestmark = pytest.mark.fast
OWN = ["--model-name", "m", "--model-path", "p"]


def values_of(options):
    return {name: getattr(options, name) for name in KEYS}


def test_without_flags_the_defaults_of_the_configuration_hold():
    assert values_of(parse(OWN)) == values_of(ServeConfig())
    assert values_of(parse([*OWN, *flags_of(ServeConfig())])) == values_of(ServeConfig())


def test_every_value_of_a_configuration_reaches_the_router():
    values = {}
    for name, key in KEYS.items():
        given = {bool: key.default == "off", int: 7, float: 0.5, str: "100%"}[key.kind]
        values[name] = key.choices[-1] if key.choices else given
    config = ServeConfig.model_validate(values)
    differing = {name for name in KEYS if getattr(config, name) != getattr(ServeConfig(), name)}
    assert differing == set(KEYS)
    assert values_of(parse([*OWN, *flags_of(config)])) == values


def test_a_zero_reaches_the_router():
    zeros = {name: 0 for name in ("http_port", "metrics_port", "canary_idle_s", "drain_grace_s", "quarantine_deaths")}
    options = parse([*OWN, *flags_of(ServeConfig.model_validate(zeros))])
    assert {name: getattr(options, name) for name in zeros} == zeros


def test_a_value_that_the_configuration_refuses_is_refused(capsys):
    for flags, why in (
        (["--max-migrations", "9"], "less than or equal to 8"),
        (["--routing", "pigeon"], "'prefix', 'least_cost' or 'round_robin'"),
        (["--max-wait-s", "0"], "greater than 0"),
        (["--max-queue-len", "many"], "valid integer"),
        (["--quarantine-deaths", "1"], "one death says nothing"),
    ):
        with pytest.raises(SystemExit):
            parse([*OWN, *flags])
        assert f"argument {flags[0]}: " in (said := capsys.readouterr().err)
        assert why in said


def test_the_help_says_what_serve_says(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        parse(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for key in KEYS.values():
        assert key.flag in said
        assert " ".join(key.text.split()) in said, key.name
