"""Workload files of `baton bench serve`: TOML, checked once and completely before anything starts.

docs/benchmarks.md describes every key. Workloads that ship with Baton lie in `workloads/` and are known by name.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from baton.core.errors import ConfigInvalid

SHIPPED: Final = Path(__file__).parent / "workloads"
MAX_LEN: Final = 1 << 20  # tokens of a prompt or an answer
MAX_POINTS: Final = 32  # values of `clients` or `rate` in one load
MAX_REQUESTS: Final = 1_000_000  # expected at one point
MAX_PROMPT_TOKENS: Final = 200_000_000  # expected at one point; bodies are built before it starts
MAX_SECONDS: Final = 86_400.0
MAX_CLIENTS: Final = 1 << 16
MAX_RATE: Final = 100_000.0
NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.:>-]{0,39}"
_STRICT: Final = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

Arrival = Literal["closed", "poisson", "gamma"]


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens: fixed (`low == high`), uniform in [low, high], or lognormal and clipped to it.

    Attributes:
        low: minimum.
        high: maximum.
        mean: mean of the lognormal distribution before clipping; None: uniform.
        cv: coefficient of variation (standard deviation divided by mean).
    """

    low: int
    high: int
    mean: float | None = None
    cv: float = 0.0

    @property
    def expected(self) -> float:
        """Mean, ignoring clipping."""
        return (self.low + self.high) / 2 if self.mean is None else self.mean


def read_length(value: Any) -> Length:
    """Parse a number, `[low, high]` or `{mean, cv, min, max}` as a length.

    Raises:
        ValueError: it is none of these, or out of range.
    """
    if isinstance(value, Length):
        return value
    if isinstance(value, dict):
        return _read_lognormal(value)
    bounds = value if isinstance(value, list) else [value, value]
    if len(bounds) != 2 or not all(type(bound) is int for bound in bounds):
        raise ValueError("a number of tokens, [low, high] or {mean, cv, min, max} is wanted")
    low, high = bounds
    if not 1 <= low <= high <= MAX_LEN:
        raise ValueError(f"{value} is not within 1 ... {MAX_LEN}, the lower bound first")
    return Length(low, high)


def _read_lognormal(value: dict[str, Any]) -> Length:
    known = ("mean", "cv", "min", "max")
    for key, number in value.items():
        if key not in known:
            raise ValueError(_no_such_key(key, known))
        if type(number) not in (int, float) or not math.isfinite(number):
            raise ValueError(f"{key} is no finite number")
    if "mean" not in value or "cv" not in value:
        raise ValueError("a lognormal length needs mean and cv")
    low, high = value.get("min", 1), value.get("max", MAX_LEN)
    if type(low) is not int or type(high) is not int or not 1 <= low <= high <= MAX_LEN:
        raise ValueError(f"min and max are whole numbers within 1 ... {MAX_LEN}, min not above max")
    if not low <= value["mean"] <= high or not 0 <= value["cv"] <= 10:
        raise ValueError("mean lies within min ... max, cv within 0 ... 10")
    return Length(low, high, float(value["mean"]), float(value["cv"]))


def _as_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,)


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _as_floats(value: Any) -> Any:
    return tuple(_as_float(item) for item in _as_list(value))


Tokens = Annotated[Length, BeforeValidator(read_length)]
Count = Annotated[int, Field(ge=1, le=MAX_CLIENTS)]
Rate = Annotated[float, Field(gt=0, le=MAX_RATE)]
Milliseconds = Annotated[float | None, BeforeValidator(_as_float), Field(gt=0, le=1e9)]


class Prefixes(BaseModel):
    """Prefixes that prompts share: `count` different ones of `len` tokens, chosen uniformly for each request."""

    model_config = _STRICT

    count: int = Field(ge=1, le=100_000)
    len: int = Field(ge=1, le=MAX_LEN)


class Cancel(BaseModel):
    """Share of requests that their client cancels, and after how many tokens of the answer."""

    model_config = _STRICT

    share: Annotated[float, BeforeValidator(_as_float)] = Field(gt=0, le=1)
    after_tokens: Tokens


