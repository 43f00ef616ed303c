"""Proofs: which capability rows passed the whole conformance kit, on which device, with which versions. One file each.

A row is *declared* until there is a proof of exactly that row, on this device, with these versions and sources. Knows
rows, devices and a folder. Does not know the checks.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sightline.attention.capability import Capability, Requirement
from sightline.attention.coverage import Coverage, Demand
from sightline.attention.dimensions import Dimension, Value
from sightline.attention.kinds import PAGED_KINDS
from sightline.attention.selection import Candidate, Doubt
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import ConfigError
from sightline.version import __version__

_FORMAT = 2
_SIGHTLINE = Path(__file__).parents[1]
_PROVEN_SOURCES = ("attention", "cache", "core", "kernels", "runner", "testing")
"""Packages whose sources a proof depends on; `testing` is included because the kit determines what was tested."""
_TOOLCHAIN = ("torch", "triton", "numpy")


@dataclass(frozen=True)
class Identity:
    """Exactly what a proof applies to."""

    backend: str
    distribution: str
    """The package that ships the backend."""
    row: str
    """Digest of everything that the capability row declares."""
    device_kind: str
    device_name: str
    compute_capability: tuple[int, ...]
    """(major, minor) on CUDA, empty on a CPU."""
    machine: str
    """The host's processor and the instruction sets that torch uses."""
    versions: tuple[tuple[str, str], ...]
    """Package names and versions."""
    sources: str
    """Digest of Sightline's sources and of the backend's."""

    @property
    def digest(self) -> str:
        return _digest_of(asdict(self))


@dataclass(frozen=True)
class Proof:
    """The coverage of passed runs of the conformance kit."""

    identity: Identity
    coverage: Coverage
    checks: tuple[str, ...]
    """Names of passed checks; checks that do not apply to the row are omitted."""
    date: str
    """UTC, ISO 8601."""

    def to_data(self) -> dict[str, Any]:
        """JSON-serializable data."""
        return {
            "identity": asdict(self.identity),
            "coverage": self.coverage.to_data(),
            "checks": list(self.checks),
            "date": self.date,
        }

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **self.to_data()}) + "\n"


