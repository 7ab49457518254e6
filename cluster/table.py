"""Plain text tables: the same on a terminal, in a pipe and in a log."""

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their content, two spaces apart; columns of numbers are flushed right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    numeric = [bool(rows) and all(cell[:1].isdigit() for cell in column) for column in zip(*rows, strict=True)]
    numeric = numeric or [False] * len(header)

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), *map(line, rows)])
