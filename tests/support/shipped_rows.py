"""Rows of exports, as the package ships them."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

from pygraphd.daemon import exchange
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Decision, Deployment, Graph, Kind, Measurement, Origin, Record
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import Portable
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from pathlib import Path

H100 = Environment("NVIDIA H100 80GB HBM3", "9.0", 132, 81079, "", "2.11.0", "3.5", "12.8", "570.1", "91002")
KERNELS = Measurement(Deployment.KERNELS, 8, 100.0, 1.0, 90.0, 80.0, 0.25, 1.0, 1.0)
FASTER = Measurement(Deployment.GRAPH, 8, 50.0, 1.0, 20.0, 40.0, 0.25, 1.0, 1.0)


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def row(name: str, *measured: Measurement, version: int = POLICY_VERSION, gpu: str = H100.gpu) -> Portable:
    graph = Graph(digest(name), Kind.INFERENCE, 0, 1, 5)
    decision = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), version, calls=22)
    environment = dataclasses.replace(H100, gpu=gpu)
    at = 1e9 if measured else None
    return Portable(environment, Origin("lab", "0.1.0"), Record(graph, decision, measured), at)


def written(folder: Path, *rows: Portable, name: str = "h100") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.jsonl"
    with file.open("w") as stream:
        exchange.write(rows, stream)
    return file
