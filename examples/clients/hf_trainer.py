"""Fine-tunes a BERT classifier with Hugging Face's Trainer: `torch_compile=True`, bf16, gradient accumulation and clipping."""

import tempfile
from typing import Any

import torch
from measuring import DEVICE, Clock, run
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

LABELS = 4


class Texts(torch.utils.data.Dataset):
    """Random token ids of several lengths, padded; the label follows from the second token."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.ids = torch.randint(5, vocabulary, (count, length))
        self.lengths = torch.randint(length // 2, length + 1, (count,))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = self.ids[number]
        mask = (torch.arange(len(ids)) < self.lengths[number]).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids[1] % LABELS}


class Timing(TrainerCallback):
    """Times the optimizer steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.clock.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.end()


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Train for `steps` optimizer steps."""
    sizes = (
        {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        if tiny
        else {"num_hidden_layers": 6}
    )  # fmt: skip
    # With `problem_type` given, the first forward does not set it, and nothing is compiled twice.
    config = BertConfig(num_labels=LABELS, problem_type="single_label_classification", **sizes)
    texts = Texts(64 if tiny else 4096, 32 if tiny else 128, config.vocab_size)
    clock = Clock(steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4 if tiny else 16,
            gradient_accumulation_steps=2,
            learning_rate=3e-5,
            warmup_steps=20,
            max_grad_norm=1.0,
            bf16=True,
            use_cpu=DEVICE == "cpu",
            torch_compile=mode != "none",
            torch_compile_mode=None if mode == "none" else mode,
            dataloader_drop_last=True,
            report_to="none",
            save_strategy="no",
            logging_steps=max(1, steps // 4),
            disable_tqdm=True,
            seed=0,
        )
        model = BertForSequenceClassification(config)
        trainer = Trainer(model=model, args=arguments, train_dataset=texts, callbacks=[Timing(clock)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    log = trainer.state.log_history
    losses = [entry["loss"] for entry in log if "loss" in entry]
    # Each compiled run drops the same units, one without compiling drops others.
    return clock.result(tolerance=0.02, eager_tolerance=0.1, losses=losses)


if __name__ == "__main__":
    run(main, __doc__)
