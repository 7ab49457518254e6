"""Metrics, traces, logs and reports."""
