"""Write the tables of docs/flags.md and docs/transports.md from the declarations that they are about.

python scripts/flags_doc.py            # ends with 1 if a file is not what the declarations say
python scripts/flags_doc.py --write    # makes it so; after each change of a key or a transport
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from baton.core.config import ServeConfig
from baton.core.config_key import ConfigKey, keys_of
from baton.core.kv_transports import KV_TRANSPORTS, KVTransport, control_channel, data_path_order

DOCS = Path(__file__).resolve().parents[1] / "docs"
FLAGS_HEAD = """# Flags of `baton serve`
<!-- scripts/flags_doc.py writes this file from core/config.py -->

Each is also a key of the YAML file that `--config` names, with `_` for `-`; flags override the file. A flag that is on
or off is turned off by `--no-` before its name. The last column is vLLM's flag (or variable) of the same meaning; its
values may differ.
"""
TRANSPORTS_HEAD = """# KV transports
<!-- scripts/flags_doc.py writes this file from core/kv_transports.py -->

`--transport` selects how KV travels from a prefill worker P to a decode worker D. `auto` takes the best transport that
each pair of workers can prove to work: {auto}. `baton doctor` lists those
that a machine has; `baton doctor --address` shows which data path each pair uses, and why not a better one. Control
messages use a control channel: gRPC for `grpc`, ZMQ for all others. [hand-off.md](hand-off.md) says how the two workers
agree on a transport; [extending.md](extending.md#adding-a-transport) says how to add one.

| `--transport` | Data path | How payloads travel | Who writes D's pool | Pools in | Encrypted by |
|---|---|---|---|---|---|
"""


def flags() -> str:
    """A table for each panel of the help, a line for each key."""
    parts = [FLAGS_HEAD]
    for panel, keys in itertools.groupby(keys_of(ServeConfig).values(), key=lambda key: key.panel):
        parts.append(f"\n## {panel}\n| Flag | Default | Meaning | vLLM |\n|---|---|---|---|\n")
        parts += map(_line, keys)
    return "".join(parts)


def _line(key: ConfigKey) -> str:
    value = "|".join(key.choices) or (f"<{key.metavar}>" if key.metavar else "")
    flag, _, part = key.vllm.partition(" ")
    vllm = f"`{flag}` {part}".rstrip() if flag else ""
    cells = (f"`{key.flag} {value}".rstrip() + "`", key.default, key.text, vllm)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def transports() -> str:
    """A line for each transport, and how another is added."""
    data_paths = {declared.data_path: name for name, declared in reversed(KV_TRANSPORTS.items()) if declared.is_auto}
    auto = ", ".join(f"`{data_paths[data_path]}`" for data_path in data_path_order("auto"))
    lines = (_transport(name, declared) for name, declared in KV_TRANSPORTS.items())
    return TRANSPORTS_HEAD.format(auto=auto) + "".join(lines)


def _transport(name: str, declared: KVTransport) -> str:
    keys = {"curve": "`--kv-curve-key-file`", "tls": "`--kv-tls-*`, `--tls-*`"}[control_channel(name).encrypted_by]
    if declared.is_clear:
        keys = "nothing"
    elif declared.is_same_host:
        keys = "nothing: it stays on its host"
    elif declared.data_path != data_path_order(name)[-1]:
        keys += ", with which it goes as `zmq`"
    writer = "P" if declared.is_one_sided else "D"
    cells = (f"`{name}`", f"`{declared.data_path}`", declared.text, writer, declared.memory or "any", keys)
    return "| " + " | ".join(cells) + " |\n"


DOCUMENTS: Mapping[str, Callable[[], str]] = {"flags.md": flags, "transports.md": transports}


def main(arguments: Sequence[str]) -> int:
    """The script; 1 if a file is stale and stays so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files")
    options = parser.parse_args(arguments)
    is_stale = False
    for name, document in DOCUMENTS.items():
        path, text = DOCS / name, document()
        if options.write:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"docs/{name} is stale: run python scripts/flags_doc.py --write", file=sys.stderr)
            is_stale = True
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
