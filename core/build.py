"""Identifies the code that this process runs: its version, and an id of its sources, equal where they are equal."""

import functools
import hashlib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME_LEN = 12
NO_VERSION = "unknown"


@functools.cache
def build_id() -> str:
    """Return the id, in hex digits, over all Python files of all packages; computed at the first call.

    A worker calls this at its start, so the id describes the code it loaded, even if the files change later.
    """
    return name_of(ROOT)


def installed_version() -> str:
    """Return the version of the installed package as it is now; `NO_VERSION` where the sources run without one.

    A process that outlives an upgrade reads it once, at its start.
    """
    try:
        return metadata.version("baton-pd")
    except metadata.PackageNotFoundError:
        return NO_VERSION


def name_of(root: Path) -> str:
    """Return the id of another directory that holds the package."""
    digest = hashlib.sha256()
    packages = sorted(path.parent for path in root.glob("*/__init__.py"))
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:NAME_LEN]
