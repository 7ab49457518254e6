"""The command line: every documented flag, exit codes, one JSON object, and what to do next."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from typer.testing import CliRunner

from baton.cluster import cli
from baton.core.build import build_id
from baton.core.config import ServeConfig

DESIGN_SERVE_FLAGS = (
    "model prefill decode tp-prefill tp-decode num-speculative-tokens transport scheduling dtype load-format grpc-port "
    "http-port ray-address config"
).split()
DESIGN_GENERATE_FLAGS = (
    "address local prompt max-tokens temperature top-p top-k min-p seed model num-speculative-tokens batch-invariant "
    "dtype"
).split()


BATON = [sys.executable, "-P", "-m", "baton.cluster"]


def baton(*arguments, stdin=b"", environment=None):
    """Run the real command; (exit code, stdout, stderr)."""
    done = subprocess.run([*BATON, *arguments], input=stdin, capture_output=True, timeout=60, env=environment)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def flags_of(command):
    result = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return {word.strip(",") for word in result.output.split() if word.startswith("--")}


@pytest.mark.fast
def test_serve_has_a_flag_for_every_key_and_every_documented_flag():
    flags = flags_of("serve")
    assert {f"--{name.replace('_', '-')}" for name in ServeConfig.model_fields} <= flags
    assert {f"--{name}" for name in DESIGN_SERVE_FLAGS} <= flags
    named = {flag for flag in flags if not flag.startswith("--no-")}
    assert named - {"--config", "--json", "--help"} == {f"--{k.replace('_', '-')}" for k in ServeConfig.model_fields}
    assert {f"--{flag.removeprefix('--no-')}" for flag in flags - named} <= named


def help_of(command):
    result = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.fast
@pytest.mark.long
def test_the_help_of_serve_is_in_panels_and_says_defaults():
    text = help_of("serve")
    panels = re.findall(r"╭─ (.+?) ─", text)
    wanted = "Options, Model, Parallelism, Speculation, KV cache, Scheduling, Ports and addresses, Limits and times"
    assert panels == [*wanted.split(", "), "Logging and tracing", "Security"]
    for default in (
        "[127.0.0.1]",
        "[auto]",
        "[GPU 4096, 8192 with many experts; CPU 256]",
        "[up to 2 by a head, as measured; 4 by ngram; else 0]",
    ):
        assert default in text
    assert "\\[" not in text
    assert "[never]" in help_of("keys create")
    assert "\\[" not in help_of("bench decode")


@pytest.mark.fast
def test_commands_are_summed_up_in_whole_sentences_and_unbuilt_ones_are_not_listed():
    text = help_of("")
    assert "..." not in text.partition("Commands")[2]
    assert "plan" not in re.findall(r"│ (\w+) ", text)
    assert {"serve", "check", "generate", "demo", "doctor", "top"} <= set(re.findall(r"│ (\w+) ", text))


@pytest.mark.fast
def test_generate_has_every_documented_flag():
    assert {f"--{name}" for name in DESIGN_GENERATE_FLAGS} <= flags_of("generate")


@pytest.mark.fast
@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "generate",
        "bench kv",
        "bench decode",
        "bench kernels",
        "bench serve",
        "status",
        "speculation",
        "doctor",
        "top",
        "plan",
    ],
)
@pytest.mark.long
def test_every_command_exists_and_has_json(command):
    assert "--json" in flags_of(command)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["bench", "kv", "--systems", "pigeon"], 2, "ConfigInvalid"),
        (["bench", "kv", "--pace", "4"], 2, "ConfigInvalid"),
        (["bench", "serve", "pigeon", "--url", "http://localhost"], 2, "ConfigInvalid"),
        (["bench", "serve", "streams", "--url", "localhost"], 2, "ConfigInvalid"),
        (["bench", "decode", "--shape", "9b"], 2, "ConfigInvalid"),
        (["bench", "decode", "--batch", "1,x"], 2, "ConfigInvalid"),
        (["bench", "decode", "--num-speculative-tokens", "9"], 2, "ConfigInvalid"),
        (["bench", "decode", "--scheduling", "never"], 2, "ConfigInvalid"),
        (["bench", "decode", "--rate", "1.5"], 2, "ConfigInvalid"),
        (["bench", "decode", "--temperature", "-1"], 2, "ConfigInvalid"),
        (["bench", "decode", "--steps", "0"], 2, "ConfigInvalid"),
        (["bench", "decode", "--device", "tpu"], 2, "ConfigInvalid"),
        (["bench", "decode", "--dtype", "int8"], 2, "ConfigInvalid"),
        (["bench", "kernels", "--device", "cpu", "--only", "pigeon"], 2, "ConfigInvalid"),
        (["bench", "kernels", "--device", "tpu"], 2, "ConfigInvalid"),
        (["bench", "kernels", "--device", "cuda"], 2, "ConfigInvalid"),
        (["bench", "kernels", "--rounds", "0"], 2, "ConfigInvalid"),
        (["bench", "decode", "--shape", "tiny", "--device", "cpu", "--prompt-len", "5000"], 2, "ConfigInvalid"),
        (["top", "--address", "127.0.0.1:1"], 3, "StartupError"),
        (["top", "--interval", "0"], 2, "ConfigInvalid"),
        (["top", "--interval", "nan"], 2, "ConfigInvalid"),
        (["serve", "--log-format", "xml"], 2, "ConfigInvalid"),
        (["serve", "--trace-file", "x", "--trace-endpoint", "http://y"], 2, "ConfigInvalid"),
        (["plan", "--rate", "3"], 3, "FeatureNotBuilt"),
        (["serve", "--tp-prefill", "3"], 2, "ConfigInvalid"),
        (["serve", "--tp-decode", "16"], 2, "ConfigInvalid"),
        (["serve", "--http-port", "80000"], 2, "ConfigInvalid"),
        (["generate", "--prompt", "x", "--logit-bias", "7"], 2, "InvalidSampling"),
        (["generate", "--prompt", "x", "--bad-words", "7;8"], 2, "InvalidSampling"),
        (["generate", "--prompt", "x", "--allowed-token-ids", ""], 2, "InvalidSampling"),
        (["generate", "--prompt", "x", "--n", str(2**31)], 2, "InvalidSampling"),
        (["serve", "--num-speculative-tokens", "7"], 2, "ConfigInvalid"),
        (["serve", "--decode", "0"], 2, "ConfigInvalid"),
        (["serve", "--prefill", "0", "--local-prefill", "never"], 2, "ConfigInvalid"),
        (["serve", "--transport", "pigeon"], 2, "ConfigInvalid"),
        (["serve", "--config", "/nowhere.yaml"], 2, "ConfigInvalid"),
        (["serve", "--num-speculative-tokens", "²"], 2, "ConfigInvalid"),
        (["serve", "--num-speculative-tokens=--1"], 2, "ConfigInvalid"),
        (["serve", "--model", ""], 2, "ConfigInvalid"),
        (["serve", "--host", "nosuch.invalid"], 2, "ConfigInvalid"),
        (["serve", "--kv-memory-mib", "9" * 23], 2, "ConfigInvalid"),
        (["serve", "--model", "~nosuch/x"], 3, "ModelMissing"),
        (["serve", "--no-such-flag"], 2, "Usage"),
        (["doctor", "--grpc-port", "70000"], 2, "Usage"),
        (["serve", "--prefill", "many"], 2, "Usage"),
        (["serve", "--model", "/nowhere"], 3, "ModelMissing"),
        (["generate", "--local", "--prompt", "x", "--model", "/nowhere"], 3, "ModelMissing"),
        (["generate", "--prompt", "x", "--local", "--address", "localhost:1"], 2, "ConflictingOptions"),
        (["generate", "--prompt", "x", "--model", "tiny"], 2, "ConflictingOptions"),
        (["generate", "--local", "--prompt", "x", "--device", "cuda"], 2, "ConfigInvalid"),
        (["bench", "kernels", "--device", "cuda"], 2, "ConfigInvalid"),
        (["generate"], 2, "EmptyPrompt"),
        (["generate", "--prompt", "x", "--regex", "a", "--json-object"], 2, "ConflictingOptions"),
        (["generate", "--prompt", "x", "--json-schema", "/nowhere"], 2, "InvalidGrammar"),
        (["status", "--address", "127.0.0.1:1"], 3, "StartupError"),
        (["generate", "--prompt", "x", "--address", "127.0.0.1:1"], 3, "StartupError"),
    ],
)
def test_a_refusal_has_its_code_one_object_and_a_next_step(arguments, code, error, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["baton", *arguments, "--json"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    captured = capsys.readouterr()
    assert exit.value.code == code
    data = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert (data["error"], data["exit_code"]) == (error, code)
    assert data["message"]
    assert data["next"]
    assert data["message"].splitlines()[0] in captured.err
    assert "next: " in captured.err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "help_of"),
    [
        (["servve"], "baton"),
        (["--nothing"], "baton"),
        (["serve", "--prefil", "2"], "baton serve"),
        (["keys", "create", "ada"], "baton keys create"),
        (["bench", "steps"], "baton bench"),
        (["bench", "kv", "--seed", "-1"], "baton bench kv"),
    ],
)
@pytest.mark.long
def test_a_usage_error_names_the_help_that_there_is(arguments, help_of, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"next: see `{help_of} --help`"
    flags_of(help_of.removeprefix("baton"))


@pytest.mark.fast
def test_it_says_its_version_and_the_build_that_workers_report(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["baton", "--version"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    assert re.fullmatch(rf"baton \S.*, build {build_id()}\n", capsys.readouterr().out)


@pytest.mark.fast
@pytest.mark.parametrize("flags", [["--quantization", "fp8", "--dtype", "float32"], ["--kernels", "triton"]])
def test_flags_that_do_not_go_with_a_model_are_to_be_changed_and_not_the_model(flags, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["baton", "generate", "--local", "--device", "cpu", "--prompt", "x", *flags])
    with pytest.raises(SystemExit):
        cli.main()
    told = capsys.readouterr().err
    assert flags[0].strip("-") in told
    assert "next: " in told
    assert "--help lists every option" in told


@pytest.mark.fast
def test_keys_of_a_file_are_checked_and_flags_override_them(tmp_path, capsys, monkeypatch):
    from baton.cluster.resolve import read_config

    path = tmp_path / "serve.yaml"
    path.write_text("model: /some/model\ngrpc-port: 6000\nprefill: 2\nnum-speculative-tokens: 3\n")
    config = read_config(path, {"grpc_port": 7000, "num_speculative_tokens": "1", "decode": None})
    assert (config.model, config.grpc_port, config.prefill) == ("/some/model", 7000, 2)
    assert config.num_speculative_tokens == 1
    path.write_text("prefil: 2\n")
    monkeypatch.setattr(sys, "argv", ["baton", "serve", "--config", str(path), "--json"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    data = json.loads(capsys.readouterr().out)
    assert (data["error"], data["fields"]["keys"]) == ("ConfigInvalid", ["prefil"])


@pytest.mark.long
def test_allowed_origins_come_from_the_flag_to_the_replies(monkeypatch):
    """The router that `baton serve` would start, without workers: what a browser is told of two pages."""
    from baton.cluster.commands import serve
    from baton.cluster.outcome import ExitCode
    from baton.cluster.resolve import find_model
    from baton.cluster.router_process import router_command

    found = {}

    def started(config, output):
        command = router_command(config, find_model(config.model))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            port = json.loads(process.stdout.readline())["http_port"]
            for page in ("https://a.example", "https://b.example", "https://c.example"):
                asked = urllib.request.Request(f"http://127.0.0.1:{port}/health", headers={"Origin": page})
                with urllib.request.urlopen(asked, timeout=60) as reply:
                    found[page] = reply.status, reply.headers["Access-Control-Allow-Origin"]
            process.stdin.close()  # the router ends with it
        return ExitCode.OK

    monkeypatch.setattr(serve, "serve", started)
    origins = "https://a.example, https://b.example"
    flags = ["--model", "tiny", "--grpc-port", "0", "--http-port", "0", "--allowed-origins", origins]
    monkeypatch.setattr(sys, "argv", ["baton", "serve", *flags])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    assert found == {
        "https://a.example": (200, "https://a.example"),
        "https://b.example": (200, "https://b.example"),
        "https://c.example": (200, None),
    }


@pytest.mark.fast
def test_a_port_in_use_is_refused_before_anything_starts(capsys, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        command = ["baton", "serve", "--model", "tiny", "--grpc-port", port, "--json"]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as exit:
            cli.main()
    assert exit.value.code == 3
    assert json.loads(capsys.readouterr().out)["error"] == "PortInUse"


def test_standard_input_that_is_not_utf8_is_refused():
    code, out, _ = baton("generate", "--prompt", "-", "--json", stdin=b"ab\xff")
    assert code == 2
    assert json.loads(out)["error"] == "InvalidText"
    assert json.loads(out)["fields"]["at"] == 2


def test_without_json_a_failure_leaves_stdout_empty():
    code, out, err = baton("plan")
    assert (code, out) == (3, "")
    assert "next: " in err


def test_help_starts_fast_and_imports_nothing_heavy():
    script = (
        "import sys; sys.argv = ['baton', '--help']\n"
        "from baton.cluster.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert exit.code == 0, exit.code\n"
        "heavy = {'ray', 'torch', 'grpc', 'pydantic', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True)
    assert time.monotonic() - start_s < 10  # 0.2 s on an idle machine


LOCAL = """
import sys
sys.argv = ["baton", "generate", "--local", "--prompt", "-", "--max-tokens", "6", "--json", *sys.argv[1:]]
from baton.cluster.cli import main
try: main()
except SystemExit as exit: code = exit.code
assert "ray" not in sys.modules
sys.exit(code)
"""


def generate_locally(*arguments, prompt="def f(x):\n"):
    command = [sys.executable, "-P", "-c", LOCAL, *arguments]
    done = subprocess.run(command, input=prompt.encode(), capture_output=True, timeout=120)
    return done.returncode, json.loads(done.stdout), done.stderr.decode()


def test_local_generation_needs_no_ray_and_tells_everything():
    code, data, err = generate_locally()
    assert (code, err) == (0, "")
    documented = "text token_ids finish_reason prompt_len ttft_ms tpot_ms num_draft_tokens num_accepted_tokens"
    assert set(documented.split()) <= data.keys()
    assert len(data["token_ids"]) == 6
    assert data["finish_reason"] == "length"
    assert data["ttft_ms"] > 0
    code, again, _ = generate_locally("--num-speculative-tokens", "0", "--batch-invariant", "--dtype", "float64")
    assert again["num_draft_tokens"] == 0
    assert again["prompt_len"] == data["prompt_len"]


def test_local_generation_follows_a_schema(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, 22, "x"]}, "minItems": 1, "maxItems": 2}')
    code, data, _ = generate_locally("--max-tokens", "40", "--json-schema", str(schema))
    assert (code, data["finish_reason"]) == (0, "stop")
    assert set(json.loads(data["text"])) <= {1, 22, "x"}
    code, data, _ = generate_locally("--regex", "(")
    assert (code, data["error"]) == (2, "InvalidGrammar")


@pytest.mark.fast
@pytest.mark.parametrize("command", ["status", "top", "generate --prompt x", "doctor", "drain w"])
def test_an_address_without_a_port_is_an_error_of_usage(command):
    for address in ("foo", "http://127.0.0.1:50051", "127.0.0.1:65536", "127.0.0.1:0", "127.0.0.1:1234567890"):
        found = CliRunner().invoke(cli.app, [*command.split(), "--address", address])
        assert found.exit_code == 2, address
        assert isinstance(found.exception, SystemExit)


@pytest.mark.fast
@pytest.mark.parametrize("group", [[], ["keys"], ["bench"]], ids=" ".join)
def test_without_a_command_that_is_said_and_help_is_shown(group, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["baton", *group])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    said = capsys.readouterr()
    assert (exit.value.code, "Usage:" in said.out) == (2, True)
    assert said.err == f"baton: no command is given\nnext: see `{' '.join(['baton', *group])} --help`\n"


FAIL_OUTPUT = (["runbook"], ["runbook", "--json"], ["generate", "--local", "--prompt", "x", "--max-tokens", "2"])


@pytest.mark.parametrize("arguments", FAIL_OUTPUT, ids=" ".join)
def test_a_stdout_that_takes_nothing_fails_the_command_in_a_sentence(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*BATON, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "baton: cannot write the output: No space left on device\nnext: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", FAIL_OUTPUT, ids=" ".join)
def test_a_closed_stdout_takes_nothing(arguments):
    command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *BATON, *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_closes_a_pipe_is_told_nothing():
    with subprocess.Popen([*BATON, "runbook"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (1, b"")


def test_what_an_encoding_lacks_is_escaped():
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    code, text, said = baton("serve", "--help", environment=environment)
    assert (code, said) == (0, "")
    assert "\\u2026" in text, "of what is cut"
