"""Compares the values that a replay and KERNELS leave: tensors of any dtype and any layout.

The distance of two tensors is a number. For floating-point and complex types it is the largest difference divided by the largest value. For
other types it is the share of elements that differ. The tolerance follows from the coarsest type of the graph, and from how much the
callable differs from itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraphd.client.replay.relocation_table import Share

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex128: 1e-9,
    torch.complex64: 1e-4,
    torch.complex32: 1e-2,
}
"""Accepted distance by dtype: kernels that add in another order differ by rounding. A graph with several dtypes has the largest of their
tolerances, since a 32-bit gradient of 16-bit values differs by as much as 16-bit values do."""
TF32_TOLERANCE = 1e-3
"""Accepted distance of 32-bit types where matrix products may be rounded to TF32."""
FLOAT8_TOLERANCE = 0.25
"""Accepted distance of floating-point types of 8 bits: the relative distance of neighbouring values."""
DISTANCE_FACTOR = 4.0
"""Accepted distance as a multiple of the callable's distance from itself: the largest of a few differences does not bound the next one."""
MAX_NOISE = 0.1
"""Accepted distance of the callable from itself. Greater noise could hide any error."""
NOISY_SHARE = 0.01
"""Share of the elements of an integer or boolean tensor (one at least) that may differ if the callable differs from itself in anything:
masks and indices of largest values follow from values that differ."""

SMALL_BYTES = 256 << 10
AT_ONCE = Share(count=1, least=32 << 20, most=32 << 20)
"""Tensors of at most `SMALL_BYTES` are concatenated and compared together, 32 MiB at a time."""
PIECE_BYTES = 32 << 20
"""Larger tensors are compared in pieces of 32 MiB: a comparison needs several times as much memory."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integer type for the bits of an element, by its bytes; an element of 16 bytes is two integers."""

ALL_NAN = "a result was NaN throughout when it was recorded, as a wrong address would have made it"

Pairs = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Tensors of a replay and of KERNELS that have the same form (see `form`), by index."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A difference between a replay and KERNELS."""

    what: str
    """The difference, in words that are the same each time it occurs."""
    detail: str = ""
    """The size of the difference, which may vary between attempts."""
    in_values: bool = False
    """Whether an output or input has other values: the replay may read memory at an address that relocation has missed."""
    by_digest: frozenset[int] = frozenset()
    """The values, by index in `Values.all`, of which only digests were there to be compared; they may be within the tolerance."""

    def __str__(self) -> str:
        return f"verification: {self.what}{self.detail}"


# --- all values of a call ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Values:
    """The outputs of a call, and its inputs as the call left them."""

    outputs: Sequence[Any]
    inputs: Sequence[Any]

    @property
    def all(self) -> list[Any]:
        """The outputs, followed by the inputs."""
        return [*self.outputs, *self.inputs]

    def name(self, index: int) -> str:
        """Return a name for the value at an index in `all`."""
        count = len(self.outputs)
        return f"output {index}" if index < count else f"input {index - count}"


@dataclass(frozen=True, slots=True)
class Again:
    """Functions that run a replay and KERNELS further times on the same inputs, and return the values that each run leaves."""

    replays: Callable[[], Iterable[Values]]
    runs_as_kernels: Callable[[], Iterable[Values]]


def compare(
    replayed: Values, of_kernels: Values, tolerance: float, again: Again | None = None
) -> Disagreement | None:
    """Return how a replay differs from KERNELS by more than the tolerance, and than either from itself in runs `again`; None if not."""
    if len(replayed.outputs) != len(of_kernels.outputs):
        return Disagreement(f"{len(replayed.outputs)} outputs and not {len(of_kernels.outputs)}")
    pairs: Pairs = {}
    for index, (mine, right) in enumerate(zip(replayed.all, of_kernels.all, strict=True)):
        if mine is right:
            continue  # an input that was read in place, or a value that a digest was compared for
        if isinstance(right, torch.Tensor) and form(mine) == form(right):
            pairs[index] = mine, right
        elif isinstance(right, torch.Tensor) or type(mine) is not type(right) or mine != right:
            return Disagreement(f"{of_kernels.name(index)} differs", in_values=True)
    # Bits first: they can be compared for every dtype and view, and equal ones need no arithmetic.
    pairs = {index: pairs[index] for index in differing(pairs)}
    found = distances(pairs)
    compared = {index: ComparedTensor(right.dtype, right.numel()) for index, (_, right) in pairs.items()}
    far = too_far(found, compared, tolerance)
    if far and again is not None:
        noise = _noise(again, pairs)
        if max(noise.values()) > MAX_NOISE:
            return Disagreement("it differs from itself", in_values=True)
        far = too_far(found, compared, tolerance, noise)
    if not far:
        return None
    # The first one, so that a fault of the graph reads the same each time; see `Disagreements.add`.
    index = min(far)
    by_how_much = _by_how_much(found[index], compared[index])
    return Disagreement(f"{of_kernels.name(index)} differs", by_how_much, in_values=True)


