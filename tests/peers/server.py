"""The fixture that vLLM's tests ask for their server: one `baton serve` for all of them, under every name they use."""

import atexit
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import openai
from tokenizers import Tokenizer

import baton

NUM_POSITIONS = 8192
ROCM_EXTRA_ARGS = []
ROCM_ENV_OVERRIDES = {}
VLLM_PATH = Path("/nonexistent")
_running = {}


def _names():
    """Every model that a test names: a quoted ORGANISATION/MODEL, or what follows a server's --served-model-name."""
    found = {"tiny"}
    for path in Path(__file__).parent.rglob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r'"([A-Za-z][\w.-]+/[A-Za-z][\w.-]+)"', text))
        found |= set(re.findall(r'"--served-model-name",\s*"([\w.-]+)"', text))
    return sorted(name for name in found if not name.startswith(("application/", "text/", "v1/")))


def model_directory():
    """The bundled model, with the positions that the tests count on, and a template and ends of answers as theirs have.

    It was taught no chats, so that by itself it would end none. Here the end of a line ends an answer, too,
    if no quotes stand before it: its answers like to begin with them.
    """
    if "model" not in _running:
        tiny = Path(baton.__path__[0]) / "assets" / "tiny"
        template = Path(baton.__path__[0]) / "router" / "openai" / "chatml.jinja"
        directory = Path(tempfile.mkdtemp(prefix="baton-peers-")) / "tiny"
        atexit.register(shutil.rmtree, directory.parent)
        shutil.copytree(tiny, directory)
        for name, more in (
            ("config.json", {"max_position_embeddings": NUM_POSITIONS}),
            ("generation_config.json", {"eos_token_id": _ends_of_answers(directory)}),
            ("tokenizer_config.json", {"chat_template": template.read_text(), "model_max_length": NUM_POSITIONS}),
        ):
            path = directory / name
            path.write_text(json.dumps(json.loads(path.read_text()) | more))
        _running["model"] = directory
    return _running["model"]


def _ends_of_answers(directory):
    """The model's own end first, then every token without quotes with which a line ends."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    own = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    return [
        own,
        *(
            at
            for at in range(tokenizer.get_vocab_size())
            if re.fullmatch(
                r"""[^"']*
""",
                tokenizer.decode([at]),
            )
        ),
    ]


def _serve():
    command = [sys.executable, "-m", "baton.cluster", "serve", "--json", "--model", str(model_directory())]
    command += ["--grpc-port", "0", "--http-port", "0", "--max-num-seqs", "32", "--kv-memory-mib", "512"]
    for name in _names():
        command += ["--served-model-name", name]
    log = Path(tempfile.gettempdir(), f"baton-peers-{os.getpid()}.log").open("w+")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/")

    def end():
        process.send_signal(signal.SIGTERM)
        process.wait(60)

    atexit.register(end)
    line = process.stdout.readline()
    if not line:
        log.seek(0)
        raise RuntimeError(log.read()[-4000:])
    return json.loads(line)["http_url"]


def url():
    """Of the one server; starts it if need be."""
    if "url" not in _running:
        _running["url"] = _serve()
    return _running["url"]


class RemoteOpenAIServer:
    """What vLLM's class of this name offers to tests; flags and environments of the served engine are not passed on."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, vllm_serve_args=None, **options):
        self._url = url()
        host, _, port = self._url.removeprefix("http://").rpartition(":")
        self.host, self.port, self.uds = host, int(port), None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    @property
    def url_root(self):
        return self._url

    def url_for(self, *parts):
        return "/".join((self.url_root, *(part.strip("/") for part in parts)))

    def get_client(self, **options):
        options.setdefault("timeout", 120)
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options):
        options.setdefault("timeout", 120)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_client_anthropic(self, **options):
        import anthropic

        return anthropic.Anthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options):
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **options)


def create_new_process_for_each_test(*arguments, **options):
    return lambda function: function


def multi_gpu_test(*arguments, **options):
    return lambda function: function
