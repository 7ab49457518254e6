"""The harness of `baton bench crossover`: options, figures, promises, a plot, and one small run with real workers."""

import importlib.util
import json

import pytest

from baton.bench import crossover
from baton.bench.crossover import Beside, CrossoverOptions, checks, crossovers, read_options
from baton.bench.plot import plot_crossover
from baton.cluster.commands.bench import bench_crossover, format_crossover
from baton.cluster.outcome import ExitCode, Output
from baton.core.errors import ConfigInvalid
from baton.tests.e2e.conftest import TINY


def rows_of(second_ms, workload="fresh", load="idle"):
    """Rows from {system: {length: ms}}."""
    return [
        {"system": system, "workload": workload, "load": load, "prompt_len": length, "local_share": 0.5}
        | {f"{name}_ms{end}": value for name in ("ttft", "second") for end in ("", "_min", "_max")}
        for system, by_length in second_ms.items()
        for length, value in by_length.items()
    ]


@pytest.mark.fast
def test_options_are_checked():
    options = read_options("16,4,16", rounds=1, streams=2, seed=0)
    assert (options.lengths, options.rounds, options.streams) == ((4, 16), 1, 2)
    for lengths in ("", "four", "1,8"):
        with pytest.raises(ConfigInvalid, match="lengths"):
            read_options(lengths)
    with pytest.raises(ConfigInvalid, match="streams"):
        read_options("4", streams=0)
    with pytest.raises(ConfigInvalid, match="positions"):
        crossover.bench_crossover(CrossoverOptions(lengths=(5000,)), TINY, print)


@pytest.mark.fast
def test_gaps_are_those_that_lie_in_or_over_the_span():
    beside = Beside([[1.0, 1.1, 1.3, 2.0], [0.0, 5.0], [9.0]])
    assert beside.gaps_ms(1.05, 1.2) == pytest.approx([100, 200, 5000])
    assert beside.gaps_ms(3.0, 4.0) == pytest.approx([5000])


@pytest.mark.fast
def test_where_the_ways_cross():
    def first(local, split):
        rows = rows_of({"local": local, "split": split})
        return crossovers(rows)[0]["split_is_faster_from"]

    assert first({4: 1.0, 16: 2.0, 64: 9.0}, {4: 3.0, 16: 3.0, 64: 4.0}) == 64
    assert first({4: 1.0, 16: 2.0}, {4: 3.0, 16: 3.0}) is None
    assert first({4: 5.0, 16: 5.0}, {4: 3.0, 16: 3.0}) == 4
    assert first({4: 5.0, 16: 1.0, 64: 9.0}, {4: 3.0, 16: 3.0, 64: 4.0}) == 64, "from there on"


@pytest.mark.fast
def test_auto_is_held_to_the_better_way_where_nobody_else_is():
    rows = rows_of({"local": {4: 1.0, 64: 9.0}, "split": {4: 3.0, 64: 4.0}, "auto": {4: 1.2, 64: 4.4}})
    assert [(check["value"], check["holds"]) for check in checks(rows)] == [(1.2, True)]
    rows = rows_of({"local": {4: 1.0, 64: 9.0}, "split": {4: 3.0, 64: 4.0}, "auto": {4: 3.0, 64: 4.0}})
    assert [check["holds"] for check in checks(rows)] == [False]
    busy = rows_of({"local": {4: 1.0}, "split": {4: 3.0}, "auto": {4: 3.0}}, load="busy")
    assert checks(busy) == []


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is no dependency")
def test_a_plot_is_drawn(tmp_path):
    rows = rows_of({"local": {4: 1.0, 64: 9.0}, "split": {4: 3.0, 64: 4.0}, "auto": {4: 1.2, 64: 4.4}})
    plot_crossover(rows, tmp_path / "crossover.svg")
    assert (tmp_path / "crossover.svg").stat().st_size > 1000


@pytest.mark.slow
def test_a_small_run_with_real_workers(capsys):
    code = bench_crossover(Output(as_json=True), plot=None, lengths="4,40", rounds=1, streams=1, seed=1)
    data = json.loads(capsys.readouterr().out)
    assert code in (ExitCode.OK, ExitCode.PARTIAL)  # one round says nothing of times
    assert len(data["rows"]) == 2 * 2 * 3 * 2
    for row in data["rows"]:
        assert row["ttft_ms"] > 0
        assert row["second_ms"] > 0
        assert ("beside_gap_ms" in row) == (row["load"] == "busy")
        if row["system"] != "auto":
            assert row["local_share"] == (row["system"] == "local")
    assert len(data["crossovers"]) == 4
    assert "split" in format_crossover(data)
