"""Graphs as Inductor has them before it lowers them, made and run on a CPU; what lies on "the GPU" is marked so."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from pygraphd.client.backend import torch_private
from pygraphd.client.placement.upload import SENT, STAGED

GPU = torch.device("cuda", 0)
COPY = torch.ops.prims.device_put.default
NOTED = torch.library.custom_op(
    "pygraphd_tests::noted", torch.clone, mutates_args=(), schema="(Tensor value) -> Tensor"
)
"""Stands for what a user's own operator may do besides."""


def assert_same(found: Any, right: Any) -> None:
    """See that two tensors or numbers have one type and the same values; NaN is one, too."""
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(right), rtol=0, atol=0, equal_nan=True)


class Builder:
    """A graph in the making; each node's value is computed as it goes, so that its layout is right."""

    def __init__(self) -> None:
        self.module = GraphModule(torch.nn.Module(), Graph())
        self.graph = self.module.graph
        self.inputs: list[torch.Tensor] = []
        self._values: dict[Node, Any] = {}
        self._mode = FakeTensorMode()
        self._constants = 0

    def input(self, value: torch.Tensor, *, on_gpu: bool = True) -> Node:
        self.inputs.append(value)
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), self.graph._root)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"arg{len(self.inputs)}")
        return self._note(node, value, on_gpu=on_gpu)

    def constant(self, value: torch.Tensor) -> Node:
        name = f"_tensor_constant{self._constants}"
        self._constants += 1
        self.module.register_buffer(name, value)
        return self._note(self.graph.get_attr(name), value, on_gpu=False)

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Node:
        """Add an operator; it runs where one of its tensors lies on the GPU."""
        real_args, real_kwargs = torch.fx.node.map_arg((args, kwargs), lambda node: self._values[node])
        value = run_operator(operator, real_args, real_kwargs)
        node = self.graph.call_function(operator, args, kwargs)
        on_gpu = operator is COPY or any(is_on_gpu(each) for each in node.all_input_nodes)
        node.meta["stack_trace"] = (
            '  File "lib.py", line 1, in f\n    x\n  File "model.py", line 12, in forward\n    y'
        )
        return self._note(node, value, on_gpu=on_gpu)

    def to_gpu(self, node: Node) -> Node:
        return self.call(COPY, node, GPU)

    def index(self, tensor: Node, *indices: Node | None) -> Node:
        return self.call(torch.ops.aten.index.Tensor, tensor, list(indices))

    def value(self, node: Node) -> torch.Tensor:
        value: torch.Tensor = self._values[node]
        return value

    def output(self, *nodes: Node) -> Graph:
        self.graph.output(tuple(nodes))
        self.graph.lint()
        return self.graph

    def _note(self, node: Node, value: Any, *, on_gpu: bool) -> Node:
        self._values[node] = value
        if isinstance(value, torch.Tensor):
            fake = self._mode.from_tensor(value)
            node.meta["val"] = torch_private.fake_on(GPU, fake) if on_gpu else fake
        return node


class _OnTheCpu(Interpreter):  # type: ignore[misc]
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return run_operator(target, args, kwargs)


def run_operator(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on a CPU, where a copy to the GPU is a copy, and what is made on the GPU is made, too."""
    if operator in {SENT, STAGED}:
        values, _, *more = args
        return operator(values, torch.device("cpu"), *more)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return args[0].clone() if operator is COPY else operator(*args, **kwargs)


def run(graph: Graph, *inputs: torch.Tensor, copied: bool = True) -> tuple[torch.Tensor, ...]:
    """Run a graph on a CPU; `copied`: with copies of its inputs, which it may write to."""
    module: Any = graph.owning_module
    module.recompile()
    given = [each.clone() if copied else each for each in inputs]
    results: tuple[torch.Tensor, ...] = _OnTheCpu(module).run(*given)
    return results


def crossings(graph: Graph) -> list[Node]:
    """Return the nodes of a graph that take something from the CPU to the GPU."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and is_on_gpu(node)
        and not all(is_on_gpu(each) for each in node.all_input_nodes)
        and node.all_input_nodes[0].target is not SENT
    ]


def is_on_gpu(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, FakeTensor) and value.device.type == GPU.type


def place(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Stand in for copying to the GPU."""
    assert device == GPU
    return value.clone()
