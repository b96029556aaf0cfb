from __future__ import annotations

from benchmarks.figures import Figure, percentile, summarize


def test_summary_of_nothing_is_none() -> None:
    assert summarize([]) is None


def test_median_and_mad_ignore_an_outlier() -> None:
    assert summarize([1.0, 2.0, 3.0, 4.0, 1000.0]) == Figure(median=3.0, mad=1.0, n=5)


def test_median_of_an_even_number_lies_between() -> None:
    assert summarize([1.0, 2.0, 4.0, 8.0]) == Figure(median=3.0, mad=1.5, n=4)


def test_percentiles_are_samples() -> None:
    samples = [float(number) for number in range(200, 0, -1)]
    assert percentile(samples, 50) == 100
    assert percentile(samples, 99) == 198
    assert percentile(samples, 100) == 200
    assert percentile([7.0], 50) == 7
