"""Environments that explanations are given in: a machine's, and the same with an older driver."""

from __future__ import annotations

import dataclasses

from pygraphd.schema.keys import Environment

HERE = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.2", "91400")
OLD_DRIVER = dataclasses.replace(HERE, driver="580.1")
