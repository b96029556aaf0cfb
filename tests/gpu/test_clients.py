"""The programs in `examples/clients` come to the same results with PyGraph as without, in both modes, and are recorded as CUDA graphs."""

from __future__ import annotations

import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.processes import run_fresh
from tools.lab.clients.process import result_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

FOLDER = Path(__file__).parents[2] / "examples" / "clients"
STEPS = 100
LIMIT_S = 170
LIBRARIES = {
    "accelerate_loop": ("transformers", "accelerate"),
    "diffusers_unet": ("diffusers",),
    "gpt_decode": (),
    "hf_generate": ("transformers",),
    "hf_trainer": ("transformers", "accelerate"),
    "lightning_fit": ("lightning", "torchvision"),
    "peft_lora": ("peft", "transformers"),
    "ppo": (),
    "pyg_gcn": ("torch_geometric",),
    "sentence_embeddings": ("sentence_transformers", "transformers"),
    "serve_batches": (),
    "serve_every_size": (),
    "timm_train": ("timm",),
    "whisper_transcribe": ("transformers",),
}
TWO_GPUS = ("tp_decode", "tp_dtensor", "ddp_train", "fsdp2_train")
TENSOR_PARALLEL = {"tp_decode", "tp_dtensor"}
MANY_SIZES = {"sentence_embeddings", "serve_every_size"}
"""Programs in which hardly a size comes back often enough to be tried."""


def test_all_programs_are_run_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"measuring"} == {*LIBRARIES, *TWO_GPUS}


def run(name: str, mode: str, folder: Path, **variables: str) -> dict[str, Any]:
    """Return the result of a program, which has to end well."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYGRAPH")}
    # Hugging Face's Trainer takes all GPUs that it sees, by threads in which PyTorch compiles nothing.
    seen = plain.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environ = {
        **plain,
        "CUDA_VISIBLE_DEVICES": ",".join(seen if name in TWO_GPUS else seen[:1]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        **variables,
    }
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name in TWO_GPUS else []
    )
    program = [str(FOLDER / f"{name}.py"), "--mode", mode, "--steps", str(STEPS), "--tiny"]
    # torchrun needs some seconds to end its processes.
    outcome = run_fresh([*launcher, *program], environ, LIMIT_S, grace_s=6.0 if launcher else 0.0)
    assert outcome.error is None, f"{outcome.error}\n{outcome.output[-4000:]}"
    return result_of(outcome.output)


def run_ours(name: str, mode: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the result of a program with PyGraph, and the summary."""
    summary = folder / f"{mode}.json"
    variables = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "PYGRAPH": "1",
        "PYGRAPH_SUMMARY": str(summary),
        "PYGRAPHD_HOME": str(folder / mode),
        "PYGRAPHD_AUTOSTART": "0",
    }
    result = run(name, mode, folder, **variables)
    # Each rank of a process group writes a summary of its own.
    file = summary.with_name(f"{summary.name}.0") if name in TWO_GPUS else summary
    return result, json.loads(file.read_text())


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_program_comes_to_the_same_results(name: str, tmp_path: Path) -> None:
    for library in LIBRARIES[name]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")

    for summary in same_results(name, tmp_path):
        assert summary["graphs"] > 0
        if name not in MANY_SIZES:
            # Recorded and verified. Which deployment a loaded machine finds faster is not tested.
            assert summary["captured"] > 0, summary["reasons"]


@pytest.mark.parametrize("name", TWO_GPUS)
def test_a_program_on_two_gpus_comes_to_the_same_results(name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for summary in same_results(name, tmp_path):
        assert summary["graphs"] > 0
        if name in TENSOR_PARALLEL:
            assert summary["captured"] > 0, summary["reasons"]


def same_results(name: str, folder: Path) -> list[dict[str, Any]]:
    """Run a program plainly, and with PyGraph in both modes; its values have to agree. Return PyGraph's summaries."""
    modes = ("default", "reduce-overhead")
    # Side by side: most of their time is that of imports and of compiling.
    with ThreadPoolExecutor(1 + len(modes)) as pool:
        running = pool.submit(run, name, "default", folder)
        ours = [pool.submit(run_ours, name, mode, folder) for mode in modes]
    plain = running.result()
    summaries = []
    for result, summary in (each.result() for each in ours):
        assert result["checks"].keys() == plain["checks"].keys()
        for check, values in result["checks"].items():
            expected = plain["checks"][check]
            assert values == pytest.approx(expected, rel=plain["tolerance"], abs=0.1 * plain["tolerance"]), (
                check
            )
        assert {each for each in summary["failures"] if not each.startswith("daemon: ")} == set()
        summaries.append(summary)
    return summaries
