"""What serve's stderr shows of its processes' logs."""

import json
import threading

import pytest

from baton.cluster import log_tail
from baton.cluster.log_tail import LogTail, printable

pytestmark = pytest.mark.fast
HEAD = "2026-11-23 10:00:00,123"


class Shown:
    def __init__(self, directory):
        self.lines = []
        self._arrived = threading.Condition()
        self.tail = LogTail(directory, self._on_line)

    def _on_line(self, line):
        with self._arrived:
            self.lines.append(line)
            self._arrived.notify_all()

    def wait(self, num):
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.lines) >= num, 60), self.lines


def worker_log(tmp_path):
    logs = tmp_path / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "ray" / "session_latest").symlink_to(tmp_path / "ray" / "session_1")
    return logs / "worker-abc-01000000-4321.err"


@pytest.mark.long
def test_errors_with_their_tracebacks_are_shown_once_and_the_file_is_named(tmp_path):
    path = worker_log(tmp_path)
    shown = Shown(tmp_path)
    path.write_text(
        f":actor_name:DecodeActor\n{HEAD} INFO baton.worker: started\n  and more of it\n"
        f"{HEAD} ERROR baton.decode: it broke\nTraceback (most recent call last):\n  File x\nValueError: y\n"
        f"{HEAD} INFO baton.worker: goes on\nnoise\n"
    )
    shown.wait(5)
    with path.open("a") as file:
        file.write(f"{HEAD} WARNING baton.decode: half")
        file.flush()
        file.write(" a line\nTraceback (most recent call last):\n")
    shown.wait(7)
    shown.tail.close()
    prefix = "DecodeActor 4321: "
    assert shown.lines == [
        f"{prefix}logs to {path}",
        f"{prefix}{HEAD} ERROR baton.decode: it broke",
        f"{prefix}Traceback (most recent call last):",
        f"{prefix}  File x",
        f"{prefix}ValueError: y",
        f"{prefix}{HEAD} WARNING baton.decode: half a line",
        f"{prefix}Traceback (most recent call last):",
    ]


def test_what_is_written_last_is_shown_when_it_closes(tmp_path):
    shown = Shown(tmp_path)
    (tmp_path / "router.err").write_text(f"{HEAD} CRITICAL baton.router: ends\nFatal Python error: Aborted\n")
    shown.tail.close()
    assert shown.lines == [f"router: {HEAD} CRITICAL baton.router: ends", "router: Fatal Python error: Aborted"]


def test_requests_are_shown_and_other_information_is_not(tmp_path):
    lines = [f"{HEAD} INFO {log_tail.REQUEST_LOGGER}: request 'a': ok", f"{HEAD} INFO baton.router: other"]
    data = {"time": "t", "level": "ERROR", "logger": "baton.x", "message": "m"}
    lines += [json.dumps(data), json.dumps(data | {"level": "INFO"})]
    (tmp_path / "router.err").write_text("\n".join(lines) + "\n")
    shown = Shown(tmp_path)
    shown.tail.close()
    assert shown.lines == [f"router: {lines[0]}", lines[2]]


def test_a_log_without_end_is_cut_and_control_characters_are_spelled(tmp_path):
    flood = f"{HEAD} WARNING baton.x: \x1b[2Jflood\n" * (log_tail.MAX_LINES + 20)
    (tmp_path / "router.err").write_text(flood)
    shown = Shown(tmp_path)
    shown.tail.close()
    assert len(shown.lines) == log_tail.MAX_LINES + 1
    assert shown.lines[0].endswith(r"\x1b[2Jflood")
    assert shown.lines[-1] == f"router: 20 more lines in {tmp_path / 'router.err'}"


def test_printable_text_stays():
    text = "\u00e4\u65e5\u672c\U0001f600 a\tb\nc"
    assert printable(text) == text
    assert printable("\x1b\x07\x9b\r\u202e") == r"\x1b\x07\x9b\x0d\u202e"
