"""Benchmarks: the same work on alternatives, in turn, on real engines."""
