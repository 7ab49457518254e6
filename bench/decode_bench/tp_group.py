"""What a TP group of ranks costs: the decision message, and decode steps of a model that is cut over the ranks.

Run `python -m baton.bench.decode_bench.tp_group --json` on a machine with two GPUs (or with `--device cpu`, over gloo).
Every rank is a process. The ranks form a group as a worker's ranks do, and rank 0 sends its plans over the same socket.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from baton.bench.actor import SpawnedRemote
from baton.bench.decode_bench.options import DecodeOptions, read_options
from baton.bench.decode_bench.tp_group_rank import TPGroupRank
from baton.bench.result import result
from baton.core.errors import ConfigInvalid

DECISIONS = ((1, 1), (16, 1), (64, 1), (64, 3))  # batch, drafts
EXCHANGES = ((1, 4096), (1, 7168), (16, 4096), (64, 4096), (128, 4096), (256, 4096), (2048, 4096))  # rows, hidden size
BLOCKS_EACH = 80


class TPGroup:
    """`size` ranks that have formed a group."""

    def __init__(self, size: int, device_type: str, *, shares_memory: bool = True) -> None:
        make = partial(TPGroupRank, shares_memory=shares_memory)
        self._ranks = [SpawnedRemote(make, rank, size, device_type) for rank in range(size)]
        place = self._ranks[0].call("open")
        self.call("meet", *place)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method at every rank at once; results are in rank order."""
        waiting: list[Callable[[], Any]] = [rank.post(method, *arguments) for rank in self._ranks]
        return [wait() for wait in waiting]

    def end(self) -> None:
        """End the processes, whatever they are doing."""
        for rank in self._ranks:
            rank.end()


def bench_decode_tp_group(
    options: DecodeOptions, size: int, num_decisions: int = 500, *, shares_memory: bool = True
) -> dict[str, Any]:
    """Measure decision messages, exchanges of rows on GPUs, and decode steps, as rows of one result."""
    decisions: list[dict[str, Any]] = []
    exchanges: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    graphs = None
    for has_graphs in options.graphs:
        # One group for each, because rank 0 releases the others at the end.
        tp_group = TPGroup(size, options.device.type, shares_memory=shares_memory)
        try:
            if not decisions:
                decisions = _time_decisions(tp_group, size, num_decisions)
                exchanges = _time_exchanges(tp_group, size) if options.device.type == "cuda" else []
            found, graphs = tp_group.call("measure_decode", options, has_graphs)[0]
            rows += found
            tp_group.call("close")
        finally:
            tp_group.end()
    found = {"decisions": decisions, "exchanges": exchanges, "shares_memory": shares_memory, "graphs": graphs}
    return result("decode", rows, **found, steps=options.steps, rounds=options.rounds)


def _time_decisions(tp_group: TPGroup, size: int, count: int) -> list[dict[str, Any]]:
    decisions = []
    for batch, num_drafts in DECISIONS:
        found = tp_group.call("time_decisions", batch, num_drafts, BLOCKS_EACH, count)
        slowest = {key: float(f"{max(rank[key] for rank in found):.4g}") for key in found[0]}
        decisions.append({"tp": size, "batch": batch, "mtp_k": num_drafts, **slowest})
    return decisions


def _time_exchanges(tp_group: TPGroup, size: int) -> list[dict[str, Any]]:
    exchanges = []
    for num_rows, hidden_size in EXCHANGES:
        found = tp_group.call("time_exchanges", num_rows, hidden_size)
        slowest = {key: float(f"{max(rank[key] for rank in found):.4g}") for key in found[0]}
        exchanges.append({"tp": size, "rows": num_rows, "hidden_size": hidden_size, **slowest})
    return exchanges


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", dest="kv_dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--num-speculative-tokens", dest="mtp", default="0,1")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--cuda-graphs", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--enable-expert-parallel", dest="expert_parallel", action="store_true")
    parser.add_argument("--fake-balance", action="store_true", help="each expert gets as many tokens; answers are void")
    parser.add_argument("--nccl-alone", action="store_true", help="no memory that ranks share")
    asked = vars(parser.parse_args())
    as_json, size, shares_memory = asked.pop("json"), asked.pop("ranks"), not asked.pop("nccl_alone")
    try:
        options = read_options(**asked)
    except ConfigInvalid as error:
        parser.error(error.message)
    data = bench_decode_tp_group(options, size, shares_memory=shares_memory)
    if as_json:
        print(json.dumps(data))
        return
    for row in [*data["decisions"], *data["exchanges"]]:
        print(row)
    for row in data["rows"]:
        passes = "graphs" if row["cuda_graphs"] else "eager"
        print(
            f"B={row['batch']:<3} k={row['mtp_k']} {row['scheduling']:5} {passes:6} TPOT {row['tpot_ms']:.3f} ms, step "
            f"{row['step_ms']:.3f} ms, idle {row['idle_ms']:.3f} ms, {row['tokens_per_s']:.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
