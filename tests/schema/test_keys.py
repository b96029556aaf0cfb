"""Every factor changes its key, and what is no factor does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import Environment, GraphFactors, canonical_text, digest, entry_id

TEXT = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[16, 8][8, 1]cuda:0", primals_2: "Sym(s33)"):
        # File: /home/ada/train.py:12 in forward, code: return self.head(x)
        permute: "f32[8, 16][1, 8]cuda:0" = torch.ops.aten.permute.default(primals_1, [1, 0]);  primals_1 = None
        full: "f32[][]cuda:0" = torch.ops.aten.full.default([primals_2], 0.0, device = device(type='cuda', index=0))
        mm: "f32[s33, 4][4, 1]cuda:0" = torch.ops.aten.mm.default(permute, full);  permute = full = None
        return (mm,)
"""

FACTORS = GraphFactors(
    TEXT, "forward", 0, 2, (0, 1), (3,), (("max_autotune", "false"), ("triton.cudagraphs", "true"))
)

ENVIRONMENT = Environment(
    "NVIDIA H200", "9.0", 132, 143771, "", "2.11.0+cu130", "3.6.0", "13.0", "580.159.04", "91002"
)


@pytest.mark.parametrize(
    "change",
    [
        {"text": TEXT.replace("aten.mm", "aten.bmm")},
        {"text": TEXT.replace("f32", "bf16")},
        {"text": TEXT.replace("[16, 8]", "[32, 8]")},
        {"text": TEXT.replace("[8, 1]", "[1, 8]")},
        {"text": TEXT.replace("cuda", "cpu")},
        {"text": TEXT.replace("[1, 0]", "[0, 1]")},
        {"text": TEXT.replace("0.0", "1.0")},
        {"text": TEXT.replace("default(permute, full)", "default(full, permute)")},
        {"kind": "backward"},
        {"kind": "inference"},
        {"partition": 1},
        {"partitions": 3},
        {"static_inputs": (0,)},
        {"static_inputs": ()},
        {"mutated_inputs": ()},
        {"user_kernels": "def kernel(): ..."},
        {"options": (("max_autotune", "true"), ("triton.cudagraphs", "true"))},
        {"options": (("triton.cudagraphs", "true"),)},
    ],
    ids=range(18),
)
def test_a_graph_factor_changes_the_key(change: dict[str, Any]) -> None:
    assert dataclasses.replace(FACTORS, **change).digest() != FACTORS.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"text": TEXT.replace("cuda:0", "cuda:3").replace("index=0", "index=3")},
        {"text": TEXT.replace("/home/ada/train.py:12", "/srv/grace/other.py:99")},
        {"text": "\n".join(line for line in TEXT.splitlines() if "# File" not in line)},
        {"text": TEXT.replace("GraphModule", "<lambda>")},
        {"text": TEXT.replace("s33", "s7")},
        {
            "text": TEXT.replace("permute:", "permute_4:")
            .replace("(permute,", "(permute_4,")
            .replace("permute =", "permute_4 =")
        },
        {"text": TEXT.replace("primals_", "arg")},
        {"text": TEXT + "\n\n"},
        {"static_inputs": (1, 0, 0)},
        {"options": tuple(reversed(FACTORS.options))},
    ],
    ids=[
        "device index",
        "file and line",
        "no comments",
        "class name",
        "size symbol",
        "value name",
        "input names",
        "blank lines",
        "order of static inputs",
        "order of options",
    ],
)
def test_what_is_no_factor_leaves_the_key(change: dict[str, Any]) -> None:
    assert dataclasses.replace(FACTORS, **change).digest() == FACTORS.digest()


def test_a_processs_numbers_for_user_kernels_are_dropped() -> None:
    line = "x = torch.ops.higher_order.triton_kernel_wrapper_mutation(kernel_idx = {}, constant_args_idx = {}, grid = [(4, 1, 1)])"

    assert canonical_text(line.format(0, 0)) == canonical_text(line.format(1, 7))
    assert "(4, 1, 1)" in canonical_text(line.format(1, 7))


def test_two_devices_are_not_one() -> None:
    two = TEXT.replace('primals_2: "Sym(s33)"', 'primals_2: "f32[2][1]cuda:1"')
    one = TEXT.replace('primals_2: "Sym(s33)"', 'primals_2: "f32[2][1]cuda:0"')

    assert canonical_text(two) != canonical_text(one)


def test_an_operator_keeps_its_name_if_a_value_is_called_like_it() -> None:
    assert "torch.ops.aten.mm.default" in canonical_text(TEXT)


def test_addresses_are_dropped() -> None:
    assert canonical_text("x = f(<object at 0x7f0011223344>)") == canonical_text(
        "x = f(<object at 0x7fffaabbccdd>)"
    )


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Environment)])
def test_an_environment_factor_changes_the_key(field: str) -> None:
    value = getattr(ENVIRONMENT, field)
    other = dataclasses.replace(ENVIRONMENT, **{field: value + (1 if isinstance(value, int) else "x")})

    assert other.digest() != ENVIRONMENT.digest()


def test_an_environment_has_no_place_for_a_host_or_a_device_index() -> None:
    names = {field.name for field in dataclasses.fields(Environment)}

    assert names == {
        "gpu", "capability", "sm_count", "memory_mb", "mig", "torch", "triton", "cuda", "driver", "cudnn",
    }  # fmt: skip


@pytest.mark.parametrize("bad", [{"gpu": "x" * 300}, {"gpu": "a\nb"}, {"sm_count": -1}, {"sm_count": "132"}])
def test_a_bad_environment_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessageError):
        dataclasses.replace(ENVIRONMENT, **bad)


FIELDS = st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=4)


@given(FIELDS, FIELDS)
def test_different_fields_never_share_a_digest(
    first: list[tuple[str, str]], second: list[tuple[str, str]]
) -> None:
    assert (digest("x", first) == digest("x", second)) == (first == second)


def test_kinds_of_keys_are_apart() -> None:
    assert digest("graph", [("a", "b")]) != digest("environment", [("a", "b")])


def test_an_entry_is_named_by_both_halves() -> None:
    one, two = "1" * 64, "2" * 64

    assert len({entry_id(one, two), entry_id(two, one), entry_id(one, one)}) == 3


def test_keys_are_what_they_were() -> None:
    """A golden value: if it changes, every cache in the world is cold. Then raise KEY_VERSION and say so."""
    assert (FACTORS.digest()[:16], ENVIRONMENT.digest()[:16]) == ("fa5de46503ba2a05", "1eda7fd8b39756ee")
