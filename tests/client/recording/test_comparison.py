"""Tensors of every dtype and view are compared without raising; what is wrong is found, and what differs only as the callable does from itself is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraphd.client.backend import torch_private
from pygraphd.client.recording import comparison
from pygraphd.client.recording.comparison import (
    DISTANCE_FACTOR,
    Again,
    Values,
    compare,
    differing,
    distances,
    tolerance_of,
)
from pygraphd.client.replay.relocation_table import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.recording.comparison import Disagreement

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:.*quint.*|.*quantiz.*:UserWarning"),
]

EVERY_DTYPE = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=lambda dtype: str(dtype)
)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda each: each,
    "transposed": lambda each: each.as_strided((4, 8), (1, 4)),
    "with gaps": lambda each: each.as_strided((3, 4), (9, 2)),
    "overlapping": lambda each: each.as_strided((4, 3), (2, 1)),
    "expanded": lambda each: each[:4].expand(3, 4),
    "one element": lambda each: each.as_strided((1,), (3,)),
    "no dimensions": lambda each: each.as_strided((), ()),
}


def made_of(dtype: torch.dtype, data: torch.Tensor) -> torch.Tensor:
    """Return bytes as elements of a type, as also those of types that nothing can be computed with."""
    return data.clone().view(dtype)


def one_output(
    mine: torch.Tensor, right: torch.Tensor, tolerance: float | None = None
) -> Disagreement | None:
    tolerance = tolerance_of([right]) if tolerance is None else tolerance
    return compare(Values([mine], []), Values([right], []), tolerance)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_every_dtype_and_view_is_compared_and_a_wrong_recording_is_found(
    dtype: torch.dtype, view: str
) -> None:
    """What a wrong pointer leaves: poison, or what was there before."""
    data = torch.arange(1, 32 * 16 + 1, dtype=torch.uint8) % 59 + 1
    right = VIEWS[view](made_of(dtype, data))
    assert one_output(VIEWS[view](made_of(dtype, data)), right) is None
    for wrong in (torch.full_like(data, 0xFF), torch.zeros_like(data), data.roll(5)):
        found = one_output(VIEWS[view](made_of(dtype, wrong)), right)
        if not torch.equal(*(comparison.bits(VIEWS[view](made_of(dtype, each))) for each in (wrong, data))):
            assert str(found).startswith("verification: output 0 differs")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugate_and_negative_views_are_compared(dtype: torch.dtype) -> None:
    plain = torch.randn(4, 5, dtype=dtype)
    for view in (torch.Tensor.conj, lambda each: each.conj().imag, lambda each: each.t().conj()):
        right = view(plain)
        assert right.is_conj() or right.is_neg()
        assert one_output(view(plain.clone()), right) is None
        assert str(one_output(view(plain + 1j), right)).startswith("verification: output 0 differs by")
        assert one_output(view(plain + 1e-12j), right) is None
        # The same memory, read otherwise, holds other values.
        assert str(one_output(comparison.bits(right), right)) == "verification: output 0 differs"
        resolved = right.resolve_conj().resolve_neg()
        assert str(one_output(resolved, right)) == "verification: output 0 differs"


def test_memory_is_read_as_that_of_another_tensor() -> None:
    plain = torch.randn(6, dtype=torch.complex64)
    assert torch.equal(torch_private.viewed_like(plain, plain.conj()), plain.conj())
    assert torch.equal(torch_private.viewed_like(plain.real, plain.conj().imag), -plain.real)
    assert torch_private.viewed_like(plain, plain) is plain


def test_tensors_without_elements_are_the_same() -> None:
    assert one_output(torch.empty(0, 3), torch.empty(0, 3)) is None
    assert str(one_output(torch.empty(0, 3), torch.empty(3, 0))) == "verification: output 0 differs"


@pytest.mark.parametrize(
    ("off", "beside", "reason"),
    [
        (0.5e-4, [], None),
        (1e-3, [], "by 0.1 % of its largest value"),
        (1e-3, [torch.zeros(2, dtype=torch.int64)], "by 0.1 % of its largest value"),
        # What was computed in fewer bits, and is handed out in 32.
        (1e-3, [torch.zeros(2, dtype=torch.bfloat16)], None),
        (0.1, [torch.zeros(2, dtype=torch.float8_e4m3fn)], None),
        (0.2, [torch.zeros(2, dtype=torch.bfloat16)], "by 20 % of its largest value"),
        (2e3, [torch.zeros(2, dtype=torch.bfloat16)], "by over 1000 % of its largest value"),
        (float("nan"), [torch.zeros(2, dtype=torch.bfloat16)], "in where it has NaN or infinity"),
        (float("inf"), [torch.zeros(2, dtype=torch.bfloat16)], "in where it has NaN or infinity"),
    ],
)
def test_how_far_values_may_differ_goes_by_the_coarsest_type_of_the_graph(
    off: float, beside: list[torch.Tensor], reason: str | None
) -> None:
    right = torch.tensor([1.0, 0.5, 0.0])
    mine = right + torch.tensor([0.0, off, 0.0])

    differs = one_output(mine, right, tolerance_of((right, *beside, 3)))
    told = None if differs is None else str(differs)
    assert told == (None if reason is None else f"verification: output 0 differs {reason}")


def test_products_that_may_be_rounded_differ_by_more() -> None:
    single, double = [torch.zeros(1)], [torch.zeros(1, dtype=torch.float64)]
    strict = tolerance_of(single), tolerance_of(double)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert tolerance_of(single) == comparison.TF32_TOLERANCE > strict[0]
        assert tolerance_of(double) == strict[1]
    finally:
        torch.set_float32_matmul_precision(before)


def test_numbers_that_are_none_agree_with_their_like() -> None:
    right = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0])
    assert one_output(right.clone(), right) is None
    assert one_output(torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1.0]), right) is None
    for place, value in ((0, 1.0), (1, -float("inf")), (4, float("nan"))):
        wrong = right.clone()
        wrong[place] = value
        assert (
            str(one_output(wrong, right)) == "verification: output 0 differs in where it has NaN or infinity"
        )


def test_other_values_and_counts_are_compared() -> None:
    one, two = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    assert compare(Values([3, None, one], [two]), Values([3, None, one.clone()], [two.clone()]), 0.0) is None
    assert str(compare(Values([3], []), Values([4], []), 0.0)) == "verification: output 0 differs"
    assert str(compare(Values([one], []), Values([one, one], []), 0.0)) == "verification: 1 outputs and not 2"
    wrong = compare(Values([one], [two + 1]), Values([one.clone()], [two]), 0.0)
    assert str(wrong) == "verification: input 0 differs in 100 % of its elements"


# --- what differs from itself ------------------------------------------------------------------------------------


def runs(replayed: Sequence[Values], of_kernels: Sequence[Values] = ()) -> Again:
    """Return replays and runs as KERNELS that leave these."""
    return Again(lambda: replayed, lambda: of_kernels)


def values(*outputs: torch.Tensor) -> Values:
    return Values(outputs, ())


def found_beside(
    mine: torch.Tensor, right: torch.Tensor, replays: Sequence[Any], runs_as_kernels: Sequence[Any]
) -> str:
    again = runs([values(each) for each in replays], [values(each) for each in runs_as_kernels])
    return str(compare(values(mine), values(right), 1e-4, again))


def test_what_differs_as_it_does_from_itself_agrees() -> None:
    """As GPT-2's training with TF32 did, by 0.011 to 0.018 %."""
    right = torch.linspace(0.5, 1, 100)
    noisy = [right + 1.5e-4 * torch.tensor([0.0] * each + [1.0] + [0.0] * (99 - each)) for each in range(5)]
    mine, *others = noisy
    assert str(one_output(mine, right, 1e-4)).startswith("verification: output 0 differs by 0.015 %")
    assert found_beside(mine, right, others, others) == "None"

    # It is no excuse for more.
    told = "verification: output 0 differs by 0.08 % of its largest value"
    assert found_beside(right + DISTANCE_FACTOR * 2e-4, right, others, others).startswith(told[:30])
    # Nor is there one where one of the two always does the same.
    assert found_beside(mine, right, others, [right.clone()]) != "None"
    assert found_beside(mine, right, [mine.clone()], others) != "None"


