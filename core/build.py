"""Which code this process runs: a name of the installed sources, equal where they are equal."""

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME_LEN = 12


@functools.cache
def build_id() -> str:
    """Hexadecimal, of all Python files of all packages, read when it is first asked for.

    A worker asks at its start, so this names what it loaded even when the files change under it.
    """
    return name_of(ROOT)


def name_of(root: Path) -> str:
    """The same of another directory that holds the package."""
    digest = hashlib.sha256()
    packages = sorted(path.parent for path in root.glob("*/__init__.py"))
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:NAME_LEN]
