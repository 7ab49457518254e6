"""The whole soak and its report: `python -m baton.tests.e2e.soak_run [--requests 10000] [--seed 1] [--out FILE]`.

Cells differ in transport, data path, place of the transfer and prefix caching; the last ones measure, with the times of
the product and no other faults, how long blocks stay taken after a client went away.
"""

import argparse
import json
import logging
import os
import time
from collections import Counter
from pathlib import Path

import torch

from baton.bench.result import result
from baton.core.config import KVTransferConfig
from baton.core.errors import BatonError
from baton.tests.e2e.faults import Fault, Injector
from baton.tests.e2e.soak import MAX_ATTEMPTS, Soak, expected_tokens, make_requests
from baton.tests.e2e.soak_workers import STATES, num_threads
from baton.tests.engine.toy_engine import letters_tokenizer

NUM_REQUESTS = 10_000
# (name, share of the requests, where)
CELLS = (
    ("tcp, process", 0.20, {"transport": "tcp", "has_process": True, "prefix_cache": False}),
    ("tcp, thread", 0.15, {"transport": "tcp"}),
    ("zmq, process", 0.10, {"transport": "zmq", "has_process": True}),
    ("shm, process", 0.25, {"transport": "shm", "has_process": True}),
    ("grpc, process", 0.15, {"transport": "grpc", "has_process": True, "prefix_cache": False}),
    ("loopback, thread", 0.15, {"transport": "loopback"}),
)
_DEFAULTS = KVTransferConfig()
_TIMES = {"lease_s": _DEFAULTS.lease_s, "heartbeat_s": _DEFAULTS.heartbeat_s}
GOING_AWAY = {"strikes": (Fault.CANCEL,), "hunt_every": 2, **_TIMES}
DISCONNECTS = tuple(
    (name, share, {**where, **GOING_AWAY}) for name, share, where in CELLS if where["transport"] != "shm"
)
RATES = {"flip_rate": 1e-3, "rate": 1e-3, "death_rate": 2e-5}
NO_RATES = dict.fromkeys(RATES, 0.0)
NUM_AFTER = 12


def check(requests, ended):
    """Every delivered stream is what it must be, or the beginning of it; returns how many are whole."""
    want = expected_tokens(requests)
    for request, of in zip(requests, ended, strict=True):
        expected = want[request.prompt_token_ids, request.sampling]
        assert of.token_ids == expected[: len(of.token_ids)], f"wrong tokens: {request}"
        assert of.is_whole == (of.token_ids == expected), request
        assert all(isinstance(error, BatonError) for error in of.errors)
    return sum(of.is_whole for of in ended)


def soak(num_requests, seed, *, num_at_once=40, flip_rate=1e-3, rate=1e-3, death_rate=2e-5, **where):
    """One cell; returns its row. Raises AssertionError for whatever must not be."""
    injector = Injector(seed, flip_rate=flip_rate, rate=rate, death_rate=death_rate)
    num_threads_before = num_threads()
    deployment = Soak(letters_tokenizer(), injector, **where)
    requests = make_requests(num_requests, seed)
    start_s = time.monotonic()
    try:
        ended = deployment.run(requests, num_at_once)
        elapsed_s = time.monotonic() - start_s
        injector.is_on = False
        idle_s = deployment.wait_idle(15.0)
        after = make_requests(NUM_AFTER, seed + 1)
        assert check(after, deployment.run(after, 4)) == len(after), "it serves as before"
        deployment.wait_idle(5.0)
        accounts, fates, wrong = deployment.account()
        assert not wrong, wrong
    finally:
        deployment.close()
        os.unlink(deployment.fates_path)
    assert num_threads() <= num_threads_before, "threads are left"
    num_whole = check(requests, ended)
    failed = [of for of in ended if of.has_failed]
    return {
        "requests": num_requests,
        "seed": seed,
        "seconds": round(elapsed_s, 1),
        "lease_s": deployment.transfer.lease_s,
        "whole": num_whole,
        "cancelled": sum(not of.is_whole and not of.has_failed for of in ended),
        "failed": len(failed),
        "errors_of_failed": dict(Counter(error.message[:120] for of in failed for error in of.errors)),
        "errors": dict(Counter(error.message[:120] for of in ended for error in of.errors).most_common(12)),
        "retried": sum(bool(of.errors) for of in ended),
        "attempts": {str(n): sum(of.num_attempts == n for of in ended) for n in range(1, MAX_ATTEMPTS + 2)},
        "wrong_tokens": 0,
        "leaked_blocks": 0,
        "idle_s": round(idle_s, 3),
        "frames_sent": deployment.book.num_frames,
        "frames_flipped": len(deployment.book),
        "flips": accounts,
        "controls_flipped_and_refused": deployment.book.num_controls_refused,
        "fates": {fate.name.lower(): count for fate, count in fates.items()},
        "disconnect_to_free_ms": disconnects(deployment.cancels_ms),
        "disconnect_to_free_ms_by_state": {
            state: disconnects([of for of in deployment.cancels_ms if of[1] == state]) for state in STATES
        },
        "hits": {f"{moment}: {fault.value}": count for (moment, fault), count in _sortable(injector.hits)},
        "moments": dict(injector.seen),
        "strikes": {f"{state}: {fault.value}": count for (state, fault), count in deployment.strikes.items()},
        "hunted": {f"{state}: {fault.value}": count for (state, fault), count in deployment.hunted.items()},
    }


