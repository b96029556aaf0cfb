"""Reasons as they are stored and sent: a code and a detail. Text for people is made where it is shown."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pygraphd.schema.checks import check_text

MAX_DETAIL = 400


class ReasonCode(enum.StrEnum):
    """The stable name of a reason, and its text.

    `{}` in the text stands for the detail, which otherwise follows in parentheses. A name that this version does not know reads
    as `OTHER`, so that records of a newer version can be read.
    """

    text: str

    def __new__(cls, code: str, text: str = "") -> ReasonCode:
        """Make a member of its name and its text; the default is for type checkers, which see `ReasonCode(code)` here."""
        member = str.__new__(cls, code)
        member._value_, member.text = code, text
        return member

    @classmethod
    def _missing_(cls, value: object) -> ReasonCode | None:
        return cls.OTHER if isinstance(value, str) else None

    # --- what measurements show ---
    SAVES_HOST_TIME = "saves_host_time", "GRAPH saves host time, and the GPU takes no longer"
    SAVES_MORE_HOST_TIME = (
        "saves_more_host_time",
        "GRAPH saves much more host time than the GPU time that it adds",
    )
    FASTER = "faster", "GRAPH is faster"
    LONGER_ON_GPU = "longer_on_gpu", "GRAPH takes longer on the GPU"
    LONGER_ON_HOST = "longer_on_host", "GRAPH takes longer on the host"
    NO_GAIN = "no_gain", "GRAPH saves nothing beyond noise and 2 %"
    TAKES_MORE_HOST_TIME = "takes_more_host_time", "KERNELS take more host time"
    SLOWER = "slower", "KERNELS are slower"
    TOO_FEW_CALLS = "too_few_calls", "too few calls to measure"

    # --- why nothing was measured ---
    NO_DEVICE = "no_device", "no CUDA device"
    ON_CPU = "on_cpu", "runs on the CPU"
    NOT_ON_ONE_GPU = "not_on_one_gpu", "it cannot be recorded whole: not all of it runs on one GPU"
    RANDOM_STATE_UNKNOWN = (
        "random_state_unknown",
        "it cannot be recorded: it uses the random state of its attention (seed, offset) in an unknown way",
    )
    NOT_CAPTURED_BY_TORCH = "not_captured_by_torch", "PyTorch does not capture it: {}"
    CUSTOM_OPERATORS = (
        "custom_operators",
        "has custom operators, which run at each call (PYGRAPH_GRAPH_OPS): {}",
    )
    DECIDED_BY_SIZE = (
        "decided_by_size",
        "each dynamic size that is repeated has its own decision; others run as KERNELS",
    )
    NO_MEMORY_TO_MEASURE = "no_memory_to_measure", "not enough free memory to run a GRAPH beside KERNELS"
    MEASURING_FAILED = "measuring_failed", "measuring failed"
    LEFT_TO_ANOTHER_PROCESS = (
        "left_to_another_process",
        "another process was still measuring it when the program ended",
    )
    TREES_GONE = (
        "trees_gone",
        "an earlier version chose PyTorch's CUDA graph trees, which are no longer supported",
    )

    # --- why no GRAPH could be recorded ---
    CANNOT_BE_RECORDED = "cannot_be_recorded", "it cannot be recorded: {}"
    CANNOT_CAPTURE_NOW = "cannot_capture_now", "nothing can be captured now: {}"
    NO_MEMORY_TO_RECORD = "no_memory_to_record", "not enough memory to record it: {}"
    GPU_WAITS = "gpu_waits", "it could not be recorded: {}"
    RESULTS_NAN = "results_nan", "it could not be verified: {}"
    CAPTURE_DISTURBED = "capture_disturbed", "its recording was disturbed: {}"
    DRIVER_FAILED = "driver_failed", "its recording failed in the driver: {}"
    RECORDING_FAILED = "recording_failed", "its recording failed: {}"
    VERIFICATION_FAILED = "verification_failed", "its verification failed: {}"
    RESULTS_DIFFER = "results_differ", "its recording computes something else: {}"
    COLLECTIVES = "collectives", "its collectives cannot be captured: {}"
    BOUND_REACHED = "bound_reached", "it is not recorded any more: {}"

    # --- process groups ---
    RANKS_UNREACHABLE = "ranks_unreachable", "ranks: the group's store could not be asked"
    RANKS_UNDECIDED = "ranks_undecided", "ranks: the program ended before there was a decision"
    RANKS_LATE = "ranks_late", "ranks: no decision within {}"
    RANKS_NOT_RECORDED = "ranks_not_recorded", "ranks: it was not recorded by all of them: {}"
    RANKS_NOT_OFFERED = "ranks_not_offered", "ranks: the group chose {}, which this rank cannot run"

    # --- why a stored decision was not used as it was ---
    REFRESH_ASKED = "refresh_asked", "PYGRAPH_REFRESH asks to measure anew"
    STORED_BY_SIZE = "stored_by_size", "each dynamic size was decided apart"
    NOT_TRUSTED = "not_trusted", "decided {}, and PYGRAPH_TRUST=local"
    OTHER_POLICY = "other_policy", "decided by another version of the policy: {}"
    NOT_FINAL = "not_final", "not final, after {}"
    COST_DIFFERS = "cost_differs", "a call takes over 20 % more or less than stored: {}"
    TOO_OLD = "too_old", "measured {} ago, and PYGRAPH_MAX_AGE is less"

    # --- the rest ---
    NOT_STATED = "not_stated", "not stated"
    OTHER = "other", "{}"


@dataclass(frozen=True, slots=True)
class Reason:
    """A code, and the detail of one case: names, figures, or the message of a library. One line, at most `MAX_DETAIL` characters."""

    code: ReasonCode
    detail: str = ""

    def __post_init__(self) -> None:
        check_text("detail", self.detail, maximum=MAX_DETAIL)

    def __str__(self) -> str:
        text = self.code.text
        if "{}" in text:
            return text.replace("{}", self.detail or "no detail")
        return f"{text} ({self.detail})" if self.detail else text


NOT_STATED = Reason(ReasonCode.NOT_STATED)


def because(code: ReasonCode, detail: str = "") -> Reason:
    """Return a reason with the first line of a detail, printable and short enough to be stored."""
    line = detail.strip().splitlines()[0] if detail.strip() else ""
    return Reason(code, "".join(c if c.isprintable() else " " for c in line)[:MAX_DETAIL])
