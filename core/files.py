"""File utilities: detects whether a file has changed, and how many files may be open."""

import logging
import os
import resource
from pathlib import Path
from typing import Final

RESERVED: Final = 256  # for workers' channels, logs, processes and files that are read again
log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, as the system allows every process; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:  # some systems report no hard limit, and still have one
            log.warning("the limit of open files stays at %d: %s", soft, error)
    return file_limit()


def file_limit() -> int:
    """Number of files that may be open at once."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def share_of_clients(num_doors: int) -> int:
    """Connections that each of `num_doors` servers may hold without touching the reserve."""
    limit = file_limit()
    return max(1, (limit - min(RESERVED, limit // 2)) // num_doors)


def file_state(path: str | Path) -> object:
    """Return a state that differs after each change of the file; the error that hides the file is a state too."""
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
