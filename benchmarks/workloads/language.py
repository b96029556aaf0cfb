"""BERT-base from transformers, made from its configuration alone: random weights, nothing is downloaded."""

from __future__ import annotations

import torch

from benchmarks.workloads.case import Case, Inputs, Model, require

_TOKENS = 128


def bert_inference(device: torch.device, batch: int) -> Case:
    """Return BERT with its masked-language head in bf16."""
    module = _bert().eval().to(device, torch.bfloat16)

    def draw(generator: torch.Generator) -> Inputs:
        return {"input_ids": _token_ids(module, device, batch, generator)}

    return Case(module, draw, _logits, precision=torch.bfloat16)


def bert_training(device: torch.device, batch: int) -> Case:
    """Return BERT with its masked-language head in float32 under bf16 autocast, dropout on, trained by AdamW."""
    return _training(device, batch, torch.bfloat16)


def bert_training_fp32(device: torch.device, batch: int) -> Case:
    """Return the same in float32 throughout, for which PyTorch takes memory-efficient attention."""
    return _training(device, batch, None)


def _training(device: torch.device, batch: int, autocast: torch.dtype | None) -> Case:
    module = _bert().train().to(device)

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "input_ids": _token_ids(module, device, batch, generator),
            "labels": _token_ids(module, device, batch, generator),
        }

    return Case(
        module,
        draw,
        _loss,
        precision=autocast or torch.float32,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        autocast=autocast,
        stochastic=True,
    )


def _bert() -> torch.nn.Module:
    transformers = require("transformers")
    # The configuration's defaults are the sizes of BERT-base.
    return transformers.BertForMaskedLM(transformers.BertConfig())


def _token_ids(
    module: torch.nn.Module, device: torch.device, batch: int, generator: torch.Generator
) -> torch.Tensor:
    return torch.randint(module.config.vocab_size, (batch, _TOKENS), device=device, generator=generator)


def _logits(model: Model, inputs: Inputs) -> torch.Tensor:
    return model(**inputs).logits


def _loss(model: Model, inputs: Inputs) -> torch.Tensor:
    return model(**inputs).loss
