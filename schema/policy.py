"""When a capture has won: the thresholds of the policy, and the comparison of two measurements.

Here, so that the client decides by them and `pygraphd cache explain` explains by the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraphd.schema.messages import Measurement

MIN_SAMPLES = 8
MIN_GAIN = 0.02
"""Share of LAUNCH's time that a capture must save."""
NOISE_FACTOR = 3.0
"""How many standard errors of the difference of two medians a gain must exceed."""

# The standard error of a median of normal data is 1.2533 sigma / sqrt(n), and sigma is 1.4826 times the median absolute
# deviation; both constants are textbook values.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826


def wins(candidate: Measurement, launch: Measurement) -> bool:
    """Whether `candidate` beats `launch` by more than the noise and the minimum gain."""
    gain = launch.median_us - candidate.median_us
    return gain > max(MIN_GAIN * launch.median_us, NOISE_FACTOR * noise_us(candidate, launch))


def noise_us(first: Measurement, second: Measurement) -> float:
    """Return the standard error of the difference of two medians, in microseconds."""
    return math.hypot(_standard_error(first), _standard_error(second))


def _standard_error(measurement: Measurement) -> float:
    return _ERROR_OF_MEDIAN * measurement.mad_us / math.sqrt(measurement.samples)