class Tenant(BaseModel):
    """A tenant's weight among the arrivals, and the environment variable that holds its API key, if it has one."""

    model_config = _STRICT

    weight: Annotated[float, BeforeValidator(_as_float)] = Field(1.0, gt=0, le=1e6)
    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")


class Streams(BaseModel):
    """Steady streams beside the arrivals: each sends its next request as soon as its answer has ended."""

    model_config = _STRICT

    count: int = Field(ge=1, le=MAX_CLIENTS)
    output_len: Tokens
    prompt_len: Tokens = Length(128, 128)


class Slo(BaseModel):
    """SLOs that a request must meet to count as goodput, in milliseconds. `itl_ms` bounds its longest ITL."""

    model_config = _STRICT

    ttft_ms: Milliseconds = None
    itl_ms: Milliseconds = None
    tpot_ms: Milliseconds = None
    e2e_ms: Milliseconds = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no limit."""
        return all(limit is None for limit in (self.ttft_ms, self.itl_ms, self.tpot_ms, self.e2e_ms))


class OfferedLoad(BaseModel):
    """One `[[load]]`: an arrival process at one or more points, and its requests."""

    model_config = _STRICT

    name: str = Field(pattern=f"^{NAME}$")
    arrival: Arrival
    clients: Annotated[tuple[Count, ...], BeforeValidator(_as_list)] = Field((), max_length=MAX_POINTS)
    requests_per_client: int | None = Field(None, ge=1, le=100_000)
    rate: Annotated[tuple[Rate, ...], BeforeValidator(_as_floats)] = Field((), max_length=MAX_POINTS)
    seconds: Annotated[float | None, BeforeValidator(_as_float)] = Field(None, gt=0, le=MAX_SECONDS)
    cv: Annotated[float | None, BeforeValidator(_as_float)] = Field(None, ge=0.01, le=100)
    burstiness: Annotated[float | None, BeforeValidator(_as_float)] = Field(None, ge=1e-4, le=1e4)
    prompt_len: Tokens
    output_len: Tokens
    prefixes: Prefixes | None = None
    cancel: Cancel | None = None
    tenants: dict[Annotated[str, Field(pattern=f"^{NAME}$")], Tenant] = Field({}, max_length=1024)
    streams: Streams | None = None
    slo: Slo = Slo()
    timeout_s: Annotated[float, BeforeValidator(_as_float)] = Field(600.0, gt=0, le=MAX_SECONDS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_arrival()
        if self.prefixes is not None and self.prefixes.len >= self.prompt_len.low:
            why = f"the shortest prompt has {self.prompt_len.low} tokens, and must be longer than its prefix"
            raise ValueError(f"prefixes.len {self.prefixes.len}: {why}")
        most = max(self.num_expected(point) for point in range(self.num_points))
        if most > MAX_REQUESTS:
            raise ValueError(f"one point has {most:.0f} requests; at most {MAX_REQUESTS} are possible")
        if most * self.prompt_len.expected > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"the prompts of one point have {most * self.prompt_len.expected:.3g} tokens; at most "
                f"{MAX_PROMPT_TOKENS:.3g} are possible"
            )
        return self

    def _check_arrival(self) -> None:
        needs = {"clients", "requests_per_client"} if self.arrival == "closed" else {"rate", "seconds"}
        allows = needs | ({"cv", "burstiness"} if self.arrival == "gamma" else set())
        shapes = {"clients", "requests_per_client", "rate", "seconds", "cv", "burstiness"}
        has = {name for name in shapes if getattr(self, name) not in (None, ())}
        if missing := sorted(needs - has):
            raise ValueError(f'arrival = "{self.arrival}" needs {" and ".join(missing)}')
        if foreign := sorted(has - allows):
            raise ValueError(f'{", ".join(foreign)} does not go with arrival = "{self.arrival}"')
        if self.arrival == "gamma" and (self.cv is None) == (self.burstiness is None):
            raise ValueError('arrival = "gamma" needs either cv or burstiness (1 / cv^2)')

    @property
    def num_points(self) -> int:
        """Number of measured points: one for each of `clients` or `rate`."""
        return len(self.clients or self.rate)

    @property
    def gap_cv(self) -> float:
        """Coefficient of variation of the time between two arrivals."""
        if self.cv is not None:
            return self.cv
        return 1.0 if self.burstiness is None else self.burstiness**-0.5

    def num_expected(self, point: int) -> float:
        """Expected number of requests at a point, without steady streams."""
        if self.arrival == "closed":
            assert self.requests_per_client is not None
            return float(self.clients[point] * self.requests_per_client)
        assert self.seconds is not None
        return self.rate[point] * self.seconds

    def label(self, point: int) -> str:
        """A point in words: `16 clients`, `2.5/s`."""
        if self.arrival != "closed":
            return f"{self.rate[point]:g}/s"
        return f"{self.clients[point]} client" + ("s" if self.clients[point] > 1 else "")


class Workload(BaseModel):
    """A whole file."""

    model_config = _STRICT

    seed: int = Field(0, ge=0, lt=1 << 63)
    load: Annotated[tuple[OfferedLoad, ...], BeforeValidator(_as_list)] = Field(min_length=1, max_length=64)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [load.name for load in self.load]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two loads are named {twice[0]}")
        return self


def shipped() -> list[str]:
    """Names of the workloads that ship with Baton."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read_workload(asked: str) -> Workload:
    """Read and check a workload: the name of a shipped one, or a path (anything with `/` or `.toml`).

    Raises:
        ConfigInvalid: there is no such file or name, it is not TOML, or a key or value is wrong; all are named.
    """
    path = Path(asked)
    if "/" not in asked and path.suffix != ".toml":
        if asked not in shipped():
            message = f"no workload {asked!r}: give a .toml file, or one of {', '.join(shipped())}"
            raise ConfigInvalid(message, keys=["workload"])
        path = SHIPPED / f"{asked}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{path} is not TOML: {error}", path=str(path)) from error
    return check_workload(values, str(path))


