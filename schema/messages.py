"""The messages between client and daemon: frozen, validated in the constructor, versioned, JSON on the wire.

An existing object is valid, whichever side made it. Unknown fields are ignored, so that an older peer can read the messages
of a newer one. A missing or invalid field raises `InvalidMessageError`. Sizes are bounded, and numbers finite.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pygraphd.schema.checks import (
    InvalidMessageError,
    check_bool,
    check_digest,
    check_int,
    check_number,
    check_text,
)
from pygraphd.schema.keys import Environment, sized_digest
from pygraphd.schema.readers import reader
from pygraphd.schema.reasons import NOT_STATED, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

API_VERSION = 3
"""Version of the messages that hold decisions, and part of the paths below: a peer of another version answers these with 404. Pings,
statistics and `prune` stay under /v1, so that each version can recognise, stop and prune each other."""
LOOKUP_PATH = f"/v{API_VERSION}/lookup"
RECORD_PATH = f"/v{API_VERSION}/record"
SIZES_PATH = f"/v{API_VERSION}/sizes"
LEASE_PATH = f"/v{API_VERSION}/lease"
REDERIVE_PATH = f"/v{API_VERSION}/rederive"
IMPORT_PATH = f"/v{API_VERSION}/import"
DATABASE_CAUSE = "database"
"""The `cause` in the answer to a request that the database keeps the daemon from serving."""
_Item = TypeVar("_Item")
MAX_REQUEST_GRAPHS = 1024
"""Graphs in one request; a compiled module has a handful of partitions."""
MAX_BODY_BYTES = 4 * 2**20
MAX_MICROSECONDS = 3.6e9
"""One hour: a longer call is not a sample of anything."""
# Up to here a double holds each integer, as SQLite's REAL columns and many readers of JSON have them.
MAX_COUNT = 2**53
MAX_INTEGER_INPUTS = 64
"""Integer inputs by which a graph may be decided apart. A graph with more has one decision for all sizes."""
_MAX_INT64 = 2**63 - 1
MAX_HOST = 256
"""Characters of a host's name."""
MAX_UID = 2**32
MAX_LEASE_S = 86_400.0
MAX_JOB = 64
"""Characters of a job's name."""
MAX_TIME = 1e12
"""Seconds since the epoch: far in the future."""


class Deployment(enum.StrEnum):
    """How a compiled graph is run."""

    KERNELS = "KERNELS"
    """The compiled callable as it is, launched kernel by kernel."""
    GRAPH = "GRAPH"
    """A relocatable CUDA Graph of ours (`client.recording.recordings`)."""


