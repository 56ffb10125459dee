"""Tests of charts/triton-ray/files/triton_ingress."""
