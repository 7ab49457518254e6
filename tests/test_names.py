"""One word, one meaning: names that the glossary (docs/concepts.md) has retired do not come back.

Identifiers, file names, keys and flags, metrics, messages of the protocol and error texts are compared, and prose for
the words that have no other sense in it. A word that is good English is tested as the whole identifiers that it stood
for.
"""

import ast
import functools
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

from baton.core.config import ServeConfig
from baton.core.config_key import keys_of

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
# A part of a name, and what is said instead.
PARTS = {
    "gang": "tp_group",
    "gangs": "tp_groups",
    "seat": "rank_place",
    "outbox": "send_queue",
    "cork": "write_coalescer",
    "bundle": "stream_mux",
    "bundles": "stream_muxes",
    "wishes": "desired_state",
    "wish": "desired",
    "suspicion": "poison_detector",
    "attendance": "in_flight_tracker",
    "doorman": "authenticator",
    "life": "incarnation",
    "lives": "incarnations",
    "landing": "incoming, receiver",
    "landings": "incoming_transfers",
    "sealed": "complete",
    "widen": "dequantize",
    "widened": "dequantized",
    "lane": "data_path, executor",
    "lanes": "data_paths, executors",
}
# Whole names, of words that are good English elsewhere.
NAMES = {
    "Door": "Authenticator",
    "DoorLimits": "ClientLimits",
    "Guard": "AuthInterceptor",
    "Presence": "InFlightRequests",
    "LeadRunner": "Rank0Runner",
    "FollowRunner": "RankRunner",
    "PrefillFollower": "PrefillRankPush",
    "SharePlans": "SplitKVPlans",
    "num_attends": "num_requests",
    "Gate": "AdmissionQueue, RequestLimit, WriteFence",
    "FairRing": "DeficitRoundRobin",
    "Gap": "LayerRange",
    "Asked": "RequestNeeds, CompletionArguments",
    "ChoiceRows": "DrawRows",
    "choice_rows": "draw_rows",
    "choosing": "sampling_implementation",
    "FairTurns": "StartTimeFairQueue",
    "ReadingTurns": "ReadingQueue",
    "Turn": "AdmissionTicket, InputMessage",
    "Share": "OwnerUsage",
    "Piece": "ScatterRange",
    "PieceCursor": "BufferCursor",
    "Product": "GroupedGemm",
    "PushPart": "PushRange",
    "take_product": "take_linear",
    "product_rows": "matmul_rows",
    "latent_products": "latent_linears",
    "delta_products": "delta_linears",
    "PushedPart": "PushedRange",
}
# Flags that had another name once; what stands there is what vLLM calls it, where the meaning is the same.
FLAGS = {
    "chunk_len": "max_num_batched_tokens",
    "gpu_memory_share": "gpu_memory_utilization",
    "mtp": "num_speculative_tokens",
    "weights": "load_format",
    "kv_dtype": "kv_cache_dtype",
    "host_kv_gib": "kv_offloading_size",
}
# Names that are not ours to choose, or mean something else; each with its reason.
ALLOWED = {
    "placement_group_bundle_index": "Ray's",
    "BUNDLE_CPUS": "a bundle of a Ray placement group",
    "bundle": "a bundle of a Ray placement group (cluster)",
    "bundles": "the same",
    "lane_bound": "the lanes of a warp",
    "lane_L": "the same",
}
# Words of prose, and what is said instead: in comments, docstrings, texts and docs. `lives` as a verb is fine.
WORDS = {
    r"whoever|whomever|somebody|nobody|anybody|everybody": "the component: the caller, no rank, every worker",
    r"landings?": "incoming transfer",
    r"mixtures?(?!.of.experts)": "MoE layer, MoE output",
    r"(?:the library's|float8|grouped|masked|matrix) products?": "GEMM, matmul",
    r"(?:un)?sealed|seals?": "complete",
    r"wish(?:es)?": "desired state, request",
    r"newcomers?": "new requests",
    r"(?:gives?|gave|giving) way": "is preempted, is evicted",
    r"(?:a|the|their|its|whose|\w+'s?|in|of|through|former|past|present|new|all|both|many|live|prefill|decode) lives"
    r"|lives (?:of|lost|begun|gone|ended|that)": "incarnations",
}
PAST = ("CHANGELOG.md", "docs/log.md", "docs/renames.md")  # they say what was, in the words of its time
COMP = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
GENERATED = ("_pb2", "_pb2_grpc")
SENTENCE_NAMES = ("test_",)  # of tests: they are prose


