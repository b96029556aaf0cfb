"""Denoises latents with a UNet of diffusers: a compiled model of Stable Diffusion's kind, classifier-free guidance, DDIM in a loop of one's own."""

from typing import Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from measuring import DEVICE, Clock, compiled, run

GUIDANCE = 7.5
STEPS_A_PICTURE = 20


def make(tiny: bool) -> UNet2DConditionModel:
    """Return a UNet with random weights."""
    cross, plain = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"), ("DownBlock2D", "UpBlock2D")
    depth = 1 if tiny else 3
    return UNet2DConditionModel(
        sample_size=8 if tiny else 64,
        layers_per_block=1,
        block_out_channels=(32, 64) if tiny else (192, 384, 768, 768),
        down_block_types=(*(cross[0],) * depth, plain[0]),
        up_block_types=(plain[1], *(cross[1],) * depth),
        cross_attention_dim=32 if tiny else 768,
        attention_head_dim=8,
        norm_num_groups=8 if tiny else 32,
    )


@torch.no_grad()
def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Run `steps` denoising steps, for several pictures one after the other."""
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    unet = make(tiny).to(DEVICE, dtype, memory_format=torch.channels_last).eval()
    size, width = unet.config.sample_size, unet.config.cross_attention_dim
    prompts = torch.randn(2, 77, width, device=DEVICE, dtype=dtype)
    denoise = compiled(unet, mode, fullgraph=True)
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    scheduler.set_timesteps(STEPS_A_PICTURE)
    clock = Clock(steps)
    for step in range(steps):
        number = step % STEPS_A_PICTURE
        if number == 0:
            latents = torch.randn(1, 4, size, size).to(DEVICE, dtype) * scheduler.init_noise_sigma
        clock.begin()
        timestep = scheduler.timesteps[number]
        both = scheduler.scale_model_input(torch.cat([latents] * 2), timestep)
        without, with_prompt = denoise(both, timestep, encoder_hidden_states=prompts).sample.chunk(2)
        noise = without + GUIDANCE * (with_prompt - without)
        latents = scheduler.step(noise, timestep, latents).prev_sample
        clock.end(latents)
    return clock.result(tolerance=0.02)


if __name__ == "__main__":
    run(main, __doc__)
