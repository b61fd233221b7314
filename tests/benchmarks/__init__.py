"""Benchmarks: each prints medians and ratios and writes build/bench/<name>.json."""
