"""A small random SigLIP in Hugging Face format."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = ["a", "photo", "of", "cat", "dog", "red", "tree", "the", "."]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
SCALE = 2.3


def write_tokenizer(folder: Path, special: tuple[str, ...], words: list[str] = WORDS, **settings: str) -> None:
    """A tokenizer.json that knows a few whole words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {w: i for i, w in enumerate([*special, *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    """Random parameters everywhere, also where an initialisation is 0 or 1, so that each one counts."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(1 + 0.2 * noise.abs() if name.endswith("running_var") else value + 0.2 * noise)
    return model.eval()


def siglip_folder(folder: Path, tokenizer: str = "SiglipTokenizer") -> torch.nn.Module:
    """A random SigLIP; `tokenizer`: of the first SigLIP, or GemmaTokenizer of SigLIP 2."""
    from transformers import SiglipConfig, SiglipModel

    pad = "</s>" if tokenizer == "SiglipTokenizer" else "<pad>"
    vision = SIZES | {"image_size": 32, "patch_size": 8}
    text = SIZES | {"vocab_size": 13, "max_position_embeddings": 9, "projection_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = drawn(SiglipModel(SiglipConfig(text_config=text, vision_config=vision)))
    model.logit_scale.data.fill_(SCALE)
    model.save_pretrained(folder)
    write_tokenizer(folder, ("[UNK]", "</s>", "<pad>"), tokenizer_class=tokenizer, eos_token="</s>", pad_token=pad)
    processor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}, "resample": 3}
    processor |= {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.7]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model
