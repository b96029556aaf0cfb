"""Building models without a network: with random weights where a library would download trained ones."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class _NoWeights(dict[str, Any]):
    """Stands for trained weights that are not there; loading it leaves a module's random ones."""


@contextlib.contextmanager
def random_weights() -> Iterator[None]:
    """Have torch.hub and torchvision give no trained weights, and modules keep their random ones, until the block ends."""
    load = torch.nn.Module.load_state_dict

    def loaded(module: torch.nn.Module, weights: Any, *arguments: Any, **options: Any) -> Any:
        return None if isinstance(weights, _NoWeights) else load(module, weights, *arguments, **options)

    places = [(torch.hub, "load_state_dict_from_url", _nothing), (torch.nn.Module, "load_state_dict", loaded)]
    with contextlib.suppress(ImportError):
        models = importlib.import_module("torchvision.models")
        places.append((models.WeightsEnum, "get_state_dict", _nothing))
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in places:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def _nothing(*_arguments: Any, **_options: Any) -> _NoWeights:
    return _NoWeights()
