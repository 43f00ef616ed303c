"""Parts of Sightline that other installed packages bring, found through their entry points.

Finding one reads the package's metadata only; loading one imports the package. Does not know what the parts do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from sightline.core.errors import ConfigError


@dataclass(frozen=True)
class Extension:
    """A part that a package brings."""

    name: str
    distribution: str
    """The package, as it is installed."""
    value: str
    """Where the part is: "module:name"."""
    what: str
    """What messages call such a part: "backend"."""
    found: Callable[[], object]
    """Imports the package and returns what the entry point names."""

    def load(self) -> object:
        """Imports the part. Raises `ConfigError` if that fails."""
        try:
            return self.found()
        except Exception as error:  # third-party code: its import may raise anything
            raise ConfigError(
                f"expected {self.what} {self.name!r} of {self.distribution} to be importable, got "
                f"{type(error).__name__}: {error}; mend or uninstall {self.distribution}"
            ) from error

    def refuse(self, expected: str, loaded: object) -> ConfigError:
        """The error for an entry point that names something else than is `expected`."""
        return ConfigError(
            f"expected {self.value} of {self.distribution}, registered as {self.what} {self.name!r}, to be {expected}, "
            f"got {loaded!r}; mend its entry point"
        )


def extensions(group: str, what: str, owners: Mapping[str, str]) -> tuple[Extension, ...]:
    """The parts that packages register in an entry point group, by name.

    `owners` has the packages of names that are taken. Raises `ConfigError` if two parts have the same name.
    """
    taken, found = dict(owners), list[Extension]()
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        distribution = entry.dist.name if entry.dist is not None else "an unknown package"
        if entry.name in taken:
            raise ConfigError(
                f"expected one {what} named {entry.name!r}, got one of {taken[entry.name]} and one of {distribution}; "
                "uninstall one of them"
            )
        taken[entry.name] = distribution
        found.append(Extension(entry.name, distribution, entry.value, what, entry.load))
    return tuple(found)
