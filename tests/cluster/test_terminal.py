"""What commands look like on a terminal: nothing is drawn over what they print."""

import signal
import sys
from contextlib import closing

import pytest

from baton.tests.cluster.terminal import Terminal, python

SERVE = """
import select
import sys, time
from baton.cluster import deployment
from baton.cluster.commands import serve
from baton.cluster.outcome import Output, run_command
from baton.core.config import ServeConfig
from baton.core.start_phase import StartPhase
from types import SimpleNamespace

class Deployment:
    address = admin_address = "127.0.0.1:50051"
    http_url, metrics_url, workers = "http://127.0.0.1:8000", "", {}
    def __init__(self, config, *, on_progress, on_log):
        self.config, self._on_progress, self._on_log = config, on_progress, on_log
        self._checks = 0
    def __enter__(self):
        for done, text in enumerate(("starting Ray and the router", "prefill-0 is ready", "decode-0 is ready")):
            self._on_progress(done, 3, text)
            self._on_progress.worker("decode-0", StartPhase("weights", 40 + done, 100))
            time.sleep(0.3)
        self._on_log("router: a line while it starts")
        self._on_progress(3, 3, "every worker has reported to the router")
        return self
    def __exit__(self, *_): pass
    def check(self):
        self._checks += 1
        if self._checks < 4:
            self._on_log(f"router: line {self._checks}")
    def wait(self, timeout_s, wake=None):
        select.select([wake], [], [], 0.1)
    def drain(self): pass
serve.Deployment = Deployment
config = ServeConfig.from_mapping({"http_port": 8000, "device": "cpu"})
sys.exit(run_command(False, lambda output: serve.serve(config, output)))
"""
GENERATE = """
import sys
from baton.cluster.commands import generate
from baton.cluster.commands.completion import CompletionArguments, Completion
from baton.cluster.outcome import run_command

def complete(address, asked, on_text):
    for text in ("def f():\\n", "    return 1  # \\x1b[2J\\x1b[31mred\\r", "\\x07 done"):
        on_text(text)
    return Completion(text="", token_ids=(), finish_reason="stop", prompt_len=1, seed=0, ttft_ms=1.0, tpot_ms=1.0,
        num_verify_steps=0, num_draft_tokens=0, num_accepted_tokens=0, num_decode_tokens=0)
generate.complete_remotely = complete
asked = CompletionArguments(prompt="x", max_tokens=4, timeout_s=1.0)
sys.exit(run_command(False, lambda out: generate.generate(out, asked, local=False, address="a", local_options={})))
"""
TOP = """
import sys, time
from baton.cluster.commands import top
from baton.cluster.outcome import run_command
from baton.proto import admin_pb2, worker_pb2

def fetch(address):
    reply = admin_pb2.StatusReply(model="tiny", uptime_s=3)
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        state = worker_pb2.WorkerState(worker_id=name, role=role, epoch=1)
        state.inventory.num_blocks = state.inventory.num_blocks_free = 10
        reply.workers.add(alive=True, num_epochs=1, state=state)
    return reply
top.fetch_status = fetch
print("before")
sys.exit(run_command(False, lambda output: top.top("127.0.0.1:50051", output, interval_s=0.1)))
"""
BAR = ("━", "\u2501", "0:00:0")


def line_with(terminal, part):
    found = [line for line in terminal.lines() if part in line]
    assert len(found) == 1, (part, terminal.lines())
    return found[0]


@pytest.mark.long
@pytest.mark.fast
def test_serve_leaves_no_bar_behind_and_says_where_it_is():
    with closing(Terminal(*python(SERVE))) as terminal:
        terminal.read_until(lambda it: "is ready" in it.raw)
        assert any(part in terminal.raw for part in BAR)  # there is a bar while it starts
        terminal.read_until(lambda it: "decode-0: weights 42 %" in it.raw)
        terminal.read_until(lambda it: "line 3" in it.raw)
        shown = terminal.lines()
        assert not [line for line in shown if any(part in line for part in (*BAR, "weights"))], shown
        assert line_with(terminal, "serving tiny at").startswith("serving tiny at 127.0.0.1:50051 and http://127.0.0.1")
        assert line_with(terminal, "try: curl").startswith("try: curl http://127.0.0.1:8000/v1/completions -H ")
        assert line_with(terminal, "try: baton").startswith("try: baton generate --address 127.0.0.1:50051")
        for at in (1, 2, 3):
            assert line_with(terminal, f"line {at}") == f"router: line {at}"
        assert line_with(terminal, "while it starts") == "router: a line while it starts"
        terminal.signal(signal.SIGTERM)
        assert terminal.wait() == 0
        assert line_with(terminal, "baton: stopped") == "baton: stopped"


@pytest.mark.fast
@pytest.mark.long
def test_generated_text_drives_no_terminal():
    with closing(Terminal(*python(GENERATE))) as terminal:
        assert terminal.wait() == 0
        shown = [line for line in terminal.lines() if line]
        assert shown == ["def f():", r"    return 1  # \x1b[2J\x1b[31mred\x0d\x07 done"]
        assert "\x1b" not in terminal.raw


@pytest.mark.fast
@pytest.mark.long
def test_top_redraws_its_own_screen_and_gives_the_terminal_back():
    with closing(Terminal(*python(TOP))) as terminal:
        terminal.read_until(lambda it: it.raw.count("decode-0") >= 3)
        shown = terminal.lines()
        assert len([line for line in shown if line.startswith("tiny at 127.0.0.1:50051")]) == 1, shown
        assert [line.split()[:3] for line in shown if line.startswith(("prefill-0", "decode-0"))] == [
            ["prefill-0", "prefill", "yes"],
            ["decode-0", "decode", "yes"],
        ]
        terminal.signal(signal.SIGINT)
        assert terminal.wait() == 0
        assert terminal.raw.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.raw


@pytest.mark.ray
@pytest.mark.slow
def test_the_demo_is_right_on_a_terminal():
    with closing(Terminal(sys.executable, "-P", "-m", "baton.cluster", "demo")) as terminal:
        assert terminal.wait() == 0, terminal.lines()
        shown = [line for line in terminal.lines() if line]
        assert not [line for line in shown if any(part in line for part in BAR)], shown
        assert shown[0].startswith("serving at 127.0.0.1:")
        assert line_with(terminal, "identical to one process") == "identical to one process: 3/3"
        assert len([line for line in shown if line.startswith("--- ")]) == 3
