"""Tests of the sample scenes and of the models that go with them."""
