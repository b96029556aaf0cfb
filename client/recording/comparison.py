"""By how much what a replay computes differs from what the launched callable does: tensors of any dtype, however they lie.

The distance of two tensors is a number: of floating-point and complex types the largest difference as a share of the largest value,
of all others the share of elements that differ. Whether that is too much goes by the coarsest type of the graph, and by how
much the callable differs from itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client.replay.relocation_table import Share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex128: 1e-9,
    torch.complex64: 1e-4,
    torch.complex32: 1e-2,
}
"""Distance that kernels may have which add in an order of their own. Of a graph that takes or returns several types it is that of the
coarsest: a gradient in 32 bits of what was computed in 16 differs by as much as those."""
OF_ROUNDED_PRODUCTS = 1e-3
"""The same of 32 bits where products of matrices may be rounded to fewer (TF32)."""
OF_EIGHT_BITS = 0.25
"""The same of floating-point types of eight bits: a value's distance from the next one, as a share of it."""
TIMES_NOISE = 4.0
"""How many times as far as from itself the callable may be from a replay: the largest of a few differences is no bound of the next one."""
MAX_NOISE = 0.1
"""A callable that differs from itself by more could hide anything."""
OF_UNSTEADY = 0.01
"""The share of elements of other types, one at least, that may differ if the callable differs from itself in anything: indices of
what is largest and masks follow from such values."""

SMALL_BYTES = 256 << 10
AT_ONCE = Share(count=1, least=32 << 20, most=32 << 20)
"""Tensors of `SMALL_BYTES` at most are compared together, so many bytes at a time: they are copied for that."""
PIECE_BYTES = 32 << 20
"""Larger tensors are looked at in pieces: several times as much memory is needed meanwhile."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By bytes of an element, what its bits are seen as; those of 16 bytes as two."""

Pairs = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""What a replay made and what the launched callable did, of one form each, by index."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What a replay did otherwise than the callable: `what` names it, `detail` says more, which may be something else the next time."""

    what: str
    detail: str = ""
    in_values: bool = False
    """An output or an input holds something else: the replay may read what lies where nobody knows of."""

    def __str__(self) -> str:
        return f"verification: {self.what}{self.detail}"


# --- all values of a call ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Values:
    """What a call left: its outputs, and its inputs as they are then."""

    outputs: Sequence[Any]
    inputs: Sequence[Any]

    @property
    def all(self) -> list[Any]:
        """Both, the outputs first."""
        return [*self.outputs, *self.inputs]

    def name(self, index: int) -> str:
        """Return what the value of that index among `all` is called."""
        count = len(self.outputs)
        return f"output {index}" if index < count else f"input {index - count}"


class Again(Protocol):
    """Runs a replay and the launched callable some more times on the inputs that they have run on."""

    def replays(self) -> Iterable[Values]:
        """Return what some more replays leave."""

    def launches(self) -> Iterable[Values]:
        """Return what some more launches leave."""


def compare(
    replayed: Values,
    launched: Values,
    tolerance: float,
    again: Again | None = None,
) -> Disagreement | None:
    """Return how a replay differs from the launched callable by more than it may; `again` runs both some more times on the same inputs."""
    if len(replayed.outputs) != len(launched.outputs):
        return Disagreement(f"{len(replayed.outputs)} outputs and not {len(launched.outputs)}")
    pairs: Pairs = {}
    for index, (mine, right) in enumerate(zip(replayed.all, launched.all, strict=True)):
        if isinstance(right, torch.Tensor) and mine is not right and form_of(mine) == form(right):
            pairs[index] = mine, right
        elif mine is not right and not _is_same_value(mine, right):
            return Disagreement(f"{launched.name(index)} differs", in_values=True)
    pairs = {index: pairs[index] for index in differing(pairs)}
    found, kinds = distances(pairs), {index: kind(right) for index, (_, right) in pairs.items()}
    far = too_far(found, kinds, tolerance)
    if far and again is not None:
        noise = _noise(again, pairs)
        if max(noise.values()) > MAX_NOISE:
            return Disagreement("it differs from itself", in_values=True)
        far = too_far(found, kinds, tolerance, noise)
    if not far:
        return None
    index = min(far)
    by_how_much = _by_how_much(found[index], kinds[index])
    return Disagreement(f"{launched.name(index)} differs", by_how_much, in_values=True)