def utc_now() -> str:
    """The current date for a proof."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def declared(capability: Capability) -> dict[str, Any]:
    """Everything that a row declares, by column, JSON-serializable and in a fixed order."""
    return {
        field.name: _plain(getattr(capability, field.name))
        for field in fields(capability)
        if field.metadata.get("proven", True)
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def prove_command(candidate: str, device: Device, *flags: str) -> str:
    """The command line that proves a backend on a device."""
    words = ["sightline", "conformance", "--backend", candidate]
    if device.kind is not DeviceKind.CPU:
        words += ["--device", device.kind.value]
    return shlex.join([*words, *flags])


class ProofBook:
    """The proofs in one folder. Files that are incomplete or not owned by this user are not trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Creates the folder, accessible to this user only. Raises `ConfigError` if it cannot."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"expected a folder for proofs that can be written, got {self.folder}: {error.strerror}; "
                "set XDG_CACHE_HOME to another folder"
            ) from error

    @staticmethod
    def identify(candidate: Candidate, capability: Capability, device: Device) -> Identity:
        """The identity that a proof made now would have."""
        return Identity(
            backend=candidate.name,
            distribution=candidate.distribution,
            row=_digest_of(declared(capability)),
            device_kind=device.kind.value,
            device_name=device.name,
            compute_capability=device.compute_capability or (),
            machine=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            versions=_versions(candidate, capability),
            sources=_sources(candidate),
        )

    def record(self, proof: Proof) -> Path:
        """Saves a proof, replacing an earlier one of the same identity; returns its file."""
        self.prepare()
        path = self._path(proof.identity)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".proof-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(proof.to_json())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return path

    def void(self, identity: Identity) -> bool:
        """Deletes the proof of an identity that has since failed; returns whether there was one."""
        path = self._path(identity)
        existed = path.exists()
        path.unlink(missing_ok=True)
        return existed

    def find(self, candidate: Candidate, capability: Capability, device: Device) -> Proof | None:
        """The proof of this row, on this device, with these versions and sources."""
        return self.read(self.identify(candidate, capability, device))

    def read(self, identity: Identity) -> Proof | None:
        """The proof of exactly this identity, if there is a trusted one."""
        found = _read(self._path(identity), identity)
        return found if isinstance(found, Proof) else None

    def distrusted(self) -> tuple[str, ...]:
        """Every file of the folder that is not trusted, and why."""
        read = {path: _read(path, None) for path in sorted(self.folder.glob("*.json"))}
        return tuple(f"{path}: {found}" for path, found in read.items() if isinstance(found, str))

    def doubting(self, words: Sequence[str] = ()) -> Doubt:
        """`doubts`, bound to an engine that `sightline <words>` would prove."""
        run = shlex.join(["sightline", *words]) if words else None
        return lambda candidate, capability, need: self.doubts(candidate, capability, need, run)

    def doubts(
        self, candidate: Candidate, capability: Capability, need: Requirement, run: str | None = None
    ) -> tuple[str, ...]:
        """Why the row is not proven for the need, each reason with the command that would prove it."""
        identity = self.identify(candidate, capability, need.device)
        path = self._path(identity)
        found = _read(path, identity)
        run = run or prove_command(candidate.name, need.device)
        if isinstance(found, str):
            return (f"its proof, {path}, is not trusted: {found}; run: {run}",)
        if found is None:
            return (f"{self._why_unproven(identity)}; run: {run}",)
        missing = _uncovered(found.coverage, need)
        return (f"not proven: {', '.join(missing)}; run: {run}",) if missing else ()

    def _why_unproven(self, identity: Identity) -> str:
        """Describes what has changed if there is a proof of the same backend on the same device."""
        kept = [_read(path, None) for path in self.folder.glob("*.json")]
        related = [
            (_differences(proof.identity, identity), proof.date)
            for proof in kept
            if isinstance(proof, Proof) and _is_of_the_same(proof.identity, identity)
        ]
        if not related:
            return "not proven on this device with these versions"
        related.sort(key=lambda found: found[1], reverse=True)
        changed, date = min(related, key=lambda found: len(found[0]))
        return f"proven {date[:10]} and not since: changed are {', '.join(changed)}"

    def _path(self, identity: Identity) -> Path:
        return self.folder / f"{identity.digest}.json"


_NAMES = {
    "distribution": "the package that ships it",
    "row": "what the row declares",
    "machine": "the processor",
    "sources": "sources, its own or Sightline's",
}
"""Display names of an identity's fields."""


_MOST_GAPS = 4
_FIXED = ("backend", "device_kind", "device_name")
"""If these differ, two proofs are unrelated."""


def _is_of_the_same(one: Identity, other: Identity) -> bool:
    return all(vars(one)[name] == vars(other)[name] for name in _FIXED)


def _differences(one: Identity, other: Identity) -> list[str]:
    """The differences between two identities, in display names."""
    different = [
        _NAMES.get(field.name, field.name)
        for field in fields(one)
        if field.name != "versions" and vars(one)[field.name] != vars(other)[field.name]
    ]
    versions = (dict(one.versions), dict(other.versions))
    packages = sorted(name for name in versions[0] | versions[1] if versions[0].get(name) != versions[1].get(name))
    return [*different, *(f"the version of {name}" for name in packages)]


def _uncovered(coverage: Coverage, need: Requirement) -> tuple[str, ...]:
    """The first few demands that no proof covers, and the number of further ones."""
    demands = need.demands or (_least_demand(need),)
    gaps = list(dict.fromkeys(str(gap) for demand in demands for gap in coverage.gaps(demand)))
    told = gaps[:_MOST_GAPS]
    return (*told, f"and {len(gaps) - len(told)} more") if len(gaps) > len(told) else tuple(told)