def check_workload(values: Mapping[str, Any], where: str = "workload") -> Workload:
    """Check a file's values; `where` names it in errors.

    Raises:
        ConfigInvalid: keys or values are wrong; all are named, unknown keys with the nearest known one.
    """
    try:
        return Workload.model_validate(dict(values))
    except ValidationError as error:
        problems = list(dict.fromkeys(_problem(item) for item in error.errors()))
        keys = list(dict.fromkeys(_place(item["loc"]) for item in error.errors()))
        raise ConfigInvalid(f"{where}: {'; '.join(problems)}", keys=keys) from error


def api_keys(workload: Workload, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read the API key of each environment variable that tenants name.

    Raises:
        ConfigInvalid: one is not set, is empty, or cannot be a header's value.
    """
    found = os.environ if environment is None else environment
    names = {tenant.api_key_env for load in workload.load for tenant in load.tenants.values() if tenant.api_key_env}
    return {name: read_key(name, found) for name in sorted(names)}


def read_key(name: str, environment: Mapping[str, str]) -> str:
    """Read an API key from an environment variable.

    Raises:
        ConfigInvalid: it is not set, is empty, or cannot be a header's value.
    """
    key = environment.get(name, "")
    if not re.fullmatch(r"[\x21-\x7e]{1,4096}", key):
        raise ConfigInvalid(f"the environment variable {name} holds no API key", keys=["api_key_env"])
    return key


_MODELS: Final[dict[str, type[BaseModel]]] = {
    "load": OfferedLoad,
    "prefixes": Prefixes,
    "cancel": Cancel,
    "streams": Streams,
    "slo": Slo,
}


def _problem(item: ErrorDetails) -> str:
    where = _place(item["loc"])
    if item["type"] == "extra_forbidden":
        names = [part for part in item["loc"][:-1] if isinstance(part, str)]
        kind = Tenant if "tenants" in names else _MODELS[names[-1]] if names else Workload
        return f"{where}: {_no_such_key(str(item['loc'][-1]), list(kind.model_fields))}"
    said = item["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said


def _place(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text.removesuffix(".[key]")


def _no_such_key(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"no such key {key!r}; the nearest is {near[0]!r}" if near else f"no such key {key!r}"
