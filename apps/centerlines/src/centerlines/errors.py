"""What can go wrong, for callers to tell apart.

::

    CenterlinesError
    ├── UsageError           an argument is wrong; the command line exits with 2
    ├── EndpointError        the endpoint cannot be reached, or its model cannot be used
    ├── RequestRefusedError  the endpoint answered one request with an error
    ├── TileError            this tile cannot be processed; a second try would end the same way
    └── TileReadError        this tile could not be read; a second try may succeed

Every message is one line that names the value, what is wrong with it and the way out.
"""

__all__ = ["CenterlinesError", "EndpointError", "RequestRefusedError", "TileError", "TileReadError", "UsageError"]


class CenterlinesError(Exception):
    """Base of every error this package raises on purpose."""


class UsageError(CenterlinesError):
    """An argument or option is wrong."""


class EndpointError(CenterlinesError):
    """The endpoint cannot be reached, or its model cannot be used."""


class RequestRefusedError(CenterlinesError):
    """The endpoint answered a request with an error that waiting does not cure."""


class TileError(CenterlinesError):
    """A tile cannot be processed, and trying again will not help."""


class TileReadError(CenterlinesError):
    """A tile is truncated or cannot be read; trying again may help."""