def _least_demand(need: Requirement) -> Demand:
    """The demand that applies whatever the steps are."""
    spec = need.spec
    values: dict[Dimension, frozenset[Value]] = {
        Dimension.HEAD_DIM: frozenset({spec.head_dim}),
        Dimension.GROUP_SIZE: frozenset({spec.group_size}),
        Dimension.DTYPE: frozenset({dtype_name(need.dtype)}),
        **{dimension: frozenset({value}) for dimension, value in spec.proof_values.items()},
    }
    if spec.kind in PAGED_KINDS:
        values[Dimension.PAGE_SIZE] = frozenset({need.page_size})
        values[Dimension.CACHE_DTYPE] = frozenset({dtype_name(need.cache_dtype)})
    return Demand({}, values)


def _read(path: Path, identity: Identity | None) -> Proof | str | None:
    """The proof in a file, None if there is no file, or the reason why it is not trusted."""
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return "expected a file that this user alone can write, got one that others can"
        proof = _parse(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"expected a proof, got {error}"
    if proof.identity.digest != path.stem or (identity is not None and proof.identity != identity):
        return "expected a proof of what its name says, got one of something else"
    return proof


def _parse(text: str) -> Proof:
    """Parses `Proof.to_json`'s output. Raises `ValueError` for anything else."""
    try:
        data = json.loads(text)
        identity = dict(data["identity"])
        proof = Proof(
            Identity(
                **identity
                | {
                    "compute_capability": tuple(identity["compute_capability"]),
                    "versions": tuple((name, version) for name, version in identity["versions"]),
                }
            ),
            Coverage.from_data(data["coverage"]),
            tuple(data["checks"]),
            data["date"],
        )
        proven_at = datetime.fromisoformat(proof.date)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"something else ({error})") from error
    whole = all(type(each) is str for each in proof.checks) and set(data) == {"format", *proof.to_data()}
    if data.get("format") != _FORMAT or not whole or not proof.checks or proven_at.tzinfo is None:
        raise ValueError("something else")
    return proof


def _versions(candidate: Candidate, capability: Capability) -> tuple[tuple[str, str], ...]:
    names = {*_TOOLCHAIN, candidate.distribution}
    if capability.package is not None:
        names |= _distributions(capability.package.split(".")[0])
    found = {name: version for name in names if (version := _version(name)) is not None}
    return tuple(sorted((found | {"sightline": __version__, "python": platform.python_version()}).items()))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def _distributions(module: str) -> frozenset[str]:
    """Distributions that provide the module; their names may differ from it."""
    return frozenset(metadata.packages_distributions().get(module, ()))


def _sources(candidate: Candidate) -> str:
    """Digest of Sightline's sources and of the whole package that contains the backend."""
    backend = candidate.load()
    try:
        module = Path(inspect.getfile(backend)).resolve()
    except (TypeError, OSError) as error:
        raise ConfigError(
            f"expected backend {candidate.name!r} in a file, got {backend!r}, which no proof can name; "
            "put it in a module"
        ) from error
    depth = backend.__module__.count(".") + (module.stem == "__init__")
    package = module.parents[depth - 1].rglob("*.py") if depth else ()
    files = {path.relative_to(module.parents[depth]): path for path in (module, *package)}
    for name in _PROVEN_SOURCES:
        files |= {path.relative_to(_SIGHTLINE.parent): path for path in (_SIGHTLINE / name).rglob("*.py")}
    return _digest_of({path.as_posix(): sha256(file.read_bytes()).hexdigest() for path, file in files.items()})


def _digest_of(value: Mapping[str, Any]) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> Any:
    match value:
        case Enum():
            return value.value
        case torch.dtype():
            return dtype_name(value)
        case frozenset():
            return sorted(_plain(each) for each in value)
        case tuple():
            return [_plain(each) for each in value]
        case _:
            return value
