"""The two halves of a cache key: the compiled graph, and the environment in which it runs.

A key is the SHA-256 of labelled, length-prefixed fields, a version first. So no two lists of fields give the same input by the
way they are joined. Nothing here needs torch: `client.decisions.fingerprint` collects the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.checks import check_digest, check_int, check_text

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY_VERSION = 2
"""Part of every key. Raise it when the meaning of a field or of a measurement changes: rows of other versions are never found again."""

DIGITS = re.compile("[0-9a-fA-F]*")
"""Matches the beginning of a key as a person may type it."""


def digest(label: str, fields: Iterable[tuple[str, str]]) -> str:
    """Return the hex SHA-256 of named fields; `label` keeps different kinds of keys apart."""
    sha = hashlib.sha256()
    for part in (label, str(KEY_VERSION)):
        _feed(sha, part)
    for name, value in fields:
        _feed(sha, name)
        _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: hashlib._Hash, text: str) -> None:
    # Text from file names and variables may hold lone surrogates, which UTF-8 alone refuses.
    payload = text.encode("utf-8", "surrogatepass")
    sha.update(len(payload).to_bytes(8, "big"))
    sha.update(payload)


@dataclass(frozen=True, slots=True)
class Environment:
    """Where timings were taken. Two processes share rows only if every field here is equal.

    Left out on purpose: device index, UUID, host, paths, rank. `gpu` is "none" without a CUDA device;
    a factor that could not be read is "unknown: " and why, so that a broken machine shares no rows with a sound one.
    """

    # Names and order of the fields are hashed: a change makes every stored entry unfindable.
    gpu: str
    capability: str
    sm_count: int
    memory_mb: int
    mig: str
    torch: str
    triton: str
    cuda: str
    driver: str
    cudnn: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _NUMBERS:
                check_int(field.name, value, maximum=2**40)
            else:
                check_text(field.name, value, maximum=256)

    def factors(self) -> dict[str, str | int]:
        """Return the fields by name, in the order in which they are hashed."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def digest(self) -> str:
        """Return the environment's half of a key: 64 hex digits."""
        return digest("environment", ((name, str(value)) for name, value in self.factors().items()))


_NUMBERS = frozenset({"sm_count", "memory_mb"})


@dataclass(frozen=True, slots=True)
class GraphFactors:
    """The fields of a graph's key: everything that changes the behaviour or the cost of one partition.

    `text` is the post-grad FX graph as Inductor prints it. `user_kernels` is the generated code, if it holds kernels of the user.
    `options` are the Inductor settings that change kernels, as sorted (name, value) pairs. `static_inputs` and `mutated_inputs`
    are input positions.
    """

    text: str
    kind: str
    partition: int
    partitions: int
    static_inputs: tuple[int, ...]
    mutated_inputs: tuple[int, ...]
    options: tuple[tuple[str, str], ...]
    user_kernels: str = ""

    def digest(self) -> str:
        """Return the graph's half of a key: 64 hex digits, equal wherever the same thing is compiled."""
        return digest(
            "graph",
            (
                ("text", canonical_text(self.text)),
                ("user kernels", _ADDRESS.sub("0x", _COMMENT.sub("", self.user_kernels))),
                ("kind", self.kind),
                ("partition", f"{self.partition}/{self.partitions}"),
                ("static", _positions(self.static_inputs)),
                ("mutated", _positions(self.mutated_inputs)),
                *((f"option {name}", value) for name, value in sorted(self.options)),
            ),
        )


def sized_digest(graph: str, sizes: tuple[int, ...]) -> str:
    """Return the digest of a graph at one set of dynamic sizes; `graph` is its digest without sizes."""
    check_digest("graph", graph)
    return digest("graph at sizes", (("graph", graph), ("sizes", ",".join(map(str, sizes)))))


def _positions(indices: tuple[int, ...]) -> str:
    return ",".join(map(str, sorted(set(indices))))


def entry_id(environment: str, graph: str) -> str:
    """Return the name of one cache entry: the digest over both halves of its key."""
    check_digest("environment", environment)
    check_digest("graph", graph)
    return digest("entry", (("environment", environment), ("graph", graph)))


_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_CLASS = re.compile(r"^(\s*)class [^\n(]+\(", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_KERNEL_INDEX = re.compile(r"\b(kernel_idx|constant_args_idx) = \d+")
_DEVICE = re.compile(r"\b(cuda|xpu):(\d+)|(device\(type='\w+', index=)(\d+)")
_DEFINED = re.compile(r"""^\s+(\w+)(?:: "[^"]*")? = |[(,] ?(\w+): "|\b([su]\d+)\b""", re.MULTILINE)
# Nothing behind a dot: the name of an operator stays, though a value may be called alike.
_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


@functools.lru_cache(maxsize=1)  # the partitions of one graph come one after another
def canonical_text(text: str) -> str:
    """Return a printed FX graph without the parts that do not change its kernels.

    Removes comments (file names, line numbers), class names, memory addresses and the process's numbers of user kernels. Renumbers
    device indices, value names and size symbols in order of appearance.
    """
    text = _COMMENT.sub("", text)
    text = _CLASS.sub(r"\1class (", text)
    text = _ADDRESS.sub("0x", text)
    text = _KERNEL_INDEX.sub(r"\1", text)
    text = _renumber_devices(text)
    text = _renumber_names(text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def _renumber_devices(text: str) -> str:
    order: dict[str, int] = {}

    def rename(match: re.Match[str]) -> str:
        kind, index, prefix, keyword_index = match.groups()
        # By appearance, not one for all: a graph on two GPUs must not get the key of one on a single GPU.
        number = order.setdefault(index or keyword_index, len(order))
        return f"{kind}:{number}" if kind else f"{prefix}{number}"

    return _DEVICE.sub(rename, text)


def _renumber_names(text: str) -> str:
    names: dict[str, str] = {}
    for match in _DEFINED.finditer(text):
        name = match[1] or match[2] or match[3]
        names.setdefault(name, f"${len(names)}")
    return _WORD.sub(lambda match: names.get(match[0], match[0]), text)
