"""Fine-tunes low-rank adapters (LoRA) of a Llama with PEFT in a training loop of one's own, with a compiled model and bf16 autocast."""

from typing import Any

import torch
from measuring import DEVICE, Clock, compiled, run
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Train the adapters for `steps` steps."""
    sizes = (
        {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        if tiny
        else {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4}
    )  # fmt: skip
    config = LlamaConfig(**sizes, use_cache=False)
    batch, length = (2, 32) if tiny else (4, 256)
    adapters = LoraConfig(
        r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(LlamaForCausalLM(config), adapters).to(DEVICE).train()
    train_model = compiled(model, mode)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-4)
    texts = torch.randint(config.vocab_size, (64, length))

    clock = Clock(steps)
    for _ in range(steps):
        ids = texts[torch.randint(64, (batch,))].to(DEVICE)
        clock.begin()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = train_model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.end(loss)
    return clock.result(tolerance=0.02, eager_tolerance=0.05)


if __name__ == "__main__":
    run(main, __doc__)
