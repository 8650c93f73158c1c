"""Benchmarks: what a reduction and a training step cost beside what others reach, measured in one run."""