def test_a_callable_whose_replays_agree_is_not_run_again() -> None:
    """The host tells it something else each time, or it is the recording that is wrong."""
    right = torch.ones(3)
    again = Again(lambda: [values(right * 1.5)] * 2, lambda: pytest.fail("it was run"))
    assert str(compare(values(right * 1.5), values(right), 1e-4, again)).startswith("verification: output 0")


def test_what_differs_from_itself_by_far_proves_nothing() -> None:
    right = torch.ones(10)
    found = found_beside(right * 1.3, right, [right * 0.8], [right * 0.7])
    assert found == "verification: it differs from itself"


def test_indices_and_masks_may_follow_from_what_differs() -> None:
    right, mask = torch.ones(1000), torch.zeros(1000, dtype=torch.bool)
    flipped = mask.clone()
    flipped[3] = True
    mine, of_kernels = values(right * 1.0002, flipped), values(right, mask)
    noisy = runs([values(right * 1.0001, mask.clone())], [values(right * 1.0001, mask.clone())])

    assert compare(mine, of_kernels, 1e-3, noisy) is None
    steady = runs([values(right * 1.0002, flipped.clone())])
    found = compare(mine, of_kernels, 1e-3, steady)
    assert str(found) == "verification: output 1 differs in 0.1 % of its elements"
    more = values(right * 1.0002, ~mask)
    noisy = runs([values(right * 1.0001, ~mask)], [values(right * 1.0001, mask.clone())])
    assert str(compare(more, of_kernels, 1e-3, noisy)).startswith("verification: output 1 differs in 100 %")