def _noise(again: Again, pairs: Pairs) -> dict[int, float]:
    """Return by index how far replays are from each other, or runs as KERNELS from each other, whichever is less.

    If both vary, the kernels add in varying order. If only replays vary, the graph may lack an ordering that it needs. If only KERNELS
    vary, the host passes other values each time. If replays agree, the callable is not run.
    """
    noise = _furthest_of(again.replays(), {index: mine for index, (mine, _) in pairs.items()})
    # KERNELS could not change the answer, and would take further values from the host, as a counter does.
    if not any(noise.values()):
        return noise
    of_kernels = _furthest_of(again.runs_as_kernels(), {index: right for index, (_, right) in pairs.items()})
    return {index: min(each, of_kernels[index]) for index, each in noise.items()}


def _furthest_of(runs: Iterable[Values], first: Mapping[int, torch.Tensor]) -> dict[int, float]:
    furthest = dict.fromkeys(first, 0.0)
    for values in runs:
        every = values.all
        found = distances({index: (every[index], each) for index, each in first.items()})
        furthest = {index: max(found[index], each) for index, each in furthest.items()}
    return furthest


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """The dtype and size of a compared tensor, on which its accepted distance depends."""

    dtype: torch.dtype
    elements: int

    def allowed(self, tolerance: float, *, is_unsteady: bool) -> float:
        """Return the accepted distance, given the graph's tolerance and whether the callable `is_unsteady`: differs from itself."""
        if is_measured(self.dtype):
            return tolerance
        return max(NOISY_SHARE, 1 / max(self.elements, 1)) if is_unsteady else 0.0


def too_far(
    found: Mapping[int, float],
    compared: Mapping[int, ComparedTensor],
    tolerance: float,
    noise: Mapping[int, float] | None = None,
) -> list[int]:
    """Return the indices of the distances that are not accepted; `noise` has the distances of the callable from itself, by index."""
    noise = noise or {}
    is_unsteady = any(noise.values())
    allowed = {
        index: max(each.allowed(tolerance, is_unsteady=is_unsteady), DISTANCE_FACTOR * noise.get(index, 0.0))
        for index, each in compared.items()
    }
    # Not `>`, with which a distance that is NaN would pass.
    return [index for index, distance in found.items() if not distance <= allowed[index]]


def tolerance_of(values: Iterable[Any]) -> float:
    """Return the tolerance of a graph with these inputs and outputs."""
    dtypes = {each.dtype for each in values if isinstance(each, torch.Tensor)}
    tolerances = [TOLERANCE.get(dtype, 0.0) for dtype in dtypes]
    if any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes):
        tolerances.append(FLOAT8_TOLERANCE)
    if dtypes & {torch.float32, torch.complex64} and _products_are_rounded():
        tolerances.append(TF32_TOLERANCE)
    return max(tolerances, default=0.0)


def _products_are_rounded() -> bool:
    for setting in (torch.get_float32_matmul_precision, lambda: torch.backends.cuda.matmul.fp32_precision):
        # PyTorch has two ways to set this, and may refuse to read one after the other was used.
        try:
            if setting() in {"high", "medium", "tf32"}:
                return True
        except (AttributeError, RuntimeError):
            continue
    return False


def _by_how_much(distance: float, of: ComparedTensor) -> str:
    if not math.isfinite(distance):
        return " in where it has NaN or infinity"
    percent = 100 * distance
    text = "over 1000" if percent > 1000 else f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    return f" by {text} % of its largest value" if is_measured(of.dtype) else f" in {text} % of its elements"


def form(value: Any) -> tuple[Any, ...] | None:
    """Return the dtype, device, sizes, strides and flags that two tensors must share to be compared; None for other values."""
    if not isinstance(value, torch.Tensor):
        return None
    flags = value.is_conj(), value.is_neg()
    return value.dtype, value.device, tuple(value.size()), tuple(value.stride()), flags


