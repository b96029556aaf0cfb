"""Facts of PyTorch's dashboard: models and their batch sizes, tolerances and exceptions. Read in `benchmarks/dynamo` of PyTorch, 2026.

A batch is that of the dashboard's lists after its divisors. Models that the dashboard leaves out are not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.workloads import Mode

HUGGINGFACE = {
    "DistillGPT2": 16,
    "BertForMaskedLM": 16,
    "AlbertForMaskedLM": 4,
    "BartForCausalLM": 4,
    "T5Small": 4,
    "DistilBertForMaskedLM": 128,
    "ElectraForCausalLM": 32,
    "OPTForCausalLM": 2,
    "RobertaForCausalLM": 16,
    "GPT2ForSequenceClassification": 4,
    "PLBartForCausalLM": 8,
    "LayoutLMForMaskedLM": 16,
    "TrOCRForCausalLM": 32,
    "CamemBert": 32,
    "BlenderbotSmallForCausalLM": 256,
    "YituTechConvBert": 16,
    "BertForQuestionAnswering": 32,
    "MBartForCausalLM": 4,
    "ElectraForQuestionAnswering": 128,
    "AlbertForQuestionAnswering": 8,
    "GoogleFnet": 16,
    "T5ForConditionalGeneration": 4,
    "RobertaForQuestionAnswering": 32,
    "LayoutLMForSequenceClassification": 32,
    "DistilBertForQuestionAnswering": 512,
    "BlenderbotSmallForConditionalGeneration": 128,
    "PLBartForConditionalGeneration": 8,
    "PegasusForCausalLM": 32,
    "XLNetLMHeadModel": 8,
    "MT5ForConditionalGeneration": 16,
    "DebertaV2ForMaskedLM": 2,
    "MobileBertForMaskedLM": 128,
    "MegatronBertForCausalLM": 4,
    "BartForConditionalGeneration": 4,
    "AllenaiLongformerBase": 4,
    "XGLMForCausalLM": 8,
    "DebertaV2ForQuestionAnswering": 8,
    "MobileBertForQuestionAnswering": 256,
    "MegatronBertForQuestionAnswering": 16,
    "MBartForConditionalGeneration": 4,
    "PegasusForConditionalGeneration": 64,
    "M2M100ForConditionalGeneration": 16,
    "BlenderbotForCausalLM": 4,
}
"""Those that compile quickly first, and each family early: a run that is cut off has measured some of most."""
# FNet mixes tokens by a Fourier transform, which PyTorch does not have for bfloat16.
HUGGINGFACE_FP32 = frozenset({"GoogleFnet"})
HUGGINGFACE_ONLY_INFERENCE = frozenset({"M2M100ForConditionalGeneration"})

TIMM = {
    "repvgg_a2": 128,
    "deit_tiny_patch16_224.fb_in1k": 128,
    "mobilenetv2_100": 128,
    "convnextv2_nano.fcmae_ft_in22k_in1k": 128,
    "visformer_small": 128,
    "vit_base_patch16_siglip_256": 128,
    "nfnet_l0": 128,
    "mobilevit_s": 64,
    "beit_base_patch16_224": 64,
    "mobilenetv3_large_100": 512,
    "deit_base_distilled_patch16_224": 64,
    "tf_efficientnet_b0": 128,
    "inception_v3": 128,
    "vit_base_patch14_dinov2.lvd142m": 128,
    "ghostnet_100": 512,
    "swin_base_patch4_window7_224": 64,
    "dm_nfnet_f0": 128,
    "adv_inception_v3": 128,
}
"""In the same order."""

# In the dashboard most of these were lowered to fit the memory. yolov3's was halved since CUDA graphs needed
# more than there was.
TORCHBENCH_BATCHES = {
    Mode.TRAINING: {"demucs": 4, "dlrm": 1024, "densenet121": 4, "timm_efficientdet": 1, "llama_v2_7b_16h": 1, "yolov3": 8},
    Mode.INFERENCE: {"timm_efficientdet": 32},
}  # fmt: skip
"""Where the dashboard's batch is not the model's own."""
TORCHBENCH_OWN_BATCH = frozenset({"demucs", "pyhpc_turbulent_kinetic_energy", "vision_maskrcnn"})
"""Models that take no other batch than their own."""
TORCHBENCH_AMP = frozenset(
    {
        *("DALLE2_pytorch", "Super_SloMo", "detectron2_fcos_r_50_fpn", "doctr_det_predictor"),
        *("doctr_reco_predictor", "pyhpc_turbulent_kinetic_energy", "sam_fast", "tts_angular"),
    }
)
"""Models whose inference runs under autocast rather than in bfloat16."""
TORCHBENCH_FP16 = frozenset({"vision_maskrcnn"})
TORCHBENCH_LEFT_OUT = {
    "detectron2_maskrcnn": "out of memory",
    "hf_clip": "fails in eager mode",
    "modded_nanogpt": "does not run",
    "pytorch_CycleGAN_and_pix2pix": "fails in eager mode",
    "simple_gpt_tp_manual": "needs several GPUs",
    "tacotron2": "takes too long",
}
"""Models that the dashboard leaves out, and why. `hf_*` and `timm_*` are left out too: the other suites have their like."""
# In the dashboard they are not made to be trained, name no batch for it, or need too much memory.
TORCHBENCH_ONLY_INFERENCE = frozenset(
    {
        *("cm3leon_generate", "detectron2_fcos_r_50_fpn", "doctr_det_predictor", "doctr_reco_predictor"),
        *("llama", "llama_v2_7b_16h", "maml", "moondream", "pyhpc_equation_of_state"),
        *("pyhpc_isoneutral_mixing", "pyhpc_turbulent_kinetic_energy", "sam_fast", "simple_gpt"),
    }
)

# --- tolerances ------------------------------------------------------------------------------------

HUGGINGFACE_TOLERANCES = {
    Mode.INFERENCE: {"GPT2ForSequenceClassification": 4e-3},
    Mode.TRAINING: {"BertForMaskedLM": 2e-2, "MT5ForConditionalGeneration": 2e-2},
}
TIMM_TOLERANCES = {
    "beit_base_patch16_224": 16e-2,
    "deit_base_distilled_patch16_224": 8e-2,
    "inception_v3": 4e-2,
    "mobilenetv3_large_100": 4e-2,
    "vit_base_patch16_siglip_256": 8e-2,
}
"""In training."""
TORCHBENCH_HIGH_TOLERANCE = frozenset({"doctr_reco_predictor", "drq", "phlippe_resnet"})
LARGER_MULTIPLIER = frozenset(
    {
        *("BertForMaskedLM", "GPT2ForSequenceClassification", "inception_v3", "mobilenetv3_large_100"),
        *("vit_base_patch14_dinov2.lvd142m", "yolov3"),
    }
)
"""Models whose small tensors may be off by more."""

# --- subsets ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """A workload of a published table."""

    suite: str
    mode: Mode
    model: str
    batch: int


PAPER = (
    Published("huggingface", Mode.INFERENCE, "XLNetLMHeadModel", 1),
    Published("huggingface", Mode.INFERENCE, "MobileBertForQuestionAnswering", 128),
    Published("huggingface", Mode.INFERENCE, "MT5ForConditionalGeneration", 16),
    Published("huggingface", Mode.INFERENCE, "DebertaV2ForQuestionAnswering", 1),
    Published("huggingface", Mode.TRAINING, "XLNetLMHeadModel", 8),
    Published("huggingface", Mode.TRAINING, "MT5ForConditionalGeneration", 16),
    Published("huggingface", Mode.TRAINING, "BlenderbotSmallForConditionalGeneration", 64),
    Published("huggingface", Mode.TRAINING, "DistillGPT2", 16),
    Published("huggingface", Mode.TRAINING, "Speech2Text2ForCausalLM", 256),
    Published("huggingface", Mode.TRAINING, "DebertaForMaskedLM", 8),
    Published("timm", Mode.INFERENCE, "lcnet_050", 256),
    Published("torchbench", Mode.INFERENCE, "torch_multimodal_clip", 1),
    Published("torchbench", Mode.INFERENCE, "speech_transformer", 1),
    Published("torchbench", Mode.INFERENCE, "DALLE2_pytorch", 1),
    Published("torchbench", Mode.INFERENCE, "pyhpc_equation_of_state", 1048576),
    Published("torchbench", Mode.INFERENCE, "pyhpc_turbulent_kinetic_energy", 1048576),
    Published("torchbench", Mode.INFERENCE, "vision_maskrcnn", 1),
    Published("torchbench", Mode.INFERENCE, "nvidia_deeprecommender", 8192),
    Published("torchbench", Mode.INFERENCE, "dlrm", 2048),
    Published("torchbench", Mode.INFERENCE, "alexnet", 2),
    Published("torchbench", Mode.INFERENCE, "densenet121", 64),
    Published("torchbench", Mode.TRAINING, "timm_efficientdet", 1),
    Published("torchbench", Mode.TRAINING, "dcgan", 32),
    Published("torchbench", Mode.TRAINING, "BERT_pytorch", 16),
    Published("torchbench", Mode.TRAINING, "nvidia_deeprecommender", 256),
)
"""The 25 workloads of the table in a paper on CUDA graphs in PyTorch, with its batches."""
STAND_INS = {
    "XLNetLMHeadModel": ("xlnet-inference, xlnet-training", "12 layers of width 768 rather than 24 of 1,024, in plain PyTorch; training batch 4"),
    "torch_multimodal_clip": ("clip-inference", "ViT-B/32 and a text encoder in plain PyTorch, batch 8"),
    "speech_transformer": ("speech-transformer-inference", "6 + 6 layers in plain PyTorch, batch 8, other lengths in each step"),
    "DALLE2_pytorch": ("dalle-inference", "the decoder alone, 12 layers, batch 4"),
    "vision_maskrcnn": ("detection-inference", "a small Mask R-CNN in plain PyTorch and float32"),
    "dlrm": ("dlrm-inference", "26 tables, batch 256, interactions picked by indices from the CPU"),
}  # fmt: skip
"""Workloads of `run` that were written anew for published ones, and what differs."""
TORCHBENCH_FIRST = (
    *(
        "dcgan",
        "nvidia_deeprecommender",
        "BERT_pytorch",
        "resnet18",
        "basic_gnn_gcn",
        "alexnet",
        "lennard_jones",
    ),
    *(
        "phlippe_resnet",
        "nanogpt",
        "squeezenet1_1",
        "functorch_dp_cifar10",
        "soft_actor_critic",
        "mnasnet1_0",
        "drq",
    ),
    *(
        "pytorch_unet",
        "dlrm",
        "pyhpc_turbulent_kinetic_energy",
        "LearningToPaint",
        "basic_gnn_sage",
        "mobilenet_v2",
    ),
    *(
        "speech_transformer",
        "vgg16",
        "tts_angular",
        "shufflenet_v2_x1_0",
        "resnet50",
        "pyhpc_isoneutral_mixing",
    ),
    *("maml_omniglot", "functorch_maml_omniglot", "basic_gnn_gin", "phlippe_densenet", "resnext50_32x4d"),
    *("pytorch_stargan", "basic_gnn_edgecnn", "mobilenet_v3_large", "densenet121", "demucs", "moco", "llama"),
    *("pyhpc_equation_of_state", "maml", "yolov3", "cm3leon_generate", "resnet152", "vision_maskrcnn"),
)
"""Models of TorchBench that compile quickly, each family early; others come behind them."""
