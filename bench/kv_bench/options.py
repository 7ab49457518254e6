"""Options of `baton bench kv`, checked before anything is measured."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.bench.kv_bench.workloads import WORKLOADS
from baton.bench.kv_systems.registry import SYSTEMS
from baton.core.errors import ConfigInvalid, PackageMissing

GIL_LOADS = ("none", "inside", "outside")
DIGESTS = {"on": (True,), "off": (False,), "both": (False, True)}
FAULT_KINDS = ("drop", "corrupt")
WHATS = ("transfer", "step")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MAX_PACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """Options of one run.

    Attributes:
        what: "transfer", or "step": how much the KV writer slows a prefill step.
        systems: names of the systems.
        workloads: names of the workloads.
        gil_loads: a subset of GIL_LOADS.
        digests: for systems with a digest.
        faults: probability per frame, by kind; systems that do not support faults are left out.
        pace_s: pause between layers of the paced phase; 0 leaves that phase out.
        rounds: how often everything is measured.
        seconds: minimum duration of each phase of each cell.
        seed: seed of order, block ids and contents.
        count_calls: whether to count system calls in extra cells.
        plot: path of the plot; None: no plot.
    """

    what: str = "transfer"
    systems: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ("a", "b", "c")
    gil_loads: tuple[str, ...] = ("none",)
    digests: tuple[bool, ...] = (False, True)
    faults: Mapping[str, float]
    pace_s: float = 0.004
    rounds: int = 5
    seconds: float = 1.0
    seed: int = 0
    count_calls: bool = True
    plot: Path | None = None
    left_out: tuple[str, ...] = ()  # sentences about systems that cannot run here


def read_options(
    *,
    what: str = "transfer",
    systems: str | None = None,
    workloads: str = "a,b,c",
    gil_load: str = "none",
    digest: str = "both",
    faults: str = "",
    pace: str = "4ms",
    rounds: int = 5,
    seconds: float = 1.0,
    seed: int = 0,
    count_calls: bool = True,
    plot: Path | None = None,
) -> KvOptions:
    """Check the command line.

    Raises:
        ConfigInvalid: a name or a value does not exist.
        PackageMissing: a system was named that cannot run here.
    """
    _choose("what", [what], WHATS)
    if digest not in DIGESTS:
        raise ConfigInvalid(f"--digest {digest}: on, off or both", keys=["digest"])
    if rounds < 1 or not 0 < seconds <= 60:
        raise ConfigInvalid("--rounds starts at 1, --seconds is above 0 and at most 60", keys=["rounds", "seconds"])
    damage = read_faults(faults)
    names, left_out = _systems(systems, bool(damage))
    digests = DIGESTS[digest]
    if "corrupt" in damage:
        digests = tuple(choice for choice in digests if choice)
        if not digests:
            raise ConfigInvalid("--faults corrupt needs --digest on: it is what finds the damage", keys=["digest"])
    return KvOptions(
        what=what,
        systems=names,
        workloads=_choose("workloads", workloads.split(","), WORKLOADS),
        gil_loads=_choose("gil-load", gil_load.split(","), GIL_LOADS),
        digests=digests,
        faults=damage,
        pace_s=read_pace_s(pace),
        rounds=rounds,
        seconds=seconds,
        seed=seed,
        count_calls=count_calls,
        plot=plot,
        left_out=left_out,
    )


def read_pace_s(text: str) -> float:
    """Parse a pace such as `4ms`, `500us`, `0.01s` or `0` into seconds.

    Raises:
        ConfigInvalid: it is none of these, or more than a second.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)|0", text.strip())
    pace_s = -1.0 if match is None else 0.0 if match[1] is None else float(match[1]) * _UNITS[match[2]]
    if not 0 <= pace_s <= _MAX_PACE_S:
        raise ConfigInvalid(f"--pace {text}: a time like 4ms or 500us, at most 1s, or 0", keys=["pace"])
    return pace_s


def read_faults(text: str) -> dict[str, float]:
    """Parse probabilities such as `drop=0.01,corrupt=0.001`.

    Raises:
        ConfigInvalid: a kind is unknown, or a value is not a probability.
    """
    faults: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        kind, _, value = item.partition("=")
        _choose("faults", [kind], FAULT_KINDS)
        if not re.fullmatch(r"0?\.\d+|\d+(\.\d+)?(e-\d+)?", value) or not 0 <= float(value) <= 0.5:
            raise ConfigInvalid(f"--faults {item}: {kind}=P with P from 0 to 0.5", keys=["faults"])
        faults[kind] = float(value)
    return faults


def _choose(key: str, names: Sequence[str], known: Sequence[str] | Mapping[str, object]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigInvalid(f"--{key} {', '.join(unknown)}: there are {', '.join(known)}", keys=[key])
    return tuple(dict.fromkeys(names))


def _systems(text: str | None, has_faults: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Systems that were named, or all that can run here; and why the others cannot."""
    if text is not None:
        names = _choose("systems", text.split(","), SYSTEMS)
        for name in names:
            if problem := SYSTEMS[name].problem():
                raise PackageMissing(problem, system=name)
            if has_faults and not SYSTEMS[name].takes_faults:
                raise ConfigInvalid(f"--faults: {name} has no way to recover from any", keys=["faults", "systems"])
        return names, ()
    fitting = [system for system in SYSTEMS.values() if system.takes_faults or not has_faults]
    problems = tuple(filter(None, (system.problem() for system in fitting)))
    return tuple(system.name for system in fitting if not system.problem()), problems
