"""Products with a weight, and what makes their operands float8."""
