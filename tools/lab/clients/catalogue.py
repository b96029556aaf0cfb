"""The programs that are run, in `examples/clients`, and the libraries that they need."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import UnknownNameError
from benchmarks.processes import ROOT

FOLDER = ROOT / "examples" / "clients"


@dataclass(frozen=True, slots=True)
class Client:
    """A program and what it needs besides torch. With several `gpus` it is started by torchrun, a process for each."""

    name: str
    libraries: tuple[str, ...] = ()
    gpus: int = 1
    folder: Path = FOLDER

    @property
    def program(self) -> Path:
        """The file that is run."""
        return self.folder / f"{self.name}.py"

    @property
    def missing(self) -> str | None:
        """The first of its libraries that is not installed; None if all are."""
        # Found, and not imported: this process only starts those that use the libraries.
        return next((name for name in self.libraries if importlib.util.find_spec(name) is None), None)


# Those that take longest come first, as each GPU takes the next one when it is done with one.
ONE_GPU = (
    Client("diffusers_unet", ("diffusers",)),
    Client("hf_trainer", ("transformers", "accelerate")),
    Client("accelerate_loop", ("transformers", "accelerate")),
    Client("sentence_embeddings", ("sentence_transformers", "transformers")),
    Client("lightning_fit", ("lightning", "torchvision")),
    Client("timm_train", ("timm",)),
    Client("hf_generate", ("transformers",)),
    Client("whisper_transcribe", ("transformers",)),
    Client("peft_lora", ("peft", "transformers")),
    Client("gpt_decode"),
    Client("serve_batches"),
    Client("serve_every_size"),
    Client("pyg_gcn", ("torch_geometric",)),
    Client("ppo"),
)
TWO_GPUS = (
    Client("tp_decode", gpus=2),
    Client("tp_dtensor", gpus=2),
    Client("ddp_train", gpus=2),
    Client("fsdp2_train", gpus=2),
)
GROUPS = {"one-gpu": ONE_GPU, "two-gpu": TWO_GPUS, "all": (*ONE_GPU, *TWO_GPUS)}


def select_clients(group: str, names: list[str]) -> tuple[Client, ...]:
    """Return the clients of a group of these names, or all if there is no name; raises UnknownNameError."""
    known = {each.name: each for each in GROUPS[group]}
    if unknown := [name for name in names if name not in known]:
        raise UnknownNameError("client", unknown, list(known))
    return tuple(known[name] for name in dict.fromkeys(names)) if names else GROUPS[group]
