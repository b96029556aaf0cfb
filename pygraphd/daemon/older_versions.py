"""Records as unreleased earlier versions wrote them, translated to today's form.

Two things have changed. Deployments were called LAUNCH (KERNELS), RELOCATE (GRAPH) and TREES (PyTorch's graphs, no choice any
more) up to export format 1. Reasons were English sentences, not codes, up to export format 2.

The functions work on JSON values before these are checked. Invalid values stay as they are, and are refused by the reader.
"""

from __future__ import annotations

from typing import Any

from pygraphd.schema.reasons import ReasonCode, because

_NAMES = {"LAUNCH": "KERNELS", "RELOCATE": "GRAPH"}
_TREES = "TREES"
_NOISY = "; the host or GPU was too noisy to rely on it"
_SENTENCES = {
    "too few calls to measure": ReasonCode.TOO_FEW_CALLS,
    "GRAPH saves host time, and the GPU takes no longer": ReasonCode.SAVES_HOST_TIME,
    "GRAPH saves far more host time than it takes longer on the GPU": ReasonCode.SAVES_MORE_HOST_TIME,
    "GRAPH is faster": ReasonCode.FASTER,
    "GRAPH takes longer on the GPU": ReasonCode.LONGER_ON_GPU,
    "GRAPH takes longer on the host": ReasonCode.LONGER_ON_HOST,
    "GRAPH saves nothing beyond noise and 2 %": ReasonCode.NO_GAIN,
    "no CUDA device": ReasonCode.NO_DEVICE,
    "runs on the CPU": ReasonCode.ON_CPU,
    "it cannot be recorded whole: not all of it runs on one GPU": ReasonCode.NOT_ON_ONE_GPU,
    "it cannot be recorded: where its attention keeps random numbers is not known": ReasonCode.RANDOM_STATE_UNKNOWN,
    "each dynamic size that comes back is decided apart; others are launched": ReasonCode.DECIDED_BY_SIZE,
    "not enough free memory to try a capture beside launched calls": ReasonCode.NO_MEMORY_TO_MEASURE,
    "measuring failed": ReasonCode.MEASURING_FAILED,
    "graphs of PyTorch were chosen before, and are no choice any more": ReasonCode.TREES_GONE,
}
_PREFIXES = {
    "PyTorch does not capture it: ": ReasonCode.NOT_CAPTURED_BY_TORCH,
    "has custom operators, which run at each call (PYGRAPH_GRAPH_OPS): ": ReasonCode.CUSTOM_OPERATORS,
    "it cannot be relocated: ": ReasonCode.CANNOT_BE_RECORDED,
}


def translated(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return a record in today's form; None for one that rests on TREES and lacks GRAPH or KERNELS: it decides nothing."""
    renamed = _without_trees(record)
    return None if renamed is None else {**renamed, "decision": _with_codes(renamed.get("decision"))}


def translated_request(request: Any) -> Any:
    """Return the body of an older client's spool file in today's form, its records as `translated` has them."""
    records = request.get("records") if isinstance(request, dict) else None
    if not isinstance(records, list):
        return request
    changed = (translated(each) if isinstance(each, dict) else each for each in records)
    return {**request, "records": [each for each in changed if each is not None]}


def code_of(sentence: str) -> dict[str, str]:
    """Return the code and detail of an older version's sentence: `other` with the sentence if it has no exact translation."""
    # `policy.reason_text` makes this remark of the decision's finality today.
    sentence = sentence.removesuffix(_NOISY)
    if (code := _SENTENCES.get(sentence)) is not None:
        return {"code": code.value, "detail": ""}
    for prefix, code in _PREFIXES.items():
        if sentence.startswith(prefix):
            return {"code": code.value, "detail": because(code, sentence.removeprefix(prefix)).detail}
    return {"code": ReasonCode.OTHER.value, "detail": because(ReasonCode.OTHER, sentence).detail}


def _with_codes(decision: Any) -> Any:
    if not isinstance(decision, dict) or not isinstance(decision.get("reason"), str):
        return decision
    reason = code_of(decision["reason"])
    # Older policies had one reason for KERNELS, which is the reason against a GRAPH as well.
    against_graph = {"against": reason} if decision.get("deployment") == "KERNELS" else {}
    return {**decision, "reason": reason, **against_graph}


def _without_trees(record: dict[str, Any]) -> dict[str, Any] | None:
    try:
        measured = {each["deployment"]: _renamed(each) for each in record["measurements"]}
        decision = _renamed(record["decision"])
        rests_on_trees = _TREES in (decision["deployment"], *measured)
    except (TypeError, KeyError):
        return record
    if rests_on_trees and not measured.keys() >= _NAMES.keys():
        return None
    if decision["deployment"] == _TREES:
        # Nobody uses it: its policy is an older one, and both others were measured to derive it anew.
        decision |= {"deployment": "KERNELS", "reason": {"code": ReasonCode.TREES_GONE.value}}
    measured.pop(_TREES, None)
    return {**record, "decision": decision, "measurements": list(measured.values())}


def _renamed(value: dict[str, Any]) -> dict[str, Any]:
    name = value["deployment"]
    return {**value, "deployment": _NAMES.get(name, name)}
