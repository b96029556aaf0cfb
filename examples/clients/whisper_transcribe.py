"""Transcribes noise with a small Whisper of transformers: a static cache and a compiled forward, as its model card says."""

from typing import Any

import torch
from measuring import DEVICE, Clock, agreement, compiled, run
from transformers import WhisperConfig, WhisperForConditionalGeneration

CLIPS = 10


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Generate `steps` tokens and more, for several clips."""
    vocabulary = 200 if tiny else 51864
    sizes = (
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
         "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 50}
        if tiny
        else {}
    )  # fmt: skip
    start, nothing, no_times = vocabulary - 10, vocabulary - 11, vocabulary - 2
    config = WhisperConfig(
        **sizes,
        vocab_size=vocabulary,
        decoder_start_token_id=start,
        pad_token_id=nothing,
        bos_token_id=nothing,
        eos_token_id=nothing,
        tie_word_embeddings=False,
    )
    model = WhisperForConditionalGeneration(config)
    model = model.to(DEVICE, torch.float16 if DEVICE == "cuda" else torch.float32).eval()
    plain_forward = model.forward
    new = max(4, steps // CLIPS * 4)
    settings = model.generation_config
    settings.is_multilingual = False
    settings.no_timestamps_token_id = no_times
    settings.suppress_tokens = settings.begin_suppress_tokens = None
    settings.decoder_start_token_id = start
    settings.eos_token_id = settings.pad_token_id = nothing
    settings.cache_implementation = "static"
    settings.disable_compile = True  # generate() is not to compile what is compiled here
    model.forward = compiled(model.forward, mode, fullgraph=True)

    clock = Clock(CLIPS, parts=new)
    for _ in range(CLIPS):
        clip = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)
        clip = clip.to(DEVICE, model.dtype)
        clock.begin()
        text = model.generate(clip, min_new_tokens=new, max_new_tokens=new)
        clock.end()

    tokens = torch.cat([torch.tensor([[start, no_times]], device=DEVICE), text[:, -new:]], 1)
    with torch.no_grad():
        logits = plain_forward(input_features=clip, decoder_input_ids=tokens[:, :-1]).logits
    logits[..., nothing] = -1e4  # not allowed before min_new_tokens
    return clock.result(tolerance=0.02, agreements=[agreement(logits[:, 1:], tokens[:, 2:])])


if __name__ == "__main__":
    run(main, __doc__)
