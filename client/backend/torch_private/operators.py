"""Finds the operators that a graph calls, and has Inductor lower the operators of PyGraph."""

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
"""The namespace, name and overload of an operator; higher-order operators have no overload."""


def overloads_in(text: str) -> set[Overload]:
    """Return the operators that a printed graph calls, except in comments, which quote the user's code."""
    code = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {(each[1], each[2], each[3]) for line in code for each in _OPERATOR.finditer(line)}


def host_operators(overloads: Iterable[Overload], vouched: frozenset[str]) -> tuple[str, ...]:
    """Return the operators that have to run at each call, sorted, each as `namespace::operator`.

    These are the operators that are tagged `cudagraph_unsafe`, those that call a library which a capture may damage, and the operators that
    nobody vouches for. In modes with CUDA graphs, the last count only if they are implemented in Python, where they may read or change any
    variable: PyTorch captures the others too.
    """
    overloads = {*overloads}
    unsafe = {f"{space}::{name}" for space, name, overload in overloads if _is_unsafe(space, name, overload)}
    names = {f"{space}::{name}" for space, name, _ in overloads}
    unsafe |= vouched_operators.with_library_state(names, vouched)
    if cudagraphs_asked():
        names = {
            f"{space}::{name}" for space, name, overload in overloads if _is_in_python(space, name, overload)
        }
    return tuple(sorted(unsafe.union(vouched_operators.not_vouched(names, vouched))))


_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")


def _is_in_python(namespace: str, name: str, overload: str | None) -> bool:
    """Return whether the implementation that an operator has on GPUs was registered from Python."""
    # `torch.library` notes here what Python registers. Registrations from C++ do not pass through it.
    known: set[str] = torch.library._impls
    own = f"{namespace}/{name}" if overload in {None, "", "default"} else f"{namespace}/{name}.{overload}"
    return any(f"{own}/{key}" in known for key in _RUN_ON_GPU)


_RUN_ON_GPU = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def _is_unsafe(namespace: str, name: str, overload: str | None) -> bool:
    # Tags belong to overloads, and these operators have none.
    if namespace == vouched_operators.HIGHER_ORDER:
        return False
    packet = getattr(getattr(torch.ops, namespace), name, None)
    operator = getattr(packet, overload or "default", None)
    return torch.Tag.cudagraph_unsafe in getattr(operator, "tags", ())


def may_draw(overloads: Iterable[Overload]) -> bool:
    """Return whether any of the operators may draw random numbers. Attention is taken not to: it draws only with dropout.

    Functions of higher-order operators are printed with the graph, so that their operators are among these.
    """
    return any(
        space != vouched_operators.HIGHER_ORDER and _may_draw(space, name, overload)
        for space, name, overload in overloads
    )


def _may_draw(namespace: str, name: str, overload: str | None) -> bool:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    operator = getattr(packet, overload or "default", None)
    if operator is None or namespace not in vouched_operators.OF_PYTORCH:
        return True
    return torch.Tag.nondeterministic_seeded in operator.tags and "attention" not in name


def keep_results(operator: Any) -> None:
    """Keep Inductor from reusing the memory of the tensor or list of tensors that an operator returns, which is still read later."""
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    virtualized: Any = importlib.import_module("torch._inductor.virtualized")
    # Each `Placement` asks for this, and backend "pygraph" makes one for each compilation.
    if operator in lowering.lowerings:
        return
    lower_as_call = lowering.fallback_handler(operator)

    def lower(*args: Any, **kwargs: Any) -> Any:
        results = lower_as_call(*args, **kwargs)
        tensors = results if isinstance(results, list | tuple) else (results,)
        virtualized.V.graph.never_reuse_buffers.update(each.get_name() for each in tensors)
        return results

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def lower_as(operator: Any, like: Any) -> None:
    """Have Inductor lower an operator as it does another one, which takes the same arguments."""
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    if operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(lowering.lowerings[like])


def operator_of(node: torch.fx.Node) -> Any | None:
    """Return the operator overload that a node of a graph calls, or None."""
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def is_mutable(operator: Any) -> bool:
    """Return whether an operator writes to its arguments."""
    return bool(operator._schema.is_mutable)


def overloads_of(module: Any) -> Iterator[Overload]:
    """Yield the operators that a graph and its subgraphs call or pass to an operator."""
    for each in module.modules():
        for node in each.graph.nodes if isinstance(each, torch.fx.GraphModule) else ():
            for value in (node.target, *node.args):
                if isinstance(value, torch._ops.HigherOrderOperator):
                    yield vouched_operators.HIGHER_ORDER, value.name(), None
                elif isinstance(value, torch._ops.OpOverload):
                    namespace, _, name = value._schema.name.partition("::")
                    yield namespace, name, value._overloadname
