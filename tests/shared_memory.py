"""Files of Baton in /dev/shm, by who owns them: other tests run at the same time and have files there too."""

from pathlib import Path

from baton.kvtransfer import shared_region
from baton.kvtransfer.protocol import incarnation_file


def owned_by(pids):
    """Paths of the regions and incarnations whose owner is one of `pids`, dead or alive."""
    incarnations = incarnation_file.DIRECTORY.glob(f"{incarnation_file.PREFIX}*")
    return regions_of(pids) | {path for path in incarnations if _written(path) in pids}


def regions_of(pids):
    """Of these the regions alone: what a killed process held locked stays until the next one starts."""
    regions = shared_region.DIRECTORY.glob(f"{shared_region.PREFIX}*")
    return {path for path in regions if _named(path) in pids}


def _named(path: Path) -> int:
    return int(path.name.removeprefix(shared_region.PREFIX).split("-")[0])


def _written(path: Path) -> int:
    try:
        return int(path.read_text().split()[0])
    except OSError:  # another process removed it since it was listed
        return 0
