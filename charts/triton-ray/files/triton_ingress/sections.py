"""The text of an HAProxy configuration: its sections, and which of their lines are known."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_HEADER = re.compile(r"(global|defaults|frontend|backend|listen)(?: (\S+))?$")


class UnknownConfigurationError(Exception):
    """The configuration is not of the shape that is known here."""


@dataclass
class Section:
    """One section, without comments and blank lines."""

    kind: str
    name: str
    lines: list[str]

    @property
    def title(self) -> str:
        """The line that it begins with."""
        return f"{self.kind} {self.name}".rstrip()

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"    {line}" for line in self.lines)]) + "\n"

    def check(self, known: re.Pattern[str]) -> None:
        """Raise UnknownConfigurationError if there is a line that is not known."""
        for line in self.lines:
            if not known.fullmatch(line):
                raise UnknownConfigurationError(f"{self.title}: {line!r}")

    def only(self, pattern: str) -> re.Match[str]:
        """Return the match of the one line of this pattern; raise UnknownConfigurationError if there is not one."""
        found = [match for line in self.lines if (match := re.fullmatch(pattern, line))]
        if len(found) != 1:
            raise UnknownConfigurationError(f"{self.title} has {len(found)} lines of the form {pattern!r}, not 1")
        return found[0]


def parse(text: str) -> list[Section]:
    """Take a configuration apart.

    Raises:
        UnknownConfigurationError: text before the first section, or two sections of one name.
    """
    sections: list[Section] = []
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if not raw[0].isspace() and (found := _HEADER.match(line)):
            sections.append(Section(found[1], found[2] or "", []))
        elif sections:
            sections[-1].lines.append(line)
        else:
            raise UnknownConfigurationError(f"{line!r} is in no section")
    titles = [section.title for section in sections]
    for title in titles:
        if titles.count(title) > 1:
            raise UnknownConfigurationError(f"there are several sections {title!r}")
    return sections


def one_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of a line that is of one of these forms."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