def files(*patterns):
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in found.splitlines()]


def parts(name):
    found = [part.lower() for part in COMP.findall(name)]
    return [part for before, part in zip(["", *found], found, strict=False) if before != "half"]  # a half-life decays


@functools.cache
def retired(name):
    """What is to be said instead of a name, or of a part of it; empty if it is fine."""
    if name in ALLOWED or name.startswith(SENTENCE_NAMES):
        return ""
    return NAMES.get(name) or next((PARTS[part] for part in parts(name) if part in PARTS), "")


def names_in(path):
    """Those that are retired and lie in code; only files that have one anywhere are worth a tokenizer's time."""
    text = path.read_text()
    if not any(map(retired, set(re.findall(r"[^\W\d]\w*", text)))):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.string, token.start[0]


def test_no_identifier_has_a_retired_name():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: {retired(name)}"
        for path in files("*.py")
        if not path.stem.endswith(GENERATED) and path != Path(__file__)
        for name, line in names_in(path)
        if retired(name)
    ]
    assert found == []


def test_no_file_or_folder_has_a_retired_name():
    names = {part for path in files() for part in path.relative_to(ROOT).with_suffix("").parts}
    assert {name: retired(name.replace("-", "_")) for name in names if retired(name.replace("-", "_"))} == {}


def test_no_message_of_the_protocol_has_a_retired_name():
    code = "\n".join(
        line.partition("//")[0] for path in files("proto/*.proto") for line in path.read_text().split("\n")
    )
    names = set(re.findall(r"[A-Za-z_]\w*", code))
    assert {name: retired(name) for name in names if retired(name)} == {}


def test_no_flag_has_a_retired_name():
    flags = keys_of(ServeConfig)
    assert flags.keys() & FLAGS.keys() == set()
    assert set(FLAGS.values()) <= flags.keys()
    assert {name: retired(name) for name in flags if retired(name)} == {}


def texts_in(path):
    """Strings that a program may say: all but docstrings."""
    tree = ast.parse(path.read_text())
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value, node.lineno


# What a text that says such a word has in its source, however the text is put together.
HINT = re.compile("gang|outbox|cork|doorman|life|lane")
PROSE = re.compile(r"\b(gangs?|outbox|cork|doorman|lanes?|(?:another|one|this|a|its) life of)\b")


