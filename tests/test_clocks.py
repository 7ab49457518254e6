"""No lease, deadline or order follows the wall clock, which an operator or NTP may set at any time."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
SERVING = ("core", "proto", "engine", "kvcache", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router")
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime"}
# What is about dates: until when a key or certificate is good, and what is shown to people.
ABOUT_DATES = {
    "core/telemetry/telemetry.py",
    "core/tls_files.py",
    # A proof of the deployment's secret holds for a minute; hosts share no other clock than the wall's.
    "proto/inside.py",
    "router/server.py",
    "worker/host.py",
    "router/access/api_keys.py",
    "router/openai/chat_template.py",
    "router/openai/front.py",
}


ENDS = {wall.rpartition(".")[2] for wall in WALL}


def wall_clock_uses(path):
    text = path.read_text()
    if not any(end in text for end in ENDS):  # so that most files need not be parsed
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in ENDS:
            name = ast.unparse(node)
            if any(name == wall or name.endswith(f".{wall}") for wall in WALL):
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{one.name}" for one in node.names if f"time.{one.name}" in WALL)


@pytest.mark.parametrize("package", SERVING)
def test_the_wall_clock_is_read_for_dates_alone(package):
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if uses := sorted(wall_clock_uses(path)):
            found[path.relative_to(ROOT).as_posix()] = uses
    assert found.keys() <= ABOUT_DATES, found
