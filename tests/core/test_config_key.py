"""What is read back of a key's declaration: the value's kind, its choices, and the default as it is typed."""

from enum import Enum
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from baton.core.config import ServeConfig
from baton.core.config_key import config_key, keys_of

pytestmark = pytest.mark.fast


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Declared(BaseModel):
    """Of every kind that `ServeConfig` has."""

    count: int = config_key(3, "how many", panel="A", metavar="eggs", vllm="--eggs", router=True, ge=1)
    limit: int | None = config_key(None, "at most", panel="A", unset="no limit")
    share: float = config_key(30.0, "so much", panel="A")
    is_on: bool = config_key(True, "whether", panel="A")
    is_off: bool = config_key(False, "whether not", panel="A")
    path: str = config_key("", "a file", panel="B")
    names: tuple[str, ...] = config_key((), "several", panel="B")
    size: Literal[1, 2, 4] | None = config_key(None, "of two", panel="B")
    colour: Colour = config_key(Colour.BLUE, "which", panel="B")
    either: int | Literal["auto"] | None = config_key(None, "a number or auto", panel="B", unset="2")
    zero: int = config_key(0, "none", panel="B")


def test_a_declaration_is_read_back():
    keys = keys_of(Declared)
    assert list(keys) == list(Declared.model_fields)
    assert {name: key.kind for name, key in keys.items()} == {
        "count": int,
        "limit": int,
        "share": float,
        "is_on": bool,
        "is_off": bool,
        "path": str,
        "names": list[str],
        "size": int,
        "colour": str,
        "either": str,
        "zero": int,
    }
    assert {name: key.help for name, key in keys.items()} == {
        "count": "how many  [3]",
        "limit": "at most  [no limit]",
        "share": "so much  [30]",
        "is_on": "whether  [on]",
        "is_off": "whether not  [off]",
        "path": "a file",
        "names": "several",
        "size": "1 | 2 | 4: of two",
        "colour": "red | blue: which  [blue]",
        "either": "a number or auto  [2]",
        "zero": "none  [0]",
    }
    count = keys["count"]
    assert (count.flag, count.panel, count.metavar, count.vllm) == ("--count", "A", "eggs", "--eggs")
    assert keys["is_on"].flag == "--is-on"
    assert [name for name, key in keys.items() if key.is_for_router] == ["count"]


def test_bounds_hold_as_declared():
    assert Declared().count == 3
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Declared(count=0)


def test_a_default_that_speaks_for_itself_has_no_other_text():
    with pytest.raises(AssertionError, match="unset says 'many'"):
        config_key(3, "how many", panel="A", unset="many")


def test_a_field_that_is_declared_otherwise_is_not_read():
    class Plain(BaseModel):
        plain: int = Field(1, description="no panel")

    with pytest.raises(AssertionError, match="plain is not declared by"):
        keys_of(Plain)


def test_every_key_says_what_it_does_in_one_line():
    for name, key in keys_of(ServeConfig).items():
        assert key.text, name
        assert not set("\n[]`") & set(key.text.replace("baton-pd[otel]", "")), name
        assert not key.text.endswith("."), name
        assert key.vllm.startswith(("--", "VLLM_")) or not key.vllm, name
    speaking = [name for name, key in keys_of(ServeConfig).items() if not key.default]
    silent = {"tensor_parallel_size", "speculative_config", "draft_model"}
    assert {name for name in speaking if not name.endswith(("_file", "_server_name", "_endpoint"))} == silent