def _noise(again: Again, pairs: Pairs) -> dict[int, float]:
    """Return how far at least a replay and the launched callable are each from itself, by index.

    It is kernels that add in an order of their own if both are. A replay alone may have lost an order that it needs, and a callable
    alone is told something else by the host each time; it is not launched then.
    """
    noise = _furthest_of(again.replays(), {index: mine for index, (mine, _) in pairs.items()})
    if not any(noise.values()):
        return noise
    launched = _furthest_of(again.launches(), {index: right for index, (_, right) in pairs.items()})
    return {index: min(each, launched[index]) for index, each in noise.items()}


def _furthest_of(runs: Iterable[Values], first: Mapping[int, torch.Tensor]) -> dict[int, float]:
    furthest = dict.fromkeys(first, 0.0)
    for values in runs:
        every = values.all
        found = distances({index: (every[index], each) for index, each in first.items()})
        furthest = {index: max(found[index], each) for index, each in furthest.items()}
    return furthest


@dataclass(frozen=True, slots=True)
class Kind:
    """What a tensor's distance from another one is judged by."""

    dtype: torch.dtype
    elements: int

    def allowed(self, tolerance: float, *, is_unsteady: bool) -> float:
        """Return which distance may be, if the graph's tolerance is this; it `is_unsteady` if the callable differs from itself."""
        if is_measured(self.dtype):
            return tolerance
        return max(OF_UNSTEADY, 1 / max(self.elements, 1)) if is_unsteady else 0.0


def kind(tensor: torch.Tensor) -> Kind:
    """Return what a tensor's distance is judged by."""
    return Kind(tensor.dtype, tensor.numel())


def too_far(
    found: Mapping[int, float],
    kinds: Mapping[int, Kind],
    tolerance: float,
    noise: Mapping[int, float] | None = None,
) -> list[int]:
    """Return which distances are too large, by index; `noise` is how far the callable is from itself."""
    noise = noise or {}
    is_unsteady = any(noise.values())
    allowed = {
        index: max(each.allowed(tolerance, is_unsteady=is_unsteady), TIMES_NOISE * noise.get(index, 0.0))
        for index, each in kinds.items()
    }
    return [index for index, distance in found.items() if not distance <= allowed[index]]


def tolerance_of(values: Iterable[Any]) -> float:
    """Return the distance that values of a graph which takes and returns these may have though all is right."""
    dtypes = {each.dtype for each in values if isinstance(each, torch.Tensor)}
    coarsest = max((_tolerance(dtype) for dtype in dtypes), default=0.0)
    if dtypes & {torch.float32, torch.complex64} and _products_are_rounded():
        return max(coarsest, OF_ROUNDED_PRODUCTS)
    return coarsest


def _tolerance(dtype: torch.dtype) -> float:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return OF_EIGHT_BITS
    return TOLERANCE.get(dtype, 0.0)


def _products_are_rounded() -> bool:
    for setting in (torch.get_float32_matmul_precision, lambda: torch.backends.cuda.matmul.fp32_precision):
        # Either of the two ways to set this may refuse to be read once the other was used.
        try:
            if setting() in {"high", "medium", "tf32"}:
                return True
        except (AttributeError, RuntimeError):
            continue
    return False


def _by_how_much(distance: float, of: Kind) -> str:
    """Return how far two tensors are apart that differ, for whoever reads the report."""
    if not math.isfinite(distance):
        return " in what are numbers"
    percent = 100 * distance
    told = "over 1000" if percent > 1000 else f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    return f" by {told} % of its largest value" if is_measured(of.dtype) else f" in {told} % of its elements"


def _is_same_value(mine: Any, right: Any) -> bool:
    return not isinstance(right, torch.Tensor) and type(mine) is type(right) and bool(mine == right)


