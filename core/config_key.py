"""How a key of `ServeConfig` is declared: once, with all that its flag, the help and the docs say of it.

`config_key` declares one; `keys_of` reads them back. `cluster.config_flags` makes flags of them, `scripts/flags_doc.py`
the tables in docs/flags.md.
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
        kind: what a flag's value is read as before the configuration checks it.
        choices: the values there are, where they are a few names or numbers.
        text: what it does.
        default: what holds if it is not given; empty where nothing does.
        metavar: what stands for the value in help, such as its unit; empty: the kind's name.
        vllm: vLLM's name of the same setting; empty where vLLM has none.
        is_for_router: whether the router has a flag of the same name, too.
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
        """As it is typed."""
        return "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """What it takes, what it does, and its default in brackets."""
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
    """A field of `ServeConfig`; see `ConfigKey`.

    Args:
        default: its value if it is not given.
        text: what it does, in one line.
        panel: the part of the help and the docs that it is in.
        unset: what holds without a value, where the default is none; other defaults speak for themselves.
        metavar: what stands for the value in help.
        vllm: vLLM's name.
        router: whether the router is started with it (`router.access.config_flags`).
        checks: bounds and the like, as pydantic's `Field` has them.
    """
    assert not unset or default in (None, "", ()), f"{text}: the default is {default!r}, and unset says {unset!r}"
    shown: JsonDict = {"panel": panel, "unset": unset, "metavar": metavar, "vllm": vllm, "router": router}
    return Field(default, description=text, json_schema_extra=shown, **checks)


def keys_of(model: type[BaseModel]) -> dict[str, ConfigKey]:
    """The keys of a model whose every field is made by `config_key`, in their order."""
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
    """What a flag reads, and its choices if they are all there is."""
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
    """A default, as an operator would type it."""
    if default in (None, "", ()):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, Enum):
        return str(default.value)
    return f"{default:g}" if isinstance(default, float) else str(default)