def _sortable(hits):
    return sorted(hits.items(), key=lambda hit: (hit[0][0], hit[0][1].value))


def disconnects(cancels_ms):
    """Median and tail of the times from a client's going to the last of its blocks on either side being free."""
    times_ms = sorted(time_ms for time_ms, _ in cancels_ms)
    if not times_ms:
        return {"count": 0}
    at = [times_ms[min(len(times_ms) - 1, int(share * len(times_ms)))] for share in (0.5, 0.99)]
    return {"count": len(times_ms), "p50": round(at[0], 2), "p99": round(at[1], 2), "max": round(times_ms[-1], 2)}


def total(rows):
    """The rows together, and the histograms."""
    hits, strikes, flips = Counter(), Counter(), Counter()
    for row in rows:
        hits.update(row["hits"])
        strikes.update(row["strikes"])
        flips.update(row["flips"])
    sums = ("requests", "whole", "cancelled", "failed", "retried", "wrong_tokens", "leaked_blocks")
    frames = ("frames_sent", "frames_flipped", "controls_flipped_and_refused")
    return {
        **{name: sum(row[name] for row in rows) for name in (*sums, *frames)},
        "flips": dict(flips),
        "hits_by_moment": _table(hits),
        "strikes_by_state": _table(strikes),
    }


def _table(counts):
    rows = {}
    for name, count in sorted(counts.items()):
        where, _, fault = name.rpartition(": ")
        rows.setdefault(where, {})[fault] = count
    return rows


def run_cells(num_requests, seed, cells=CELLS, say=print, **rates):
    """A row for each cell."""
    rows = []
    for index, (name, share, where) in enumerate(cells):
        start_s = time.monotonic()
        row = {"cell": name, **soak(round(num_requests * share), seed + 10 * index, **where, **rates)}
        rows.append(row)
        shown = ("requests", "whole", "cancelled", "failed", "retried", "frames_flipped", "disconnect_to_free_ms")
        say(f"{name}: {time.monotonic() - start_s:.1f} s", {key: row[key] for key in shown})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cell", help="only cells with this in their name")
    parser.add_argument("--factor", type=float, default=1.0, help="of all rates")
    parser.add_argument("--hunt-every", type=int, default=15)
    parser.add_argument("--only-disconnects", action="store_true", help="all requests go to the last cells")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cells = [cell for cell in CELLS if not arguments.cell or arguments.cell in cell[0]]
    cells = [(name, share, {**where, "hunt_every": arguments.hunt_every}) for name, share, where in cells]
    gone = [cell for cell in DISCONNECTS if not arguments.cell or arguments.cell in cell[0]]
    rates = {name: arguments.factor * rate for name, rate in RATES.items()}
    share_gone = 1.0 if arguments.only_disconnects else 0.2
    rows = [] if arguments.only_disconnects else run_cells(arguments.requests, arguments.seed, cells, **rates)
    rows_gone = run_cells(share_gone * arguments.requests, arguments.seed + 5, gone, **NO_RATES)
    for row in rows_gone:
        row["cell"] = f"disconnects alone: {row['cell']}"
    report = result("soak", rows + rows_gone, rates=rates, total=total(rows))
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
