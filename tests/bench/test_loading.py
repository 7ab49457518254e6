"""The measurement of loading: its directory is one that loads, its rows say what was read and against what."""

import json

import pytest
import torch

from baton.bench import loading

pytestmark = pytest.mark.fast
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def shards(tmp_path):
    num_bytes = loading.write_shards(tmp_path, 3 << 20, shard_bytes=1 << 20, vocab_size=512, **SMALL)
    return tmp_path, num_bytes


def test_the_directory_has_the_size_that_was_asked_for_in_several_shards(shards):
    path, num_bytes = shards
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    files = list(path.glob("*.safetensors"))
    assert layers > 2
    assert len(files) > 2
    assert num_bytes == pytest.approx(3 << 20, rel=0.1)
    assert 0 < sum(file.stat().st_size for file in files) - num_bytes < 8192 * len(files)


@pytest.mark.long
def test_each_case_counts_the_bytes_that_it_needs(shards):
    path, num_bytes = shards
    before = torch.get_num_threads()
    try:
        found = {case: loading._once(path, case, "cpu") for case in ("kept", *loading.LOADS)}
    finally:
        torch.set_num_threads(before)
    assert found["kept"]["bytes"] == found["whole"]["bytes"] == found["whole, converted"]["bytes"] == num_bytes
    embeddings = 2 * 512 * SMALL["hidden_size"]  # which are whole at every rank; the head is not
    assert (num_bytes + embeddings) / 2 == pytest.approx(found["half"]["bytes"], rel=0.01)
    assert all(one["seconds"] > 0 for one in found.values())


def test_rows_compare_two_trees_and_the_plain_read_of_their_round(monkeypatch, tmp_path):
    asked = []

    def measured(path, case, device, folder, *, is_cold):
        asked.append((case, folder, is_cold))
        seconds = {"plain": 1.0, "kept": 0.5}.get(case, 2.0 if folder is None else 8.0)
        return {"seconds": seconds, "bytes": 4e9} | ({} if case in ("plain", "kept") else {"beside_mib": 7.0})

    monkeypatch.setattr(loading, "_in_process", measured)
    data = loading.bench_loading(tmp_path, "cpu", against="elsewhere", num_rounds=2, is_cold=True)
    rows = {(row["case"], row.get("tree")): row for row in data["rows"]}
    assert rows["plain read", None]["gb_per_s"] == 4.0
    assert rows["kept", None]["of_plain"] == 2.0
    assert rows["whole", "after"]["of_plain"] == 0.5
    assert rows["half", "before"]["gb_per_s_max"] == 0.5
    assert rows["half", "before"]["beside_mib"] == 7.0
    assert asked[0] == ("plain", None, False), "a first read warms the cache, and does not count"
    assert len(asked) == 1 + 2 * (2 + 2 * len(loading.LOADS))
