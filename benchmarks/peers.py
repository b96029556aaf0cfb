"""The ways of running a model that are compared: plain PyTorch's, and PyGraph's with a cold and a warm cache."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from benchmarks.errors import UnknownNameError


class Compile(enum.StrEnum):
    """What the child process does with the module."""

    EAGER = "eager"
    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"


class Cache(enum.StrEnum):
    """What the daemon knows when the process starts."""

    NONE = "none"
    """No daemon and no hook: the product takes no part."""
    COLD = "cold"
    """A daemon with an empty database, a new one for each repetition."""
    WARM = "warm"
    """A daemon whose database an unmeasured process has filled with the same workload."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One column of the comparison."""

    name: str
    compile: Compile
    cache: Cache
    summary: str
    environ: tuple[tuple[str, str], ...] = ()
    """What it sets beside what all of its kind do."""
    after: str = ""
    """Of a peer with a warm cache: the one with an empty cache that fills it."""


_PEERS = (
    Peer("eager", Compile.EAGER, Cache.NONE, "not compiled"),
    Peer("default", Compile.DEFAULT, Cache.NONE, "torch.compile(module)"),
    Peer(
        "reduce-overhead",
        Compile.REDUCE_OVERHEAD,
        Cache.NONE,
        'torch.compile(module, mode="reduce-overhead")',
    ),
    Peer("pygraph-cold", Compile.REDUCE_OVERHEAD, Cache.COLD, "the same under PYGRAPH=1, empty cache"),
    Peer(
        "pygraph-warm",
        Compile.REDUCE_OVERHEAD,
        Cache.WARM,
        "the same under PYGRAPH=1, filled cache",
        after="pygraph-cold",
    ),
    Peer(
        "pygraph-unplaced",
        Compile.REDUCE_OVERHEAD,
        Cache.COLD,
        "pygraph-cold with PYGRAPH_PLACEMENT=0",
        (("PYGRAPH_PLACEMENT", "0"),),
    ),
    Peer(
        "pygraph-default", Compile.DEFAULT, Cache.COLD, "torch.compile(module) under PYGRAPH=1, empty cache"
    ),
    Peer(
        "pygraph-default-warm",
        Compile.DEFAULT,
        Cache.WARM,
        "torch.compile(module) under PYGRAPH=1, filled cache",
        after="pygraph-default",
    ),
)
PEERS = {peer.name: peer for peer in _PEERS}
OURS = tuple(peer.name for peer in _PEERS if peer.cache is not Cache.NONE)


def select_peers(names: list[str]) -> tuple[Peer, ...]:
    """Return the peers of these names, in this order; raises UnknownNameError."""
    if unknown := [name for name in names if name not in PEERS]:
        raise UnknownNameError("peer", unknown, list(PEERS))
    return tuple(PEERS[name] for name in dict.fromkeys(names))
