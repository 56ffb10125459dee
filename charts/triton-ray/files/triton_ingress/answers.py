"""What HAProxy answers by itself: refusals, and errors in place of a server's answer.

On the gRPC port an answer is a status in the headers and no message ("trailers-only"); on the HTTP port it is Triton's
JSON object with the key `error`. All are whole responses in files: in an answer without a body that HAProxy puts
together from its configuration it leaves out the content-type, and clients such as gRPC's for Go then see UNKNOWN.
"""

import json
import os
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from pathlib import Path


class Protocol(Enum):
    """Of a port and of the backends behind it."""

    GRPC = auto()
    HTTP = auto()


@dataclass(frozen=True)
class Answer:
    """What a caller is told who gets no answer of a server."""

    name: str
    """Of the file."""
    grpc: int
    """Number of the grpc.StatusCode."""
    http: int
    words: str

    def response(self, protocol: Protocol) -> bytes:
        """Return the whole response."""
        if protocol is Protocol.GRPC:
            status, body = "200 OK", ""
            headers = ["content-type: application/grpc", f"grpc-status: {self.grpc}"]
            headers.append(f"grpc-message: {_percent_encoded(self.words)}")
        else:
            status = f"{self.http} {HTTPStatus(self.http).phrase}"
            body = json.dumps({"error": self.words}, separators=(",", ":"))
            headers = ["content-type: application/json"]
            if self.http == HTTPStatus.UNAUTHORIZED:
                headers.append("www-authenticate: Bearer")
        return "\r\n".join([f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}", "", body]).encode()


def _percent_encoded(words: str) -> str:
    # https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
    return "".join(
        chr(byte) if 0x20 <= byte <= 0x7E and byte != ord("%") else f"%{byte:02X}" for byte in words.encode()
    )


# The same words as the forwarder's.
UNREACHABLE = Answer("unreachable", 14, 503, "Triton is not reachable, it may be restarting")
STARTING = Answer("starting", 14, 503, "the endpoint is starting, it knows of no Triton yet")
LATE = Answer("late", 4, 504, "Triton has not answered in time")
INCOMPLETE = Answer("incomplete", 14, 408, "the request has not come within 30 s")

# In place of HAProxy's own answers with these codes. Without them a gRPC client sees UNKNOWN, and does not try again.
_ERRORS = {408: INCOMPLETE, 502: UNREACHABLE, 503: UNREACHABLE, 504: LATE}


class Files:
    """The files beside a configuration that it names."""

    def __init__(self, folder: Path) -> None:
        """Take the folder in which they will be."""
        self._folder = folder
        self._contents: dict[Path, bytes] = {}

    def add(self, name: str, content: bytes) -> Path:
        """Add a file; return its path."""
        path = self._folder / name
        self._contents[path] = content
        return path

    def answer(self, answer: Answer, protocol: Protocol) -> str:
        """Return the rule that answers a request, to be followed by a condition."""
        return f"http-request return errorfile {self._add(answer, protocol)}"

    def errors(self, protocol: Protocol) -> list[str]:
        """Return the lines that a section needs for HAProxy's own errors."""
        return [f"errorfile {code} {self._add(answer, protocol)}" for code, answer in _ERRORS.items()]

    def write(self) -> None:
        """Write them all, for nobody else to read."""
        for path, content in self._contents.items():
            partial = path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            partial.replace(path)

    def _add(self, answer: Answer, protocol: Protocol) -> Path:
        return self.add(f"{protocol.name.lower()}-{answer.name}.http", answer.response(protocol))
