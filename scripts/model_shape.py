"""Write a published model's config.json from its numbers, for `--load-format dummy`: nothing is downloaded.

    python scripts/model_shape.py qwen3-8b /tmp/qwen3-8b
    baton serve --model /tmp/qwen3-8b --load-format dummy

`--layers N` keeps the shape of a layer and takes fewer of them.
"""

import argparse
from pathlib import Path

from baton.bench.model_shapes import SHAPES, write_shape

__all__ = ["SHAPES", "write_shape"]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    options = parser.parse_args()
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    print(write_shape(options.shape, options.directory, **changes) / "config.json")


if __name__ == "__main__":
    main()
