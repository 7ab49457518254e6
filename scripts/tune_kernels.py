"""Fill the table of tuned configurations on the GPU of this machine (kernels/tuned/h200.json).

    python3 scripts/tune_kernels.py --only gemm_fp8 --limit-s 300 --out OUT/h200.json --report OUT/tuning.json

All candidates are compiled by `--jobs` processes first, then timed one after the other; what fails, hangs, spills or
disagrees with the others is dropped. The table that is committed is the base: rows that are not tuned again stay. It is
written after every point, so that a run that is cut off loses one. Ends with 0 if every point was tuned, 4 if not, 3
without a GPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from baton.bench.kernel_bench.tuning import TuningOptions, tune
from baton.core.errors import ConfigInvalid
from baton.kernels import tuning

_TABLE = Path(tuning.__file__).resolve().parent / "tuned" / "h200.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="comma-separated: parts of module, kernel, shape and size")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of the whole run")
    parser.add_argument("--trial-limit-s", type=float, default=60.0, help="of one candidate")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile")
    parser.add_argument("--base", type=Path, default=_TABLE, help="the table whose other rows are kept")
    parser.add_argument("--out", type=Path, default=_TABLE, help="the table that is written")
    parser.add_argument("--report", type=Path, help="a .json file for the times of all candidates")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune_kernels: there is no GPU to tune for", file=sys.stderr)
        return 3
    options = TuningOptions(
        only=tuple(part.strip() for part in asked.only.split(",") if part.strip()),
        jobs=max(1, asked.jobs),
        limit_s=asked.limit_s,
        trial_limit_s=asked.trial_limit_s,
        out=asked.out,
        report=asked.report,
    )
    try:
        data = tune(options, json.loads(asked.base.read_text()), lambda text: print(text, file=sys.stderr, flush=True))
    except ConfigInvalid as error:
        parser.error(error.message)
    print(json.dumps({key: data[key] for key in ("untuned", "failures", "took_s")}))
    return 4 if data["untuned"] or data["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