# --- many at once ------------------------------------------------------------------------------------------------

SOME_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)  # fmt: skip


@settings(deadline=None)
@given(st.data(), st.lists(st.tuples(st.sampled_from(SOME_DTYPES), st.integers(0, 40)), max_size=20))
def test_what_is_compared_together_is_told_apart(
    data: st.DataObject, kinds: list[tuple[torch.dtype, int]]
) -> None:
    """Large and small, of each type, and those that lie otherwise: exactly those that hold something else are found."""
    right = [torch.zeros(16 * size, dtype=torch.uint8).view(dtype) for dtype, size in kinds]
    right = [
        each.reshape(-1, 2).t() if data.draw(st.booleans()) and not each.numel() % 2 else each
        for each in right
    ]
    mine = [each.clone() for each in right]
    changed = data.draw(
        st.sets(st.sampled_from([index for index, each in enumerate(mine) if each.numel()] or [-1]))
    )
    for index in changed - {-1}:
        mine[index].untyped_storage()[0] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "SMALL_BYTES", 200)
        patch.setattr(comparison, "PIECE_BYTES", data.draw(st.sampled_from([8, 100, 1 << 20])))
        size = data.draw(st.sampled_from([1, 500, 1 << 20]))
        patch.setattr(comparison, "AT_ONCE", Share(count=1, least=size, most=size))
        pairs = dict(enumerate(zip(mine, right, strict=True)))
        found = differing(pairs)
        apart = distances({index: pairs[index] for index in found})

    assert found == sorted(changed - {-1})
    assert all(apart.values())


@settings(deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), st.integers(1, 64), st.integers(0, 39)
)
def test_a_distance_is_the_same_in_pieces(numbers: list[float], piece: int, place: int) -> None:
    right = torch.tensor(numbers)
    mine = right.clone()
    mine[place % len(numbers)] += 1
    expected = (mine - right).abs().max().double() / right.abs().max().double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "PIECE_BYTES", piece)
        assert comparison.distance(mine, right) == expected
