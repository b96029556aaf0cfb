"""Generates text with a Llama of transformers and a static cache: `generate()` compiles the decoding step by itself."""

from typing import Any

import torch
from measuring import DEVICE, Clock, agreement, run
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

CALLS = 12


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Generate `steps` tokens in several calls, for prompts of three lengths in turn."""
    sizes = (
        {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        if tiny
        else {"hidden_size": 1280, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 20, "num_key_value_heads": 4}
    )  # fmt: skip
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    settings = model.generation_config
    settings.eos_token_id = None
    if mode == "none":
        settings.disable_compile = True
    else:
        settings.compile_config = CompileConfig(mode=mode)
        # Only so that generate() compiles on a CPU, too.
        settings.compile_config._compile_all_devices = DEVICE == "cpu"

    new = max(4, steps // CALLS * 4)
    prompts = [torch.randint(5, config.vocab_size, (1, length), device=DEVICE) for length in (24, 96, 57)]
    clock = Clock(CALLS, parts=new)
    texts: dict[int, torch.Tensor] = {}
    for call in range(CALLS):
        prompt = prompts[call % 3]
        clock.begin()
        texts[call % 3] = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache_implementation="static",
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
        )
        clock.end()

    agreements = []
    with torch.no_grad():
        for number, prompt in enumerate(prompts):
            length = prompt.shape[1]
            logits = model(texts[number]).logits[:, length - 1 : -1]
            agreements.append(agreement(logits, texts[number][:, length:]))
    return clock.result(tolerance=0.02, agreements=agreements)


if __name__ == "__main__":
    run(main, __doc__)
