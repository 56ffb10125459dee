"""Whole programs, started and stopped by the tests."""
