"""What goes wrong is told in one line, and ends a program of this package."""


class BenchError(Exception):
    """The measurement cannot be done, or a call of it failed; the message is one line for the user."""
