"""`python -m baton.tests.e2e.ray_bare DIST`: `ray up` of hosts that have Python alone, served, and down again.

DIST is what `make wheelhouse` fills: the hosts reach no package index. Each installs Baton into its own environment.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from baton.core.requests.sampling import SamplingParams
from baton.tests.e2e.hosts import in_namespaces, why_not
from baton.tests.e2e.ray_cluster import RayCluster

PROMPT = "def main(argv=None):\n"
NUM_TOKENS = 48


async def ask(cluster):
    """(token ids, prefill worker, decode worker) of one greedy answer."""
    token_ids = []
    async with cluster.client(timeout_s=120.0) as client:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        async for chunk in client.generate(PROMPT, sampling=sampling):
            token_ids += chunk.token_ids
    stats = chunk.finish.stats
    return token_ids, stats.prefill_worker, stats.decode_worker


def up_served_down(directory, dist):
    """What an operator sees of it, as plain data."""
    began_s = time.monotonic()
    cluster = RayCluster(directory, num_prefill=1, num_decode=1, flags="--local-prefill never", dist=dist)
    with cluster:
        served_s = time.monotonic()
        token_ids, *workers = asyncio.run(ask(cluster))
        installed = {
            host.name: host.run("python -c 'import baton, sys; print(sys.prefix, baton.__file__)'").split()
            for host in cluster.hosts
        }
    return {
        "token_ids": token_ids,
        "workers": workers,
        "installed": installed,
        "up_s": round(served_s - began_s, 1),
        "down_s": round(time.monotonic() - served_s, 1),
    }


def main():
    dist = Path(sys.argv[1]).resolve()
    if "--inside" not in sys.argv:
        why = why_not()
        if why:
            print(f"skipped: {why}", file=sys.stderr)
            return 3
        command = [sys.executable, "-P", "-m", "baton.tests.e2e.ray_bare", str(dist), "--inside"]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        return subprocess.run(in_namespaces(command), env=environment).returncode
    directory = tempfile.mkdtemp(prefix="bb", dir="/var/tmp")
    try:
        print(json.dumps(up_served_down(directory, dist)))
    finally:
        if "BATON_KEEP" not in os.environ:
            shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
