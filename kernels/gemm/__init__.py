"""GEMMs, and the quantization of their operands to float8."""
