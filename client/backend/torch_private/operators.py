"""Finds the operators that a graph calls and what is registered of them, and says how Inductor is to lower ours."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import vouched_operators
from pygraphd.client.backend.torch_private.inductor import cudagraphs_asked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


Overload = tuple[str, str, str | None]
"""The namespace, name and overload of an operator; those that take functions have no overloads."""


def host_operators(text: str, vouched: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return which operators of a printed graph have to run at each call, sorted, each as `namespace::operator`.

    These are the ones that are tagged `cudagraph_unsafe`, and those that nobody vouches for: all of them in modes without CUDA graphs, and
    those implemented in Python, which may read or change anything there, in the other modes too.
    """
    found = (each for line in _code_of(text) for each in _OPERATOR.finditer(line))
    return host_operators_among(((each[1], each[2], each[3]) for each in found), vouched)


def operators_in(text: str) -> set[str]:
    """Return the operators of a printed graph, each as `namespace::operator`."""
    overloads = (each.groups() for line in _code_of(text) for each in _OPERATOR.finditer(line))
    return {f"{space}::{name}" for space, name, _ in overloads}


def host_operators_among(overloads: Iterable[Overload], vouched: frozenset[str]) -> tuple[str, ...]:
    """Return the host operators among some, as `host_operators` does."""
    overloads = {*overloads}
    unsafe = {f"{space}::{name}" for space, name, overload in overloads if _is_unsafe(space, name, overload)}
    names = {f"{space}::{name}" for space, name, _ in overloads}
    if cudagraphs_asked():
        names = {
            f"{space}::{name}" for space, name, overload in overloads if _is_in_python(space, name, overload)
        }
    return tuple(sorted(unsafe.union(vouched_operators.not_vouched(names, vouched))))


def _code_of(text: str) -> Iterator[str]:
    """Yield the lines of a printed graph that are no comments: these quote the user's code."""
    return (line for line in text.splitlines() if not line.lstrip().startswith("#"))


_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")


def _is_in_python(namespace: str, name: str, overload: str | None) -> bool:
    """Whether what an operator runs on a GPU was registered from Python."""
    known: set[str] = torch.library._impls
    own = f"{namespace}/{name}" if overload in {None, "", "default"} else f"{namespace}/{name}.{overload}"
    return any(f"{own}/{key}" in known for key in _RUN_ON_GPU)


_RUN_ON_GPU = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def _is_unsafe(namespace: str, name: str, overload: str | None) -> bool:
    if namespace == vouched_operators.HIGHER_ORDER:
        return False
    packet = getattr(getattr(torch.ops, namespace), name, None)
    operator = getattr(packet, overload or "default", None)
    return torch.Tag.cudagraph_unsafe in getattr(operator, "tags", ())


def keep_results(operator: Any) -> None:
    """Have Inductor write into none of the tensors that an operator returns as a list: they are for further calls, too."""
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    virtualized: Any = importlib.import_module("torch._inductor.virtualized")
    if operator in lowering.lowerings:
        return
    fallback = lowering.fallback_handler(operator)

    def lower(*args: Any, **kwargs: Any) -> Any:
        results = fallback(*args, **kwargs)
        virtualized.V.graph.never_reuse_buffers.update(each.get_name() for each in results)
        return results

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def lower_as(operator: Any, like: Any) -> None:
    """Have Inductor compile an operator as it does another, which takes the same."""
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    if operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(lowering.lowerings[like])


def operator_of(node: torch.fx.Node) -> Any | None:
    """Return the operator, of one overload, that a node of a graph calls; None if it calls something else, or nothing."""
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes to what it is given."""
    return bool(operator._schema.is_mutable)


def overloads_of(module: Any) -> Iterator[Overload]:
    """Yield the operators that a graph and those within it call, or hand to one that they call."""
    for each in module.modules():
        for node in each.graph.nodes if isinstance(each, torch.fx.GraphModule) else ():
            for value in (node.target, *node.args):
                if isinstance(value, torch._ops.HigherOrderOperator):
                    yield vouched_operators.HIGHER_ORDER, value.name(), None
                elif isinstance(value, torch._ops.OpOverload):
                    namespace, _, name = value._schema.name.partition("::")
                    yield namespace, name, value._overloadname
