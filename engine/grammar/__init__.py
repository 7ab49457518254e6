"""Constrained decoding: grammars over tokens."""
