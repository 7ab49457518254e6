"""The command that fills the table of tuned configurations, where it must not touch it."""

import pytest
import torch

from baton.scripts import tune_kernels

pytestmark = pytest.mark.fast


def test_without_a_gpu_it_refuses_and_leaves_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    table = tmp_path / "table.json"
    table.write_text("{}")
    assert tune_kernels.main(["--base", str(table), "--out", str(table), "--report", str(tmp_path / "report")]) == 3
    assert capsys.readouterr().err == "tune_kernels: there is no GPU to tune for\n"
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert table.read_text() == "{}"
