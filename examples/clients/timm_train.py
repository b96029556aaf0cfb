"""Trains a model of timm as its train.py does: mixup, soft targets, fp16 with a gradient scaler, an average of the weights (EMA)."""

from typing import Any

import numpy as np
import timm
import torch
from measuring import DEVICE, Clock, compiled, run
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler

CLASSES = 100


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Train for `steps` steps."""
    np.random.seed(0)
    size, batch = (32, 4) if tiny else (224, 32)
    sizes = (
        {"img_size": size, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
        if tiny
        else {"depth": 6}
    )
    model = timm.create_model("vit_small_patch16_224", num_classes=CLASSES, **sizes).to(DEVICE)
    average = ModelEmaV3(model, decay=0.9998, use_warmup=True)
    train_model = compiled(model, mode)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-4, weight_decay=0.05)
    schedule = CosineLRScheduler(
        optimizer, t_initial=4 * steps, warmup_t=20, warmup_lr_init=1e-6, t_in_epochs=False
    )
    scaler = NativeScaler(device=DEVICE)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES)
    loss_of = SoftTargetCrossEntropy()
    # fp16 as far as a GPU is there; on a CPU it is slow.
    dtype = torch.float16 if DEVICE == "cuda" else torch.bfloat16
    pictures = torch.randn(64, 3, size, size)
    labels = torch.randint(CLASSES, (64,))

    clock = Clock(steps)
    model.train()
    for step in range(steps):
        picked = torch.randint(64, (batch,))
        clock.begin()
        x, target = mixup(pictures[picked].to(DEVICE), labels[picked].to(DEVICE))
        with torch.autocast(DEVICE, dtype):
            loss = loss_of(train_model(x), target)
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
        average.update(model, step=step)
        schedule.step_update(num_updates=step + 1)
        clock.end(loss)
    averaged = sum(float(each.detach().abs().sum()) for each in average.module.parameters())
    return clock.result(tolerance=0.05, average=[averaged])


if __name__ == "__main__":
    run(main, __doc__)
