"""`python -m baton.bench.kv_bench.nvlink`: the hand-off between two GPUs of one host, each in a process of its own.

Says, in one run: the copy engine's contiguous rate; the rate of scattered pushes by the kernel, with and without the
digest, by multiprocessors used; how soon after a layer the decode process can read that it has arrived; and what a push
and its verification cost a decode step that goes on meanwhile.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.bench.actor import RayRemote, Remote, SpawnedRemote
from baton.bench.kv_bench.nvlink_shape import BLOCK_BYTES, PUSH_BYTES, SET_BLOCKS
from baton.bench.kv_bench.nvlink_sides import COPY_BYTES, DecodeSide, PrefillSide, gbps_of
from baton.bench.result import result, spread

Row = dict[str, Any]
PREFILL_GBPS = 5.6  # rate of one prefill worker of an 8B model on an H200
PUSH_TUNING = (16, 16, 4096)
LAYERS = ((16, 8, 4096), (64, 16, 4096), (132, 16, 4096))  # programs, warps, words of a tile
OTHERS = ((16, 16, 4096), (64, 16, 4096))
VERIFIED = ((8, 4), (16, 2), (16, 4), (16, 8))  # multiprocessors of a push without pause, and of its verification
SHOWN = ("num_sms", "verify_sms", "gbps", "of_copy_engine", "exposed_p50_ms", "exposed_p99_ms", "step_slower")


def note(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def short(row: Row) -> str:
    """Describe a row in a few words."""
    digest = {True: " digest", False: "", None: ""}[row.get("digest")]
    values = " ".join(f"{name}={row[name]}" for name in SHOWN if name in row)
    return f"{row['system']} {row['workload']}{digest}: {values}"


class Measurement:
    """One run.

    Args:
        start: function that starts a side.
        rounds: rounds of each number.
        num_steps: decode steps of each round.
    """

    def __init__(self, start: Callable[..., Remote], rounds: int, num_steps: int) -> None:
        self._rounds = rounds
        self._num_steps = num_steps
        self.rows: list[Row] = []
        self.decode = start(DecodeSide, 1)
        self.prefill = start(PrefillSide, 0, self.decode.call("offer"))
        self.about: dict[str, str] = self.prefill.call("about")

    def close(self) -> None:
        """End both sides."""
        self.decode.call("close")
        self.prefill.end()
        self.decode.end()

    def check(self) -> None:
        """Check that what arrives is what was sent, and that both sides' digests agree."""
        for turn, tuning in enumerate((PUSH_TUNING, (132, 8, 2048), (3, 4, 1024))):
            sent = self.prefill.call("push_checked", turn, tuning)
            assert self.decode.call("digests", turn, 8) == sent, turn
            assert all(sent), "a digest of random content is not 0"
        note("checked: bytes and digests agree")

    def rates(self) -> None:
        """Measure copy engine and kernel, in turns."""
        engine: dict[int, list[float]] = {COPY_BYTES: [], PUSH_BYTES: []}
        kernel: dict[tuple[Any, ...], list[float]] = {}
        forms = [("layers", digest, shape) for digest in (False, True) for shape in LAYERS]
        forms += [(form, digest, shape) for form in ("long", "each", "few") for digest in (False, True)
                  for shape in OTHERS]  # fmt: skip
        for _ in range(3):
            for num_bytes, found in engine.items():
                found += self.prefill.call("copy_engine", num_bytes, self._rounds)
            for form in forms:
                times = self.prefill.call("scatter", *form, self._rounds)
                kernel.setdefault(form, []).extend(times)
        base = statistics.median(engine[COPY_BYTES])
        for num_bytes, found in engine.items():
            self._row("copy-engine", f"{num_bytes >> 20}MiB", **spread("gbps", found))
        for (form, digest, tuning), times in kernel.items():
            num_bytes = SET_BLOCKS * BLOCK_BYTES if form == "few" else PUSH_BYTES
            rates = gbps_of(times, num_bytes)
            more = {"digest": digest, "num_sms": tuning[0], "num_warps": tuning[1], "tile_words": tuning[2]}
            share = round(statistics.median(rates) / base, 3)
            self._row("nvlink", f"{form}", **more, **spread("gbps", rates), of_copy_engine=share)
        for num_programs in (1, 4, 16):
            rates = self.decode.call("digest_gbps", num_programs, self._rounds)
            self._row("kv_digest", "layers", num_sms=num_programs, **spread("gbps", rates))

    def exposed(self) -> None:
        """Measure the time from the layer's end to the word that the decode process reads."""
        for digest in (True, False):
            for num_programs in (16, 64):
                rounds = 60
                watching = self.decode.post("watch", rounds + 10)
                self.prefill.call("fire", rounds + 10, digest, (num_programs, 16, 4096))
                gaps = sorted(watching()[10:])
                self._row("nvlink", "64x64KiB-exposed", digest=digest, num_sms=num_programs,
                          **spread("exposed_p50_ms", [gap / 1e3 for gap in gaps]),
                          exposed_p99_ms=gaps[int(len(gaps) * 0.99)] / 1e3)  # fmt: skip

    def slow_downs(self, rounds: int) -> None:
        """Measure a decode step alone, under a paced push that is verified, and under one that never pauses."""
        alone_ms = self.decode.call("prepare_step")
        note(f"decode step alone: {alone_ms:.3f} ms")
        paced = [(PREFILL_GBPS, 16, verify) for verify in (0, 2, 4, 8)]
        cases = paced + [(0.0, push, 0) for push in (4, 8, 16, 64)]
        cases += [(0.0, push, verify) for push, verify in VERIFIED]
        base_ms: list[float] = []
        found: dict[Any, list[tuple[float, float, int, int]]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case in cases:
                gbps, push, verify = case
                before = statistics.fmean(self.decode.call("step_times", self._num_steps, 0)["step_ms"])
                base_ms.append(before)
                self.decode.call("clear_words")
                credited = (
                    not gbps and verify > 0
                )  # each incoming transfer is verified before its blocks are written again
                self.prefill.call("start_pushing", gbps, (push, 16, 4096), credited)
                during = self.decode.call("step_times", self._num_steps, verify, credited)
                rate = self.prefill.call("stop_pushing")
                if (
                    credited
                ):  # the push waits for credit before and after the steps, so count what was verified during them
                    rate = during["verified"] * PUSH_BYTES / sum(during["step_ms"]) / 1e6
                slower = statistics.fmean(during["step_ms"]) / before - 1
                found[case].append((slower, rate, during["verified"], during["wrong"]))
        self._row("decode-step", "8b-b64", **spread("step_ms", base_ms))
        for (gbps, push, verify), samples in found.items():
            self._row("nvlink", "push-paced" if gbps else "push-continuous", digest=True, num_sms=push,
                      verify_sms=verify, **spread("gbps", [sample[1] for sample in samples]),
                      **spread("step_slower", [sample[0] for sample in samples]),
                      num_verified=sum(sample[2] for sample in samples),
                      num_wrong=sum(sample[3] for sample in samples))  # fmt: skip

    def _row(self, system: str, workload: str, **values: Any) -> None:
        row = {"system": system, "workload": workload, "gil_load": "none", **values}
        self.rows.append(row)
        note(short(row))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--processes", choices=("ray", "spawn"), default="ray")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-rounds", type=int, default=3)
    parser.add_argument("--skip", nargs="*", default=[], choices=("rates", "exposed", "steps"))
    options = parser.parse_args()
    run = Measurement(RayRemote if options.processes == "ray" else SpawnedRemote, options.rounds, options.steps)
    try:
        run.check()
        if "rates" not in options.skip:
            run.rates()
        if "exposed" not in options.skip:
            run.exposed()
        if "steps" not in options.skip:
            run.slow_downs(options.step_rounds)
    finally:
        data = result("kv", run.rows, processes=options.processes, **run.about)
        text = json.dumps(data)
        if options.json is not None:
            options.json.write_text(text)
        else:
            print(text)
        run.close()


if __name__ == "__main__":
    main()
