"""Measures the endpoint side by side with Triton itself, and what load a replica should be given.

`python -m bench` is scripts/bench, `python -m bench.target` is scripts/target-ongoing-requests.
"""
