"""docs/flags.md is what the declarations of the keys say, and the script says so when it is not."""

import re
import sys
from pathlib import Path

import pytest

from baton.core.config import ServeConfig
from baton.core.config_key import keys_of

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import flags_doc  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(ROOT / "scripts"))

ROWS = [
    re.split(r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |"))
    for line in (ROOT / "docs" / "flags.md").read_text().splitlines()
    if line.startswith("| `")
]


def test_the_docs_are_not_stale(capsys):
    assert flags_doc.main([]) == 0, capsys.readouterr().err
    assert flags_doc.DOCS == ROOT / "docs"


@pytest.mark.parametrize(("name", "word"), [("flags.md", "50051"), ("transports.md", "CUDA IPC")])
def test_a_stale_or_missing_file_is_refused_and_written_anew(name, word, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flags_doc, "DOCS", tmp_path)
    assert flags_doc.main([]) == 1
    assert "flags_doc.py --write" in capsys.readouterr().err
    assert flags_doc.main(["--write"]) == 0
    assert flags_doc.main([]) == 0
    path = tmp_path / name
    path.write_text(path.read_text().replace(word, "another"))
    assert flags_doc.main([]) == 1
    assert f"{name} is stale" in capsys.readouterr().err


def test_the_docs_show_every_flag_its_default_meaning_and_vllms_name():
    for (flag, default, text, vllm), key in zip(ROWS, keys_of(ServeConfig).values(), strict=True):
        assert re.match("`(--[a-z-]+)", flag)[1] == "--" + key.name.replace("_", "-")
        assert (default, text) == (key.default, key.text.replace("|", r"\|"))
        assert vllm.replace("`", "") == key.vllm
        assert all(choice in flag for choice in key.choices)
        assert f"<{key.metavar}>" in flag or not key.metavar
