"""Embeds sentences with sentence-transformers: `model.compile()` with dynamic sizes, batches of many lengths."""

import random
import string
import tempfile
from pathlib import Path
from typing import Any

from measuring import DEVICE, Clock, run
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

WORDS = [
    "".join(random.Random(number).choices(string.ascii_lowercase, k=3 + number % 7)) for number in range(1500)
]


def make(folder: Path, tiny: bool) -> SentenceTransformer:
    """Return an encoder with random weights and a vocabulary of its own, by way of a folder."""
    letters = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *dict.fromkeys(WORDS[:1000])]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=128)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64 if tiny else 384,
        num_hidden_layers=2 if tiny else 6,
        num_attention_heads=4 if tiny else 12,
        intermediate_size=128 if tiny else 1536,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = [
        Transformer(str(folder), max_seq_length=128),
        Pooling(config.hidden_size, pooling_mode="mean"),
        Normalize(),
    ]
    return SentenceTransformer(modules=modules, device=DEVICE)


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Embed `steps` batches of sentences."""
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), tiny)
    if DEVICE == "cuda":
        model.half()
    model.eval()
    if mode != "none":
        model.compile(dynamic=True, mode=mode)
    draw = random.Random(5)
    count, longest = (8, 12) if tiny else (64, 40)

    clock = Clock(steps)
    for _ in range(steps):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, longest))) for _ in range(count)]
        clock.begin()
        embedded = model.encode(texts, batch_size=count // 2, convert_to_tensor=True, show_progress_bar=False)
        clock.end(embedded)
    alike = model.encode([f"one two three {word}" for word in WORDS[:6]], convert_to_tensor=True)
    similarities = model.similarity(alike[:1].float(), alike[1:].float())[0].tolist()
    return clock.result(tolerance=0.02, similarities=similarities)


if __name__ == "__main__":
    run(main, __doc__)
