"""Declares the keys of `ServeConfig`: each once, with everything that its flag, the help and the docs say about it.

`config_key` declares a key; `keys_of` reads the declarations. `cluster.flags` turns them into flags, and
`scripts/flags_doc.py` into the tables of docs/flags.md.
"""

import types
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key, as an operator sees it.

    Attributes:
        kind: type that a flag's value is parsed as, before the configuration checks it.
        choices: the possible values, if they are a few names or numbers.
        text: what the key does.
        default: what applies if the key is not given; empty if nothing does.
        metavar: placeholder of the value in help, such as its unit; empty: the kind's name.
        vllm: vLLM's name of the same setting; empty if vLLM has none.
        is_for_router: whether the router has a flag of the same name.
    """

    name: str
    kind: Any
    choices: tuple[str, ...]
    text: str
    default: str
    panel: str
    metavar: str
    vllm: str
    is_for_router: bool

    @property
    def flag(self) -> str:
        """The flag as an operator types it."""
        return "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """Help text: possible values, what the key does, and its default in brackets."""
        choices = f"{' | '.join(self.choices)}: " if self.choices else ""
        return choices + self.text + (f"  [{self.default}]" if self.default else "")


def config_key(
    default: Any,
    text: str,
    *,
    panel: str,
    unset: str = "",
    metavar: str = "",
    vllm: str = "",
    router: bool = False,
    **checks: Any,
) -> Any:
    """Declare a field of `ServeConfig`; see `ConfigKey`.

    Args:
        default: value if the key is not given.
        text: what the key does, in one line.
        panel: section of the help and the docs.
        unset: what applies without a value, if the default is none; other defaults speak for themselves.
        metavar: placeholder of the value in help.
        vllm: vLLM's name.
        router: whether the router is started with it (`router.access.flags`).
        checks: bounds and other arguments of pydantic's `Field`.
    """
    assert not unset or default in (None, "", ()), f"{text}: the default is {default!r}, and unset says {unset!r}"
    shown: JsonDict = {"panel": panel, "unset": unset, "metavar": metavar, "vllm": vllm, "router": router}
    return Field(default, description=text, json_schema_extra=shown, **checks)


def keys_of(model: type[BaseModel]) -> dict[str, ConfigKey]:
    """Read the keys of a model whose every field is made by `config_key`, in order."""
    return {name: _read(name, field) for name, field in model.model_fields.items()}


def _read(name: str, field: FieldInfo) -> ConfigKey:
    shown = field.json_schema_extra
    assert isinstance(shown, dict), f"{name} is not declared by `config_key`"
    kind, choices = _kind(field.annotation)
    return ConfigKey(
        name=name,
        kind=kind,
        choices=choices,
        text=field.description or "",
        default=str(shown["unset"]) or _written(field.default),
        panel=str(shown["panel"]),
        metavar=str(shown["metavar"]),
        vllm=str(shown["vllm"]),
        is_for_router=bool(shown["router"]),
    )


def _kind(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the type that a flag parses, and the choices if they are the only values."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [part for part in get_args(annotation) if part is not type(None)]
        return _kind(others[0]) if len(others) == 1 else (str, ())
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return type(values[0]), tuple(map(str, values))
    if get_origin(annotation) is tuple:
        return list[str], ()
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return str, tuple(str(item.value) for item in annotation)
    return annotation, ()


def _written(default: Any) -> str:
    """Format a default as an operator would type it."""
    if default in (None, "", ()):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, Enum):
        return str(default.value)
    return f"{default:g}" if isinstance(default, float) else str(default)
