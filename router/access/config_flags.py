"""The router's flags that are keys of `ServeConfig`: made from their declarations there, and written for a router."""

import argparse
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from baton.core.config import ServeConfig
from baton.core.config_key import keys_of

KEYS = {name: key for name, key in keys_of(ServeConfig).items() if key.is_for_router}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The same names, defaults and bounds as `baton serve` has."""
    for name, key in KEYS.items():
        default = ServeConfig.model_fields[name].default
        if key.kind is bool:
            parser.add_argument(key.flag, action=argparse.BooleanOptionalAction, default=default, help=key.help)
        else:
            metavar = key.metavar or None
            parser.add_argument(key.flag, type=_reader(name), default=default, metavar=metavar, help=key.help)


def flags_of(config: ServeConfig) -> list[str]:
    """The flags of a router that is started for this configuration."""
    flags: list[str] = []
    for name, key in KEYS.items():
        value = getattr(config, name)
        if key.kind is bool:
            flags.append(key.flag if value else f"--no-{key.flag[2:]}")
        elif value not in (None, ""):
            flags += [key.flag, str(value)]
    return flags


def _reader(name: str) -> Callable[[str], Any]:
    """What argparse reads a value with; it words the refusal."""

    def read(text: str) -> Any:
        try:
            return getattr(ServeConfig.model_validate_strings({name: text}), name)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(error.errors()[0]["msg"]) from error

    return read
