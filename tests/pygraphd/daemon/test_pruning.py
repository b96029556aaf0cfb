from __future__ import annotations

import json

import pytest

from pygraphd.daemon.pruning import PruneRequest, prune_request
from pygraphd.errors import UsageError
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import decode


def test_survives_the_wire() -> None:
    request = PruneRequest(3600.0, "H200", dry_run=True)
    assert decode(PruneRequest, json.dumps(request.as_json()).encode()) == request


@pytest.mark.parametrize("body", [b"{}", b'{"dry_run": true}', b'{"older_than_s": 0, "gpu": ""}'])
def test_a_request_that_names_nothing_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidMessageError, match="give older_than_s or gpu, or entries, or everything"):
        decode(PruneRequest, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"older_than_s": -1}',
        b'{"gpu": 5}',
        b'{"gpu": "x", "dry_run": 1}',
        b"[]",
        b'{"entries": ["abc"]}',
        b'{"everything": 1}',
        b'{"everything": true, "gpu": "x"}',
    ],
)
def test_bad_fields_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        decode(PruneRequest, body)


def test_a_command_without_a_filter_says_what_to_give() -> None:
    with pytest.raises(UsageError, match="give --older-than 30d, --gpu NAME, or both"):
        prune_request(None, "", dry_run=True)