class Kind(enum.StrEnum):
    """Which part of a training or serving step a compiled graph is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The cost of one deployment of one graph over `samples` real calls; all times in microseconds.

    `host_us` and `span_us` are the medians of a call's host time and of its GPU span; `host_mad_us` and `span_mad_us` are their
    median absolute deviations (None: an older version did not store them). `median_us` and `mad_us` describe the interval from one
    call to the next (see `client.autotune.sampler`). `busy` is the share of calls that found the GPU at work.
    """

    deployment: Deployment
    samples: int
    median_us: float
    mad_us: float
    host_us: float
    span_us: float
    busy: float
    host_mad_us: float | None = None
    span_mad_us: float | None = None

    def __post_init__(self) -> None:
        check_int("samples", self.samples, maximum=10**9, minimum=1)
        for name in ("median_us", "mad_us", "host_us", "span_us"):
            check_number(name, getattr(self, name), maximum=MAX_MICROSECONDS)
        for name in ("host_mad_us", "span_mad_us"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), maximum=MAX_MICROSECONDS)
        check_number("busy", self.busy, maximum=1.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """The deployment chosen for a graph, and why; `policy` is the version of the policy that chose.

    `against` is the reason against the other deployment. A decision that is not `final` is measured again by the next program.
    Then there were too few calls (`calls` has their number), measurements were too noisy, or a GRAPH was refused for a reason that may pass.
    """

    deployment: Deployment
    reason: Reason
    policy: int
    final: bool = True
    calls: int = 0
    against: Reason = NOT_STATED

    def __post_init__(self) -> None:
        check_int("policy", self.policy, maximum=10**6)
        check_bool("final", self.final)
        check_int("calls", self.calls, maximum=MAX_COUNT)


@dataclass(frozen=True, slots=True)
class Graph:
    """One partition as the cache knows it: its digest, and the facts that `cache inspect` shows.

    `operators` is the number of operators in its FX graph. `sizes` are the integer inputs (dynamic sizes) that the entry is for, in
    the order of the partition's inputs; empty: there are none, or the entry is for all sizes. `whole` is the digest of the graph without
    sizes, by which its sizes are found; None: it has no sizes, or an older client does not say.
    """

    digest: str
    kind: Kind
    partition: int
    partitions: int
    operators: int
    sizes: tuple[int, ...] = ()
    whole: str | None = None

    def __post_init__(self) -> None:
        check_digest("digest", self.digest)
        check_int("partitions", self.partitions, maximum=10**6, minimum=1)
        check_int("partition", self.partition, maximum=self.partitions - 1)
        check_int("operators", self.operators, maximum=MAX_COUNT)
        check_sizes(self.sizes)
        if self.whole is not None:
            check_sized(self.digest, self.whole, self.sizes)

    @property
    def name(self) -> str:
        """The name of this graph in logs and traces: its kind, the first digits of its digest, its partition if there are more, and its sizes."""
        part = f" {self.partition + 1}/{self.partitions}" if self.partitions > 1 else ""
        sizes = f" at {','.join(map(str, self.sizes))}" if self.sizes else ""
        return f"{self.kind.value} {self.digest[:12]}{part}{sizes}"

    def at(self, sizes: tuple[int, ...]) -> Graph:
        """Return this graph at one set of dynamic sizes, with a digest of its own; raises InvalidMessageError if they are too many."""
        digest = sized_digest(self.digest, sizes)
        return dataclasses.replace(self, digest=digest, sizes=sizes, whole=self.digest)


def check_sizes(sizes: tuple[int, ...]) -> None:
    """Raise InvalidMessageError if `sizes` are too many, or not integers of 64 bits."""
    if len(sizes) > MAX_INTEGER_INPUTS:
        raise InvalidMessageError(f"sizes: {len(sizes)} items, at most {MAX_INTEGER_INPUTS} allowed")
    for size in sizes:
        check_int("sizes", size, maximum=_MAX_INT64, minimum=-_MAX_INT64)


def check_sized(digest: str, whole: str, sizes: tuple[int, ...]) -> None:
    """Raise InvalidMessageError unless `digest` is that of the graph `whole` at `sizes`, so that nobody adds sizes to a graph that is another."""
    check_digest("whole", whole)
    if sized_digest(whole, sizes) != digest:
        raise InvalidMessageError("whole: is another graph than the one that the digest is made of")


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached decision for one graph in the environment of the request, and who recorded it.

    `uid` and `host` are None and empty if they are not known. `cost_us`, `host_us` and `span_us` are the medians of the chosen
    deployment in the measurements that the decision rests on (see `Measurement`). `measured_at` is their time in seconds since the
    epoch. All four are None if the decision rests on no measurement, or if an older peer does not send them.
    """

    graph: str
    decision: Decision
    uid: int | None = None
    host: str = ""
    cost_us: float | None = None
    measured_at: float | None = None
    host_us: float | None = None
    span_us: float | None = None

    def __post_init__(self) -> None:
        check_digest("graph", self.graph)
        check_text("host", self.host, maximum=MAX_HOST)
        if self.uid is not None:
            check_int("uid", self.uid, maximum=MAX_UID)
        for name in ("cost_us", "host_us", "span_us"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), maximum=MAX_MICROSECONDS)
        if self.measured_at is not None:
            check_number("measured_at", self.measured_at, maximum=MAX_TIME)

    def rests_on_the_same(self, other: Entry) -> bool:
        """Whether nothing was measured between two answers for one graph, although they may be worded otherwise."""
        if self.measured_at is not None or other.measured_at is not None:
            return self.measured_at == other.measured_at
        return (self.decision, self.uid, self.host) == (other.decision, other.uid, other.host)


@dataclass(frozen=True, slots=True)
class Record:
    """A record for the cache: a graph, the decision for it, and the measurements that the decision rests on.

    `recording_us` is the host time of recording and verifying the GRAPH, in microseconds; None: nothing was recorded, or the client
    does not say.
    """

    graph: Graph
    decision: Decision
    measurements: tuple[Measurement, ...] = ()
    recording_us: float | None = None

    def __post_init__(self) -> None:
        if self.recording_us is not None:
            check_number("recording_us", self.recording_us, maximum=MAX_MICROSECONDS)
        # Of two, it would depend on their order which one counts.
        if len({each.deployment for each in self.measurements}) < len(self.measurements):
            raise InvalidMessageError("measurements: at most one of each deployment")

    def entry(self, uid: int | None, host: str, measured_at: float | None) -> Entry:
        """Return the answer to a lookup that this record gives; `measured_at`: the time of its measurements, if there are any."""
        for each in self.measurements:
            if each.deployment is self.decision.deployment:
                times = each.median_us, measured_at, each.host_us, each.span_us
                return Entry(self.graph.digest, self.decision, uid, host, *times)
        return Entry(self.graph.digest, self.decision, uid, host)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who measured: kept beside a row as quality, never part of a key. The daemon adds the peer's uid itself.

    `job` is the name that a scheduler gives the job; empty: there is none, or the client does not say.
    """

    host: str
    version: str
    job: str = ""

    def __post_init__(self) -> None:
        check_text("host", self.host, maximum=MAX_HOST)
        check_text("version", self.version, maximum=64)
        check_text("job", self.job, maximum=MAX_JOB)


@dataclass(frozen=True, slots=True)
class Ping:
    """The daemon's answer to `GET /v1/ping`. A daemon that gives it is running."""

    name: str
    version: str
    api: int
    pid: int
    capabilities: tuple[str, ...]

    def __post_init__(self) -> None:
        for capability in self.capabilities:
            check_text("capabilities", capability, maximum=64)
        check_text("name", self.name, maximum=64)
        check_text("version", self.version, maximum=64)
        check_int("api", self.api, maximum=10**6, minimum=1)
        check_int("pid", self.pid, maximum=2**31)


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """`LOOKUP_PATH`: the decisions for some graphs (digests) in one environment (digest)."""

    environment: str
    graphs: tuple[str, ...]

    def __post_init__(self) -> None:
        check_digest("environment", self.environment)
        _check_length("graphs", self.graphs)
        for graph in self.graphs:
            check_digest("graphs", graph)


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The entries that were found, in any order. It repeats the environment, so that a stray answer is recognised."""

    environment: str
    version: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        check_digest("environment", self.environment)
        check_text("version", self.version, maximum=64)
        _check_length("entries", self.entries)


@dataclass(frozen=True, slots=True)
class SizesRequest:
    """`SIZES_PATH`: the final decisions for the dynamic sizes of one graph (digest) in one environment (digest), `most` of them."""

    environment: str
    graph: str
    most: int

    def __post_init__(self) -> None:
        check_digest("environment", self.environment)
        check_digest("graph", self.graph)
        check_int("most", self.most, maximum=MAX_REQUEST_GRAPHS, minimum=1)


@dataclass(frozen=True, slots=True)
class SizedEntry:
    """The entry of a graph at one set of dynamic sizes."""

    sizes: tuple[int, ...]
    entry: Entry

    def __post_init__(self) -> None:
        check_sizes(self.sizes)
        if not self.sizes:
            raise InvalidMessageError("sizes: expected one at least")


@dataclass(frozen=True, slots=True)
class SizesAnswer:
    """The sizes that were found, the most used first. It repeats environment and graph, so that a stray answer is recognised.

    Shipped ones are not among them, which a lookup finds; clients of earlier versions look for others unless an answer is `complete`.
    """

    environment: str
    version: str
    graph: str
    entries: tuple[SizedEntry, ...]
    complete: bool = False

    def __post_init__(self) -> None:
        check_digest("environment", self.environment)
        check_text("version", self.version, maximum=64)
        check_digest("graph", self.graph)
        _check_length("entries", self.entries)
        for each in self.entries:
            check_sized(each.entry.graph, self.graph, each.sizes)


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """`RECORD_PATH`: new decisions and measurements; also the content of one file in the spool folder."""

    environment: Environment
    origin: Origin
    records: tuple[Record, ...]

    def __post_init__(self) -> None:
        _check_length("records", self.records)


@dataclass(frozen=True, slots=True)
class RecordAnswer:
    """The number of records stored. It repeats the environment's digest."""

    environment: str
    version: str
    stored: int

    def __post_init__(self) -> None:
        check_digest("environment", self.environment)
        check_text("version", self.version, maximum=64)
        check_int("stored", self.stored, maximum=MAX_REQUEST_GRAPHS)


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """`LEASE_PATH`: a process asks for leases of some graphs (digests) in one environment (digest).

    `holder` names the process, the same in all its requests. Asking again prolongs its leases.
    """

    environment: str
    holder: str
    graphs: tuple[str, ...]

    def __post_init__(self) -> None:
        check_digest("environment", self.environment)
        check_text("holder", self.holder, maximum=64)
        _check_length("graphs", self.graphs)
        for graph in self.graphs:
            check_digest("graphs", graph)


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """Which of the graphs the holder may measure, for `seconds` from now; others measure the rest. Repeats the environment."""

    environment: str
    version: str
    granted: tuple[str, ...]
    seconds: float

    def __post_init__(self) -> None:
        check_digest("environment", self.environment)
        check_text("version", self.version, maximum=64)
        _check_length("granted", self.granted)
        for graph in self.granted:
            check_digest("granted", graph)
        check_number("seconds", self.seconds, maximum=MAX_LEASE_S)


Message = (
    Ping
    | LookupRequest
    | LookupAnswer
    | SizesRequest
    | SizesAnswer
    | RecordRequest
    | RecordAnswer
    | LeaseRequest
    | LeaseAnswer
)


def portions(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    """Return items in portions that fit in a request."""
    return [items[at : at + MAX_REQUEST_GRAPHS] for at in range(0, len(items), MAX_REQUEST_GRAPHS)]


def _check_length(name: str, items: Sequence[object]) -> None:
    if len(items) > MAX_REQUEST_GRAPHS:
        raise InvalidMessageError(f"{name}: {len(items)} items, at most {MAX_REQUEST_GRAPHS} allowed")


def encode(message: Message | Entry) -> bytes:
    """Return a message, or an entry of one, as compact JSON."""
    # Many entries of an answer share one decision, and `dataclasses.asdict` of each took most of the time.
    decisions: dict[int, dict[str, Any]] = {}

    def values(part: Any) -> dict[str, Any]:
        kind: Any = type(part)
        if kind is not Decision:
            return {name: getattr(part, name) for name in _names(kind)}
        if (known := decisions.get(id(part))) is None:
            known = decisions[id(part)] = _decision_values(part)
        return known

    # By default json writes NaN, which is no JSON.
    text = json.dumps(message, default=values, separators=(",", ":"), allow_nan=False, check_circular=False)
    return text.encode()


@functools.lru_cache(maxsize=1024)
def _decision_values(decision: Decision) -> dict[str, Any]:
    return dataclasses.asdict(decision)


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


_M = TypeVar("_M")


def decode(kind: type[_M], data: bytes) -> _M:
    """Return the message of type `kind` in `data`; raises InvalidMessageError for anything else."""
    if len(data) > MAX_BODY_BYTES:
        raise InvalidMessageError(f"{len(data)} bytes, at most {MAX_BODY_BYTES} allowed")
    try:
        value = json.loads(data)
    # A peer can send arrays that are nested deeply: json raises RecursionError, which is no ValueError.
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError(f"not JSON: {error}") from error
    return read(kind, value)


def read(kind: type[_M], value: object) -> _M:
    """Return the object of type `kind` that a JSON value describes; raises InvalidMessageError for anything else."""
    built = reader(cast(Any, kind))(kind.__name__, value)
    assert isinstance(built, kind)
    return built
