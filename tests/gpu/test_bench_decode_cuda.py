"""The decode benchmark on a GPU: its rows say what the device did."""

import pytest
import torch

from baton.bench.decode_bench.decode import bench_decode
from baton.bench.decode_bench.options import read_options

pytestmark = pytest.mark.gpu


def test_rows_of_a_small_shape():
    options = read_options(
        shape="0.6b",
        layers=2,
        dtype="bfloat16",
        device="cuda",
        batch="1,4",
        mtp="0,2",
        prompt_len=64,
        steps=6,
        rounds=2,
    )
    data = bench_decode(options)
    assert len(data["rows"]) == 16  # 2 batches x 2 k x sync, async x eager, graphs
    assert data["copy_gbps"] > 500
    for row in data["rows"]:
        assert row["kernels_ms"] > 0
        assert row["num_kernels"] > 20
        assert row["tpot_ms"] > row["floor_ms"]
        assert row["tokens_per_step"] == (1.0 if row["mtp_k"] == 0 else pytest.approx(2.44, abs=1.5))
        assert row["device_ms"] + row["idle_ms"] <= 1.2 * row["step_ms"]
    torch.cuda.synchronize()
