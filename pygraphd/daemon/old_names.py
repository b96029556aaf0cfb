"""Records as versions before 0005 of the database wrote them, read as of today: LAUNCH is KERNELS, RELOCATE is GRAPH, TREES is gone.

Works on JSON values, before anything is checked: what makes no sense stays so, and is refused where it is read.
"""

from __future__ import annotations

from typing import Any

_NAMES = {"LAUNCH": "KERNELS", "RELOCATE": "GRAPH"}
_TREES = "TREES"
TREES_WON = "graphs of PyTorch were chosen before, and are no choice any more"


def translated(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return a record with today's names; None for one that rests on TREES and lacks GRAPH or KERNELS, as it decides nothing."""
    try:
        measured = {each["deployment"]: _renamed(each) for each in record["measurements"]}
        decision = _renamed(record["decision"])
        rests_on_trees = _TREES in (decision["deployment"], *measured)
    except (TypeError, KeyError):
        return record
    if rests_on_trees and not measured.keys() >= _NAMES.keys():
        return None
    if decision["deployment"] == _TREES:
        decision |= {"deployment": "KERNELS", "reason": TREES_WON}
    measured.pop(_TREES, None)
    return {**record, "decision": decision, "measurements": list(measured.values())}


def translated_request(request: Any) -> Any:
    """Return what a client of then has left in the spool, its records as `translated` has them."""
    records = request.get("records") if isinstance(request, dict) else None
    if not isinstance(records, list):
        return request
    changed = (translated(each) if isinstance(each, dict) else each for each in records)
    return {**request, "records": [each for each in changed if each is not None]}


def _renamed(value: dict[str, Any]) -> dict[str, Any]:
    name = value["deployment"]
    return {**value, "deployment": _NAMES.get(name, name)}