def is_any_all_nan(outputs: Sequence[Any], left_out: Collection[int]) -> bool:
    """Return whether all elements of any output are NaN, except for outputs with an index in `left_out`.

    Memory is poisoned with NaN before a replay: one that reads it at a wrong address agrees with KERNELS whose results are NaN.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for index, each in enumerate(outputs):
        if index in left_out or not isinstance(each, torch.Tensor):
            continue
        has_nan = (each.dtype.is_floating_point or each.dtype.is_complex) and each.dtype.itemsize > 1
        if has_nan and each.numel():
            alike.setdefault((each.dtype, each.device), []).append(each.detach())
    for some in alike.values():
        # First elements alone, together: nearly always they are numbers.
        firsts = [each.as_strided((1,), (1,), int(each.storage_offset())) for each in some]
        are_nan = torch.isnan(torch.cat(firsts)).tolist()
        if any(bool(torch.isnan(each).all()) for each, is_nan in zip(some, are_nan, strict=True) if is_nan):
            return True
    return False


# --- tensors that differ in any bit ------------------------------------------------------------------------------


def differing(pairs: Pairs) -> list[int]:
    """Return the indices of the pairs that differ in any bit. Small ones are compared together, since each comparison is two kernels."""
    pairs = {index: pair for index, pair in pairs.items() if pair[1].numel()}
    together, alone = _batches(pairs)
    asked = [_differ(*map(_as_one, zip(*(pairs[each] for each in batch), strict=True))) for batch in together]
    asked += [_differ(*map(bits, pairs[index])) for index in alone]
    answers = read(asked)
    found = [*itertools.compress(alone, answers[len(together) :])]
    unclear = [*itertools.chain.from_iterable(itertools.compress(together, answers))]
    found += itertools.compress(unclear, read([_differ(*map(bits, pairs[index])) for index in unclear]))
    return sorted(found)


def _batches(pairs: Pairs) -> tuple[list[list[int]], list[int]]:
    """Return the indices of pairs to compare together, in batches, and of those to compare alone."""
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
    """Return the memory of a tensor's elements as integers, without conjugate or negative views."""
    offset, size, stride = tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
    if tensor.element_size() == 16:
        offset, size, stride = 2 * offset, (*size, 2), (*(2 * each for each in stride), 1)
    # `Tensor.view` refuses conjugate and negative views where the dtype changes.
    made = torch.empty(0, dtype=_INTEGERS[tensor.element_size()], device=tensor.device)
    return made.set_(tensor.untyped_storage(), offset, size, stride)


def read(questions: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of tensors without dimensions. Waits once for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in questions:
        by_device.setdefault(each.device, []).append(each)
    # There may be several devices: attention returns its RNG state on the CPU.
    answers = {device: iter(torch.stack(mine).tolist()) for device, mine in by_device.items()}
    return [next(answers[each.device]) for each in questions]


# --- how far apart -----------------------------------------------------------------------------------------------


def distances(pairs: Pairs) -> dict[int, float]:
    """Return the distance of each pair by index; infinity where only one of two elements is NaN."""
    return dict(zip(pairs, read([distance(*pair) for pair in pairs.values()]), strict=True))


def distance(mine: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the distance of two tensors of one form as a float64 without dimensions, on their device; does not wait for the device."""
    mine, right = mine.detach(), right.detach()
    if not is_measured(right.dtype):
        counts = [torch.ne(*map(bits, pieces)).sum() for pieces in _in_pieces(mine, right)]
        return torch.stack(counts).sum().double() / max(bits(right).numel(), 1)
    far = [_furthest(_wide(one), _wide(other)) for one, other in _in_pieces(mine, right)]
    off, largest = (torch.stack([each[number] for each in far]).amax().double() for number in (0, 1))
    # Where all values are zero, 0 / 0 would be NaN.
    return torch.where(off == 0, off, off / largest)


def is_measured(dtype: torch.dtype) -> bool:
    """Return whether the distance of a dtype is a difference of values, and not a share of elements."""
    # `float4_e2m1fn_x2` packs two values into a byte: only their bits are compared.
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
    """Return the values in a type that has arithmetic: float64 or float32, complex numbers as pairs."""
    if tensor.is_complex():
        wide = torch.complex128 if tensor.dtype == torch.complex128 else torch.complex64
        return torch.view_as_real(tensor.to(wide).resolve_conj().resolve_neg())
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32).resolve_neg()


def _furthest(mine: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest difference (infinity where only one element is NaN) and the largest finite value."""
    same = (mine == right) | (mine.isnan() & right.isnan())
    off = torch.where(same, 0.0, (mine - right).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    # Finite values alone: divided by an infinity, every difference would be 0.
    return off.amax(), torch.where(right.isfinite(), right.abs(), 0.0).amax()
