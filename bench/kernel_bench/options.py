"""What `baton bench kernels` was asked for, checked before anything is measured."""

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.core.errors import ConfigInvalid

MEASURED_MS = {"cuda": 20.0, "cpu": 1.0}
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """One run.

    Attributes:
        only: words; a row is measured if its module, kernel or shape has one of them. Empty: all.
        device: "cuda" or "cpu".
        rounds: how often each system of a row is measured.
        limit_s: of the whole run; rows that have not begun by then are named.
        case_limit_s: of one row, until its process is ended.
        jobs: processes that compile before anything is measured; 0 leaves that out.
        out: file that holds the result so far after every row.
        seed: of buffers and order.
    """

    only: tuple[str, ...] = ()
    device: str
    rounds: int = 5
    limit_s: float = 1800.0
    case_limit_s: float = 90.0
    jobs: int = 0
    out: Path | None = None
    seed: int = 0


def read_options(
    *,
    only: str,
    device: str,
    rounds: int,
    limit_s: float,
    case_limit_s: float,
    jobs: int,
    out: Path | None,
    seed: int,
) -> KernelOptions:
    """Check what was typed.

    Raises:
        ConfigInvalid: a value that does not exist, or a device that is not there.
    """
    if device not in _DEVICES:
        raise ConfigInvalid(f"--device {device}: must be auto, {' or '.join(_DEVICES)}", keys=["device"])
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalid("--device cuda: torch finds no GPU here", keys=["device"])
    if rounds < 1:
        raise ConfigInvalid(f"--rounds {rounds}: must be at least 1", keys=["rounds"])
    for name, value in (("limit-s", limit_s), ("case-limit-s", case_limit_s)):
        if not value > 0:
            raise ConfigInvalid(f"--{name} {value:g}: must be above 0", keys=[name])
    if jobs < 0:
        raise ConfigInvalid(f"--jobs {jobs}: must not be negative", keys=["jobs"])
    if out is not None and not out.parent.is_dir():
        raise ConfigInvalid(f"--out {out}: there is no folder {out.parent}", keys=["out"])
    return KernelOptions(
        only=tuple(part.strip() for part in only.split(",") if part.strip()),
        device=device,
        rounds=rounds,
        limit_s=limit_s,
        case_limit_s=case_limit_s,
        jobs=jobs,
        out=out,
        seed=seed,
    )
