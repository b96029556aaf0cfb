"""Trains a ResNet with Lightning's Trainer: a compiled network in a LightningModule, mixed precision, a schedule for each step, two loader processes."""

from typing import Any

import lightning
import torch
import torchvision
from measuring import DEVICE, Clock, compiled, run
from torch.nn import functional


class Pictures(torch.utils.data.Dataset):
    """Random pictures of ten classes."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.pictures = torch.randn(64, 3, size, size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return self.pictures[number % 64], number % 10


class Classifier(lightning.LightningModule):
    """A ResNet and how it is trained."""

    def __init__(self, name: str, steps: int, mode: str) -> None:
        super().__init__()
        self.network = compiled(getattr(torchvision.models, name)(num_classes=10), mode)
        self.steps = steps

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.network(pictures)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _number: int) -> torch.Tensor:
        pictures, labels = batch
        loss = functional.cross_entropy(self(pictures), labels, label_smoothing=0.1)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=self.steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Timing(lightning.Callback):
    """Times the training steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.begin()

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        self.clock.end(outputs["loss"])


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Train for `steps` steps."""
    lightning.seed_everything(0, workers=True, verbose=False)
    # With fewer or smaller pictures, batch statistics make rounding errors grow to a tenth of the loss.
    batch = 16 if tiny else 32
    model = Classifier("resnet18", steps, mode)
    loader = torch.utils.data.DataLoader(
        Pictures(steps * batch, 64 if tiny else 224),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        pin_memory=DEVICE == "cuda",
    )
    clock = Clock(steps)
    trainer = lightning.Trainer(
        max_steps=steps,
        precision="bf16-mixed",
        accelerator="auto",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[Timing(clock)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return clock.result(tolerance=0.05)


if __name__ == "__main__":
    run(main, __doc__)
