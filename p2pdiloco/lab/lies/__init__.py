"""Lies of learners about their work, for the simulator and for benchmarks."""