def form_of(value: Any) -> tuple[Any, ...] | None:
    """Return what two tensors have in common that can be compared; None for what is no tensor."""
    return form(value) if isinstance(value, torch.Tensor) else None


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the same of a tensor."""
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tensor.device, tuple(tensor.size()), tuple(tensor.stride()), flags


# --- tensors that differ in any bit ------------------------------------------------------------------------------


def differing(pairs: Pairs) -> list[int]:
    """Return which of some pairs differ in any bit; small ones are held against each other together, as the host launches two kernels for each."""
    pairs = {index: pair for index, pair in pairs.items() if pair[1].numel()}
    together, alone = _batches(pairs)
    asked = [_differ(*map(_as_one, zip(*(pairs[each] for each in batch), strict=True))) for batch in together]
    asked += [_differ(*map(bits, pairs[index])) for index in alone]
    told = read(asked)
    found = [*itertools.compress(alone, told[len(together) :])]
    unclear = [*itertools.chain.from_iterable(itertools.compress(together, told))]
    found += itertools.compress(unclear, read([_differ(*map(bits, pairs[index])) for index in unclear]))
    return sorted(found)


def _batches(pairs: Pairs) -> tuple[list[list[int]], list[int]]:
    """Return which pairs are to be looked at together, and which alone."""
    alike: dict[tuple[int, torch.device], list[int]] = {}
    alone = []
    for index, (_, right) in pairs.items():
        if right.nbytes <= SMALL_BYTES and right.is_contiguous():
            alike.setdefault((right.element_size(), right.device), []).append(index)
        else:
            alone.append(index)
    together = [
        [those[number] for number in batch]
        for those in alike.values()
        for batch in AT_ONCE.pieces([pairs[index][1].nbytes for index in those])
    ]
    return together, alone


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([bits(each).reshape(-1) for each in tensors])


def _differ(mine: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    differ = [torch.ne(*pieces).any() for pieces in _in_pieces(mine, right)]
    return differ[0] if len(differ) == 1 else torch.stack(differ).any()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as whole numbers: the same memory, whatever its type and whichever way it is read."""
    offset, size, stride = tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
    if tensor.element_size() == 16:
        offset, size, stride = 2 * offset, (*size, 2), (*(2 * each for each in stride), 1)
    made = torch.empty(0, dtype=_INTEGERS[tensor.element_size()], device=tensor.device)
    return made.set_(tensor.untyped_storage(), offset, size, stride)


def read(questions: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of tensors of no dimensions; each device is waited for once, and not for each of hundreds."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in questions:
        by_device.setdefault(each.device, []).append(each)
    # Of several devices: attention keeps its random state on the CPU, beside what it returns.
    answers = {device: iter(torch.stack(mine).tolist()) for device, mine in by_device.items()}
    return [next(answers[each.device]) for each in questions]


# --- how far apart -----------------------------------------------------------------------------------------------


def distances(pairs: Pairs) -> dict[int, float]:
    """Return how far the tensors of each pair are apart, by index; infinity where one is a number and the other is none."""
    return dict(zip(pairs, read([distance(*pair) for pair in pairs.values()]), strict=True))


def distance(mine: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the same of two tensors of one form, on their device and without waiting for it: 64 bits, no dimensions."""
    mine, right = mine.detach(), right.detach()
    if not is_measured(right.dtype):
        counts = [torch.ne(*map(bits, pieces)).sum() for pieces in _in_pieces(mine, right)]
        return torch.stack(counts).sum().double() / max(bits(right).numel(), 1)
    far = [_furthest(_wide(one), _wide(other)) for one, other in _in_pieces(mine, right)]
    off, largest = (torch.stack([each[place] for each in far]).amax().double() for place in (0, 1))
    return torch.where(off == 0, off, off / largest)


def is_measured(dtype: torch.dtype) -> bool:
    """Whether the values of a type can be further apart or less."""
    return dtype in TOLERANCE or (
        dtype.is_floating_point and dtype.itemsize == 1 and "float4" not in str(dtype)
    )


def _in_pieces(mine: torch.Tensor, right: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if right.numel() * right.element_size() <= PIECE_BYTES or not right.dim():
        return [(mine, right)]
    size = right.size()
    dim = max(range(right.dim()), key=lambda each: size[each])
    length = max(1, size[dim] * PIECE_BYTES // (right.numel() * right.element_size()))
    return [*zip(mine.split(length, dim), right.split(length, dim), strict=True)]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in a type that can be computed with."""
    if tensor.is_complex():
        wide = torch.complex128 if tensor.dtype == torch.complex128 else torch.complex64
        return torch.view_as_real(tensor.to(wide).resolve_conj().resolve_neg())
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32).resolve_neg()


def _furthest(mine: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest difference, infinity where only one is a number, and the largest value that is a number."""
    same = (mine == right) | (mine.isnan() & right.isnan())
    off = torch.where(same, 0.0, (mine - right).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return off.amax(), torch.where(right.isfinite(), right.abs(), 0.0).amax()
