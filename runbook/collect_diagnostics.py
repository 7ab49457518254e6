#!/usr/bin/env -S python3 -P
"""Put what explains a deployment into one archive: status, inventories, doctor, metrics, logs, with their digests."""

import argparse
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial as partial_call
from importlib import metadata
from pathlib import Path

from baton.cluster.admin import as_data, fetch_inventory, fetch_status
from baton.core.errors import BatonError, PreconditionUnmet, StepFailed
from baton.runbook.common.command import Runbook, main
from baton.runbook.common.processes import log_files, processes_of
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, partial

MAX_LOG_BYTES = 4 << 20  # the end of each file
LOG_SUFFIXES = {".log", ".out", ".err"}
DOCTOR_S = 60.0
METRICS_S = 10.0
SECRET = re.compile(
    rb"(?i)((?:api[-_ ]?key|token|password|secret|authorization)[\"']?\s*[:=]\s*)(?:bearer\s+)?[^\s,;]+"
)
REDACTED = rb"\1[redacted]"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--into", type=Path, default=Path(), help="directory for the archive  [.]")
    parser.add_argument("--logs", type=Path, action="append", default=[], help="directory of log files; several times")
    parser.add_argument("--metrics", action="append", default=[], help="URL of Prometheus metrics; several times")
    parser.add_argument("--offline", action="store_true", help="the router does not answer: collect the rest")


class Collection:
    """What is collected, and the archive it goes into."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        self._site, self._options = site, options
        self._files: dict[str, bytes] = {}
        self._missing: dict[str, str] = {}
        name = f"baton-diagnostics-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.tar.gz"
        self._path: Path = options.into / name

    def steps(self) -> list[Step]:
        """Collect, write, read back."""
        asked = [] if self._options.offline else [Check(name="the router answers", look=self._answers, next=_OFFLINE)]
        return [
            *asked,
            Check(name="the archive can be written", look=self._is_writable, next="give another --into"),
            Action(name="write the archive", do=self._write, undo=self._remove),
            Verification(name="the archive reads back as its manifest says", look=self._read_back),
            Verification(
                name="everything is in it",
                look=self._is_complete,
                next="the archive is good for what it has; MANIFEST.json names what is missing, and why",
            ),
        ]

    def _answers(self) -> str:
        return f"{len(self._site.status().workers)} workers"

    def _is_writable(self) -> str:
        into: Path = self._options.into
        try:
            with tempfile.TemporaryFile(dir=into):  # that permissions allow it says nothing of /proc
                pass
        except OSError as error:
            message = f"no file can be made in {into}: {error.strerror}"
            raise PreconditionUnmet(message, path=str(into)) from error
        return str(into)

    def _write(self) -> str:
        self._collect()
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(self._files.items())}
        manifest = {"address": self._site.address, "sha256": sums, "missing": self._missing}
        self._add_data("MANIFEST.json", manifest)
        unfinished = self._path.with_suffix(".part")
        try:
            with tarfile.open(unfinished, "w:gz") as archive:
                for name, data in sorted(self._files.items()):
                    info = tarfile.TarInfo(f"baton-diagnostics/{name}")
                    info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
                    archive.addfile(info, io.BytesIO(data))
            unfinished.replace(self._path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise StepFailed(f"{self._path}: {error.strerror}", path=str(self._path)) from error
        self._site.found["archive"] = str(self._path)
        return f"{self._path}: {len(self._files)} files, {self._path.stat().st_size} bytes"

    def _remove(self) -> str:
        self._path.unlink(missing_ok=True)
        return f"removed {self._path}"

    def _read_back(self) -> str:
        found: dict[str, bytes] = {}
        with tarfile.open(self._path) as archive:
            for member in archive:
                reader = archive.extractfile(member)
                found[member.name.partition("/")[2]] = b"" if reader is None else reader.read()
        sums = json.loads(found.pop("MANIFEST.json"))["sha256"]
        if sums != {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}:
            raise StepFailed(f"{self._path} does not hold what its manifest says", path=str(self._path))
        return f"{len(sums)} digests"

    def _is_complete(self) -> str:
        if self._missing:
            raise partial(f"missing: {', '.join(sorted(self._missing))}", missing=self._missing)
        return ", ".join(sorted(self._files))

    def _collect(self) -> None:
        self._add_data("environment.json", _environment())
        if not self._options.offline:
            self._try("status.json", lambda: as_data(fetch_status(self._site.address)))
            self._try("inventory.json", lambda: as_data(fetch_inventory(self._site.address)))
            self._try("workers-here", self._worker_logs)
        self._try("doctor.json", self._doctor)
        for index, url in enumerate(self._options.metrics):
            self._try(f"metrics-{index}.txt", partial_call(_fetch, url))
        for index, directory in enumerate(self._options.logs):
            if not directory.is_dir():
                self._missing[f"logs-{index}"] = f"{directory} is no directory"
            for path in sorted(directory.rglob("*")):
                if path.suffix in LOG_SUFFIXES and path.is_file():
                    self._add_log(f"logs-{index}/{path.relative_to(directory)}", path)

    def _try(self, name: str, collect: Callable[[], object]) -> None:
        """One that fails is named in the manifest; the others are worth having."""
        try:
            data = collect()
        except BatonError as error:
            self._missing[name] = error.message
            return
        if isinstance(data, bytes):
            self._files[name] = SECRET.sub(REDACTED, data)
        elif data is not None:
            self._add_data(name, data)

    def _worker_logs(self) -> None:
        for worker in self._site.status().workers:
            state = worker.state
            try:
                paths = log_files(processes_of(state))
            except PreconditionUnmet as error:  # on another host
                self._missing[f"logs of {state.worker_id}"] = error.message
                continue
            for path in paths:
                self._add_log(f"{state.worker_id}/{path.name}", path)

    def _doctor(self) -> object:
        address = [] if self._options.offline else ["--address", self._site.address]
        command = [sys.executable, "-P", "-m", "baton.cluster", "doctor", "--json", *address]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOCTOR_S, check=False)
            return json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError) as error:
            raise StepFailed(f"`baton doctor` gave nothing to keep: {error}") from error

    def _add_data(self, name: str, data: object) -> None:
        self._files[name] = json.dumps(data, indent=1, sort_keys=True).encode()

    def _add_log(self, name: str, path: Path) -> None:
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
                self._files[name] = SECRET.sub(REDACTED, file.read(MAX_LOG_BYTES))
        except OSError as error:
            self._missing[name] = str(error.strerror)


_OFFLINE = "give --offline to collect what can be had without the router"


def _fetch(url: str) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise StepFailed(f"{url} is no http URL", url=url)
    try:
        with urllib.request.urlopen(url, timeout=METRICS_S) as reply:
            return bytes(reply.read())
    except (urllib.error.URLError, ValueError, TimeoutError) as error:
        raise StepFailed(f"{url}: {error}", url=url) from error


def _environment() -> dict[str, object]:
    packages = sorted({f"{item.name}=={item.version}" for item in metadata.distributions()})
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "platform": platform.platform(),
        "python": sys.version,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "packages": packages,
    }


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    return Collection(site, options).steps()


RUNBOOK = Runbook(name="collect-diagnostics", about=__doc__ or "", steps=_steps, options=_options, sends_canaries=False)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
