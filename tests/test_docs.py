"""The documentation: pages stay short, and what they name exists: links, files, symbols, commands, flags, metrics."""

import importlib
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from prometheus_client import CollectorRegistry

from baton.cluster import cli
from baton.cluster.cli import runbook_names
from baton.cluster.resolve import read_config
from baton.core.config import ServeConfig
from baton.core.errors import ConfigInvalid
from baton.router.access.security import SecurityMetrics
from baton.router.admission.fair_queue import AdmissionCollector
from baton.router.metrics import RouterMetrics, SpanCollector
from baton.router.openai.connection import ConnectionLimits, Connections
from baton.router.placement.canaries import CanaryCollector
from baton.router.placement.local_prefill import LocalPrefillCollector
from baton.router.placement.prefix_index import FleetPrefixIndex, PrefixCollector
from baton.router.worker_metrics import WorkerCollector
from baton.runbook.common import command

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
MAX_README_LINES = 120
MAX_PAGE_BYTES = 12_000
MAX_COLUMNS = 120
FOREIGN_FILES = {"docker-compose.yaml", "values.yaml"}  # of whoever deploys
HISTORY = {ROOT / "docs" / "log.md", ROOT / "docs" / "renames.md", ROOT / "CHANGELOG.md"}  # what they name may be gone
GENERATED = {ROOT / "docs" / "flags.md", ROOT / "docs" / "transports.md"}
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("runbook/*.md"), *ROOT.glob("deploy/*.md")})
CURRENT = [page for page in PAGES if page not in HISTORY]
TOP = {path.name for path in ROOT.iterdir()}
# Flags of other programs, by whose they are.
FOREIGN_FLAGS = {
    "--restart-only": "ray up",
    "--no-restart": "ray up",
    "--redis-password": "ray start",
    "--appendonly": "redis-server",
    "--gpus": "scripts/gpu_decode.py, and docker",
    "--accept": "tests.kernels.sass, scripts/check_proto.py",
    "--write": "scripts/flags_doc.py",
    "--against": "scripts/kernel_host_time.py",
    "--report": "scripts/tune_kernels.py",
    "--tests": "scripts/sanitize_kernels.py",
    "--only-disconnects": "tests.e2e.soak_run",
    "--enable-tokenizer-info-endpoint": "vLLM",
    "--cacert": "curl",
}