def test_no_text_says_a_retired_word():
    """Metrics, errors, help and logs among them."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word[0]}"
        for path in files("*.py")
        if path.relative_to(ROOT).parts[0] not in ("tests", "scripts") and HINT.search(path.read_text())
        for text, line in texts_in(path)
        for word in PROSE.finditer(text)
    ]
    assert found == []


RETIRED_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b".replace(" ", r"[\s#]+"))  # of small letters, which is faster


def instead_of(word):
    word = re.sub(r"[\s#]+", " ", word.lower())
    return next(better for words, better in WORDS.items() if re.fullmatch(words, word))


def retired_words(text):
    """(line, word) of each; it may go on in the next line. A constant that prose names is code."""
    found = [(each.start(), text[slice(*each.span())]) for each in RETIRED_WORD.finditer(text.lower())]
    return [(1 + text.count("\n", 0, start), word) for start, word in found if not word.isupper()]


SAID = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def prose_of(source):
    """Comments, docstrings and texts of a Python file where they stand; names and numbers are left out."""
    lines = [[" "] * len(line) for line in source.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in SAID:
            column = token.start[1]
            for number, text in enumerate(token.string.split("\n"), token.start[0] - 1):
                lines[number][column : column + len(text)] = text
                column = 0
    return "\n".join(map("".join, lines))


def test_no_prose_says_a_retired_word():
    """Comments, docstrings and texts of Python, comments of the protocol, docs, runbooks, the dashboard and alerts."""
    found = []
    for path in files("*.py", "*.md", "*.proto", "*.yaml", "deploy/*"):
        name = str(path.relative_to(ROOT))
        if name in PAST or name.startswith(("tests/", "assets/", "benchmarks/")) or path.stem.endswith(GENERATED):
            continue
        words = retired_words(text := path.read_text())
        if words and path.suffix == ".py":  # else no tokenizer's time is spent on it
            words = retired_words(prose_of(text))
        found += [f"{name}:{line}: {word}: {instead_of(word)}" for line, word in words]
    assert found == []


@pytest.mark.parametrize(
    "said",
    [
        "Whoever holds it frees it.",
        "read by nobody",
        "the workers' lives",
        "Lives of a worker",
        "of earlier and present\n    # lives",
        "the transfer was not sealed",
        "it gives way",
        "Products of a mixture",
        "a float8\n    # product",
    ],
)
def test_a_retired_word_of_prose_is_seen(said):
    [(_, word)] = retired_words(said)
    assert instead_of(word)


@pytest.mark.parametrize(
    "said",
    ["as long as it lives", "no worker lives", "the store lives in memory", "NOBODY, as before", "mixture-of-experts"],
)
def test_a_word_that_is_good_english_is_not(said):
    assert retired_words(said) == []


def test_prose_is_comments_docstrings_and_texts():
    source = '"""Nobody."""\nnobody = wish = f"whoever"  # sealed\nlanding = """\n  everybody\n"""\n'
    assert retired_words(prose_of(source)) == [
        (1, "Nobody"),
        (2, "whoever"),
        (2, "sealed"),
        (4, "everybody"),
    ]


@pytest.mark.parametrize("name", ["GangLink", "num_landings", "_wishes", "LIFE_S", "Door", "open_outbox", "PushLane"])
def test_a_retired_name_is_seen(name):
    assert retired(name)


@pytest.mark.parametrize("name", ["lifetime_s", "presence_penalty", "doors_of", "wide", "half_life_s", "incarnation"])
def test_a_name_that_means_something_else_is_not(name):
    assert not retired(name)


def test_no_two_classes_share_a_name():
    """Private ones aside, and what tests and scripts have for themselves."""
    found = {}
    for path in files("*.py"):
        if path.relative_to(ROOT).parts[0] not in ("tests", "scripts") and not path.stem.endswith(GENERATED):
            for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
REFERENCE = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+)(?<!safetensors)`")


def is_there(reference):
    """Whether a module has that path, and in it stands what is named of it."""
    parts = reference.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        module = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if module.is_file():
            text = module.read_text()
            return all(re.search(rf"\b{name}\b", text) for name in parts[count:])
    return False


def test_prose_names_modules_that_exist():
    """Comments, docstrings and texts: modules move, and what is said of them stays behind."""
    found = []
    for path in files("*.py"):
        name = str(path.relative_to(ROOT))
        if not name.startswith("tests/") and not path.stem.endswith(GENERATED):
            for each in set(REFERENCE.findall(prose_of(path.read_text()) if "`" in path.read_text() else "")):
                found += [] if is_there(each) else [f"{name}: {each}"]
    assert found == []


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("kernels.gemm", True),
        ("kernels.gemm.linear", True),
        ("kernels.gemm.linear.linear_vector", True),
        ("kernels.gemm.linear_vector", False),
        ("kernels.gemm.linear.linear_gone", False),
        ("engine.gone", False),
    ],
)
def test_a_module_that_is_gone_is_seen(reference, found):
    assert is_there(reference) is found
