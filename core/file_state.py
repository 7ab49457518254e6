"""What tells one state of a file from the next: for those who read a file again when it was replaced."""

import os
from pathlib import Path


def file_state(path: str | Path) -> object:
    """Another one after each change; why it cannot be looked at is a state, too."""
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