def named(page):
    return str(page.relative_to(ROOT))


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def blocks_of(text) -> Iterator[str]:
    """Code blocks, fenced or indented, but for figures."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        if language != "mermaid":
            yield block
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield "\n".join(line[4:] for line in rest.splitlines() if line.startswith("    "))


def spans_of(text):
    """Inline code."""
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", rest)]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", [page for page in CURRENT if page not in GENERATED], ids=named)
def test_a_page_is_short(page):
    assert page.stat().st_size <= MAX_PAGE_BYTES


def anchors_of(page):
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{named(page)} links to {target}"
        assert not anchor or anchor in anchors_of(other), f"{named(page)} links to {target}"


def test_every_page_is_linked_from_another():
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            linked.add((page.parent / target).resolve())
    assert [named(page) for page in ROOT.glob("docs/*.md") if page not in linked] == []


def paths_in(text):
    """Words of code that are paths of the repository; some in capitals stand for a name."""
    for code in (*spans_of(text), *blocks_of(text)):
        for word in code.split():
            word = word.strip("()[],;:'\"").partition("::")[0].partition(":")[0]
            first = word.partition("/")[0]
            if "/" in word and first in TOP and not re.search(r"(?<![A-Za-z])(NAME|FILE|OUT)(?![A-Za-z])", word):
                yield word


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_every_path_exists(page):
    for path in paths_in(page.read_text()):
        found = list(ROOT.glob(path)) if "*" in path else [ROOT / path] * (ROOT / path).exists()
        assert found, f"{named(page)} names {path}"


@cache
def tracked():
    """Names of all files of the repository, and its source."""
    paths = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        paths += [Path(folder, name) for name in names]
    source = "\n".join(path.read_text() for path in paths if path.suffix == ".py" and "_pb2" not in path.name)
    return {path.name for path in paths}, set(re.findall(r"\w+", source))


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_every_file_and_private_name_exists(page):
    """Of this repository: `cluster.yaml` without a folder, and a constant such as `_FAMILIES`."""
    names, words = tracked()
    for code in spans_of(page.read_text()):
        if re.fullmatch(r"[a-z][\w.]*\.(yaml|toml|md|py)", code) and code not in FOREIGN_FILES:
            assert code in names, f"{named(page)} names {code}"
        if re.fullmatch(r"_[A-Z][A-Z_]+", code):
            assert code in words, f"{named(page)} names {code}"


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_lines_of_prose_are_short_and_say_no_word_twice(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [
        line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "- `")) and line[:4] != "    "
    ]
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []
    prose = " ".join(without_code("\n".join(lines)).replace("*", "").split())
    assert re.findall(r"\b(\w+) \1\b(?! \w+ \1)", prose) == []
    assert re.findall(r"\b(\w+ \w+) an? \1\b", prose) == [], "a thing is called itself"


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_every_symbol_is_in_the_file_that_is_named_with_it(page):
    for symbol, path in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`\s+in\s+`([\w/]+\.py)`", page.read_text()):
        source = (ROOT / path).read_text()
        owner, _, member = symbol.partition(".")
        assert re.search(rf"^(class )?{owner}\b", source, re.MULTILINE), f"{named(page)}: {symbol} in {path}"
        assert not member or re.search(rf"^    (async )?def {member}\b", source, re.MULTILINE), f"{symbol} in {path}"


QUESTIONS = {
    "Where a block's digest is checked": ("hand-off.md", "kvtransfer/receiver/protocol.py", "ReceiverFrames.landed"),
    "A decode worker dies between two tokens": ("failures.md", "router/attempt/continuation.py", "Continuation.failed"),
    "Adding a layer that keeps a recurrent state": ("extending.md", "kvcache/layout.py", "Model.kv_layout"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_a_stranger_asks_first_is_answered_with_the_right_file(question):
    page, path, symbol = QUESTIONS[question]
    text = (ROOT / "docs" / page).read_text()
    answer = text.partition(f"## {question}\n")[2].partition("\n## ")[0]
    assert f"`{path}`" in answer
    assert f"`{symbol}`" in answer


# Commands

BATON = typer.main.get_command(cli.app)


def find_command(words):
    """The command that the words begin with, its context, and the words behind it."""
    found, context, name = BATON, None, "baton"
    while words and words[0] != "--help" and hasattr(found, "commands"):
        context = found.make_context(name, words[:1], parent=context, resilient_parsing=True)
        assert words[0] in found.commands, f"no command {words[0]} of {name}"
        name, found, words = words[0], found.commands[words[0]], words[1:]
    return found, context, name, words


@cache
def runbook_parser(name):
    assert name in runbook_names(), f"no runbook {name}"
    module = importlib.import_module(f"baton.runbook.{name.replace('-', '_')}")
    [runbook] = {value for value in vars(module).values() if isinstance(value, command.Runbook)}
    return command._parser(runbook)


def runbook_options(name):
    return {option for action in runbook_parser(name)._actions for option in action.option_strings}


def parse(words):
    """Parse the words of a command line, as the command itself would; nothing is run."""
    found, context, name, rest = find_command(words)
    if name != "runbook":
        given = found.make_context(name, list(rest), parent=context).params
        if name == "serve":  # whose values the configuration checks
            read_config(None, {key: value for key, value in given.items() if key in ServeConfig.model_fields})
    elif rest:
        runbook_parser(rest[0]).parse_args(rest[1:])


def commands_of(page) -> Iterator[list[str]]:
    """Every call of `baton` in the code blocks of a page."""
    for block in blocks_of(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.match(r"(?:[A-Z_]+=\S+ +)*baton ", line):
                continue
            line = re.sub(r"\$'((?:[^'\\]|\\.)*)'", r"'\1'", line)
            words = shlex.split(line, comments=True)
            words = words[next(place for place, word in enumerate(words) if word == "baton") + 1 :]
            for operator in (">", "|", "&&", "&"):
                words = words[: words.index(operator)] if operator in words else words
            yield words


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_every_command_line_parses(page):
    for words in commands_of(page):
        try:
            parse(words)
        except SystemExit as exit:
            raise AssertionError(f"{named(page)}: baton {shlex.join(words)}: exit {exit.code}") from exit
        except Exception as error:
            raise AssertionError(f"{named(page)}: baton {shlex.join(words)}: {error}") from error


def test_the_pages_have_commands_to_parse():
    assert sum(len(list(commands_of(page))) for page in CURRENT) > 40


@pytest.mark.parametrize(
    "line",
    [
        "serve --prefil 1",
        "serve --tp-prefill 3",
        "serve --num-speculative-tokens 7",
        "bench steps",
        "drain",
        "runbook scale --decod 1",
        "runbook nothing",
    ],
)
def test_what_no_command_takes_is_refused(line):
    with pytest.raises((typer.TyperException, ConfigInvalid, AssertionError)):
        parse(line.split())


def options_of(found):
    params = found.get_params(typer.Context(found))  # flags that are keys are made when they are first asked for
    return {option for param in params for option in (*param.opts, *param.secondary_opts)} | {"--help"}


def all_options(found=BATON):
    own = options_of(found)
    return own.union(*(all_options(sub) for sub in getattr(found, "commands", {}).values()))


MESSAGES = sorted({*ROOT.glob("cluster/*.py"), *ROOT.glob("runbook/**/*.py")})


def placeholders_out(words):
    """The words before the first in capitals that stands for a name."""
    return words[: next((place for place, word in enumerate(words) if re.fullmatch("[A-Z]{3,}", word)), len(words))]


@pytest.mark.parametrize("page", [*CURRENT, *MESSAGES], ids=named)
def test_every_command_that_a_page_or_a_message_names_exists_with_its_flags(page):
    text = page.read_text()
    for code in spans_of(text) if page.suffix == ".md" else re.findall(r"`([^`\n]+)`", text):
        words = code.split()
        if words[:1] != ["baton"] or len(words) == 1:
            continue
        found, _, name, rest = find_command(placeholders_out(words[1:]))
        options = options_of(found)
        if name == "runbook" and len(words) > 2:
            of = rest[:1] or runbook_names()  # what is said of NAME holds for all
            options |= set.intersection(*map(runbook_options, of))
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= options, f"{named(page)}: {code}"


FLAG = r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]"
VLLMS = ROOT / "docs" / "openai-parameters.md"  # has a column of vLLM's flags


@pytest.mark.parametrize("page", [page for page in CURRENT if page not in GENERATED | {VLLMS}], ids=named)
def test_every_flag_exists(page):
    known = all_options().union(FOREIGN_FLAGS, *map(runbook_options, runbook_names()))
    known |= {"--address", "--rounds"}  # of modules that are run by python -m, too
    for code in spans_of(page.read_text()):
        for flag in re.findall(FLAG, code):
            assert flag in known, f"{named(page)}: {code}"


def test_every_exception_of_a_flag_is_needed():
    named_somewhere = {
        flag for page in CURRENT for code in spans_of(page.read_text()) for flag in re.findall(FLAG, code)
    }
    assert FOREIGN_FLAGS.keys() <= named_somewhere
    assert not FOREIGN_FLAGS.keys() & all_options()


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_every_module_and_target_that_is_run_exists(page):
    text = page.read_text()
    for module in re.findall(r"python3? (?:-P )?-m (baton[\w.]+)", text):
        path = ROOT.joinpath(*module.split(".")[1:])
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{named(page)}: {module}"
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in (*spans_of(text), *blocks_of(text)):
        for target in re.findall(r"^make ([a-z][\w-]*)", code, re.MULTILINE):
            assert target in targets, f"{named(page)}: make {target}"


# Metrics


@pytest.fixture(scope="module")
def metrics():
    """Names of all metrics of a router and its workers, without their prefix."""
    router = RouterMetrics()
    SecurityMetrics(router.registry)
    Connections(ConnectionLimits(max_connections=1), router.registry)
    nothing = SimpleNamespace(counts={}, choices={}, num_waiting=0, num_refused={}, all=tuple, gone=tuple)
    others = CollectorRegistry()
    for collector in (
        WorkerCollector(nothing),
        SpanCollector(lambda: 0),
        AdmissionCollector(nothing),
        LocalPrefillCollector(nothing),
        PrefixCollector(FleetPrefixIndex()),
        CanaryCollector(nothing, nothing, nothing),
    ):
        others.register(collector)
    families = [*router.registry.collect(), *others.collect()]
    return {family.name.removeprefix("baton_") for family in families}


def test_the_page_of_metrics_has_every_metric_and_no_other(metrics):
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## Metrics\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(told) == len(set(told))
    assert set(told) == metrics


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_every_metric_exists(page, metrics):
    for name in re.findall(r"`baton_([a-z_0-9]+)(?:\{|`|\*)", page.read_text()):
        base = name.removesuffix("_total")
        assert base in metrics or any(metric.startswith(base) for metric in metrics if base.endswith("_")), name


def test_git_ignores_the_folders_of_keys_that_the_recipe_makes():
    """Otherwise `git add -A` in the operator's checkout commits private keys."""
    text = "\n".join(blocks_of((ROOT / "docs" / "several-hosts.md").read_text()))
    text += "\n".join(spans_of((ROOT / "docs" / "several-hosts.md").read_text()))
    made = set(re.findall(r"mkdir -m 700 (\w+)|certificates make (\w+)", text))
    folders = {folder for pair in made for folder in pair if folder}
    assert folders == {"secrets", "tls", "ray_secrets"}
    assert {f"/{folder}/" for folder in folders} <= set((ROOT / ".gitignore").read_text().split())
