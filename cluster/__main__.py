"""Entry point of the `baton` command; everything else is in `baton.cluster.cli`."""

from baton.cluster.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
