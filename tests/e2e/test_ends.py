"""A few of the ends that `ends.py` makes many of: what a kill may cost, and what it may not."""

import asyncio
import os
import signal
import socket
import tempfile

import pytest

from baton.client import AsyncBatonClient
from baton.tests.e2e import ends

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def rows_of(kinds, tmp_path):
    rows = []
    asyncio.run(ends.run(kinds, 1, rows.append, tmp_path))
    for row in rows:
        assert (row["num_wrong"], row["num_hanging"]) == (0, 0), row
    return {row["fault"]: row for row in rows}


def test_who_is_started_again_takes_nobody_with_it(tmp_path):
    for row in rows_of(ends.SURVIVED, tmp_path).values():
        assert row["num_others_ended"] == 0, row
        if row["fault"] != "router":
            assert row["num_whole"] == ends.NUM_STREAMS, row
        else:
            assert row["num_again_wrong"] == 0
            assert row["num_again_cached"] == row["num_again_begun"] > 0


@pytest.mark.parametrize("kind", ends.ENDING)
def test_what_ends_a_deployment_leaves_nothing(kind, tmp_path):
    row = rows_of([kind], tmp_path)[kind]
    assert row["left"] == []
    assert row["code"] == ends.EXITS[kind]
    assert row["has_words"]
    if kind == "sigterm":
        assert row["num_whole"] == ends.NUM_STREAMS, row


def test_workers_of_a_cluster_outlive_serve_and_are_adopted(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])

    async def epochs(serve):
        await serve.ready()
        async with AsyncBatonClient(serve.address, timeout_s=30.0) as client:
            return await ends.workers_of(client)

    with ends.ray_head(tempfile.mkdtemp(prefix="e-", dir="/tmp")) as address:
        flags = ("--ray-address", address, "--grpc-port", port)
        first = ends.Serve(tmp_path, *flags)
        second = None
        try:
            before = asyncio.run(epochs(first))
            supervisor = next(one for one in ends._looked(first) if ends._is(one, "baton.cluster.supervisor"))
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            supervisor.wait(30.0)
            second = ends.Serve(tmp_path, *flags)
            assert asyncio.run(epochs(second)) == before
        finally:
            for serve in (first, second):
                if serve is not None:
                    serve.end()
