"""The measurement of the host's cost of a step: its rows, and that its steps are real ones."""

import pytest

from baton.bench.decode_bench import host as decode_host

pytestmark = pytest.mark.fast


def test_rows_name_what_was_measured():
    data = decode_host.bench_decode_host((1,), num_steps=4, num_rounds=2)
    assert data["bench"] == "decode_host"
    assert [(row["batch"], row["mtp_k"], row["scheduling"]) for row in data["rows"]] == [
        (1, 3, "async"),
        (1, 3, "sync"),
    ]
    for row in data["rows"]:
        for key in ("cpu_ms", "loop_cpu_ms", "wall_ms", "calibration_ms"):
            assert 0 < row[f"{key}_min"] <= row[key] <= row[f"{key}_max"]


def test_every_sequence_gets_the_tokens_of_every_step():
    loop = decode_host._loop(6, "sync")
    for _ in range(5):
        loop.turn()
    requests = list(loop._requests.values())
    assert [item.sequence.num_output for item in requests] == [1 + 5 * (1 + at % 4) for at in range(6)]
    assert [item.stream.num_events for item in requests] == [5] * 6
    assert loop.num_verified == 30
