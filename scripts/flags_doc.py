"""Write docs/flags.md, the table of `baton serve`'s flags, from the declarations in `core/config.py`.

python scripts/flags_doc.py            # ends with 1 if the file is not what the declarations say
python scripts/flags_doc.py --write    # makes it so; after each change of a key
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.core.config import ServeConfig
from baton.core.config_key import ConfigKey, keys_of

PATH = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
HEAD = """# Flags of `baton serve`
<!-- scripts/flags_doc.py writes this file from core/config.py -->

Each is also a key of the YAML file that `--config` names, with `_` for `-`; flags override the file. A flag that is on
or off is turned off by `--no-` before its name. The last column is vLLM's flag (or variable) of the same meaning; its
values may differ.
"""


def document() -> str:
    """The file's text: a table for each panel of the help, a line for each key."""
    parts = [HEAD]
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


def main(arguments: Sequence[str]) -> int:
    """The script; 1 if the file is stale and stays so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file")
    options = parser.parse_args(arguments)
    text = document()
    if options.write:
        PATH.write_text(text, encoding="utf-8")
    elif not PATH.is_file() or PATH.read_text(encoding="utf-8") != text:
        print("docs/flags.md is stale: run python scripts/flags_doc.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
