"""What a line of the log says, and that a process's children log alike."""

import io
import json
import logging
import os
import re
import subprocess
import sys

import pytest

from baton.core.errors import InvalidGrammar, WorkerLost
from baton.core.requests.request import AttemptKey
from baton.core.telemetry import logs
from baton.core.telemetry.logs import configure_inherited, configure_logging, know
from baton.core.telemetry.span import CURRENT_TRACE

pytestmark = pytest.mark.fast

log = logging.getLogger("baton.tests.logs")


@pytest.fixture
def configured(monkeypatch):
    """Calls configure_logging with a stream that is given back; everything is as before afterwards."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    for name in (logs.FORMAT_VARIABLE, logs.ABOUT_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def configure(log_format, about=None):
        stream = io.StringIO()
        configure_logging(log_format, about, stream)
        return stream

    yield configure
    root.handlers[:] = before
    root.setLevel(level)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_with_what_is_known(configured):
    stream = configured("json", {"role": "prefill", "worker_id": "prefill-0"})
    know(epoch="00ff")
    token = CURRENT_TRACE.set("ab" * 16)
    log.warning("%s is tried again: %s", AttemptKey("r-1", 2), 'a "reason"\nof two lines')
    CURRENT_TRACE.reset(token)
    log.info("nothing special", extra={"worker_id": "decode-3"})
    log.debug("not shown")
    first, second = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "WARNING",
        "logger": "baton.tests.logs",
        "message": 'r-1/2 is tried again: a "reason"\nof two lines',
        "role": "prefill",
        "worker_id": "prefill-0",
        "epoch": "00ff",
        "request_id": "r-1",
        "attempt": 2,
        "trace_id": "ab" * 16,
    }
    assert second["worker_id"] == "decode-3"
    assert not {"trace_id", "request_id", "attempt"} & second.keys()


def test_a_traceback_stays_in_its_line(configured):
    stream = configured("json")
    try:
        raise ValueError("no\nway")
    except ValueError:
        log.exception("failed")
    [line] = lines(stream)
    assert "ValueError: no\nway" in line["exception"]


def test_arguments_in_a_mapping_and_values_that_json_does_not_know(configured):
    stream = configured("json", {"epoch": object})
    log.warning("%(key)s fails", {"key": AttemptKey("r", 1)})
    [line] = lines(stream)
    assert (line["request_id"], line["attempt"]) == ("r", 1)
    assert "object" in line["epoch"]


def test_text_is_as_it_was(configured):
    stream = configured("text", {"role": "router"})
    know(worker_id="x")
    log.warning("%s fails", AttemptKey("r", 1))
    assert re.fullmatch(r"\S+ \S+ WARNING baton\.tests\.logs: r/1 fails\n", stream.getvalue())


def test_children_log_alike(configured, capsys):
    configured("json", {"role": "decode", "worker_id": "decode-0"})
    know(epoch="12")
    configure_inherited("incoming")
    log.warning("here")
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line[name] for name in ("role", "worker_id", "epoch")] == ["incoming", "decode-0", "12"]
    os.environ[logs.ABOUT_VARIABLE] = "no json"
    configure_inherited("incoming")


def test_the_last_call_counts_and_a_process_nobody_configured_is_left_alone(configured):
    num = len(logging.getLogger().handlers)
    know(role="nobody")
    assert logs.ABOUT_VARIABLE not in os.environ
    first, second = configured("json"), configured("json")
    log.warning("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1
    assert len(logging.getLogger().handlers) == num + 1


def test_no_text_begins_a_line_or_moves_a_cursor(configured):
    stream = configured("text")
    hostile = "r\n2026-11-23 00:00:00,000 CRITICAL baton.router: FORGED\x1b[2J\r\x9b\u2028\u202e"
    log.warning("request %s failed", hostile)
    try:
        raise ValueError(hostile)
    except ValueError:
        log.exception("it is %s", hostile)
    text = stream.getvalue()
    assert not set(text) & set("\x1b\r\x9b\u2028\u202e")
    for line in text.splitlines():
        assert re.match(r"\d{4}-\d\d-\d\d \S+ (WARNING|ERROR) baton\.tests\.logs: (request|it is) |  \| ", line), line
    assert "\\n2026" in text and "\\x1b" in text


def test_of_an_error_that_quotes_a_client_only_kind_and_digest_are_shown():
    error = logs.shown(InvalidGrammar("regex: SECRET(", kind="regex", field="guided_regex"))
    assert re.fullmatch(r"InvalidGrammar of guided_regex \(14 characters, [0-9a-f]{12}\)", error)
    assert logs.shown(WorkerLost("decode-0 is lost")) == "WorkerLost: decode-0 is lost"


WRITER = """
import logging, os, sys
from baton.core.telemetry import logs
logs.MAX_FILE_BYTES = 4000
handler = logs.RotatingStderr(4000)
logging.getLogger().addHandler(handler)
for number in range(200):
    logging.getLogger("a").warning("line %d %s", number, "x" * 80)
    if number == 150 and os.environ.get("CHILD") is None:
        import subprocess
        subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[1]], env=os.environ | {"CHILD": "1"}, check=True)
os.write(2, b"the last words\\n")
"""


@pytest.mark.long
def test_a_file_of_the_log_is_put_aside_when_it_has_grown(tmp_path):
    path = tmp_path / "router.err"
    with path.open("wb") as err:
        subprocess.run([sys.executable, "-c", WRITER, WRITER], stderr=err, check=True)
    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["router.err", "router.err.1"]
    assert all(each.stat().st_size < 5000 for each in files)
    assert path.read_text().endswith("the last words\n")
