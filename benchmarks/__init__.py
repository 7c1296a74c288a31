"""Benchmarks against peers and bounds: `python -m benchmarks.NAME [--json]`."""
