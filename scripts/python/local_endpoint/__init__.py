"""The whole endpoint on this machine: Triton on CPU, a local Ray, and the chart's own forwarder in Ray Serve."""
