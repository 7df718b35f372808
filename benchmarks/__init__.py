"""Benchmarks: each writes benchmarks/results/<name>.json, in the form of `results.Result`."""
