"""Text towers in open_clip's format: CLIP's own, and BERT with a projection (BiomedCLIP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedvlm.backbones.model_folder import loading
from fedvlm.backbones.open_clip_config import OpenClipConfig, TextSide
from fedvlm.backbones.open_clip_weights import CLIP_TEXT, converted, fill, text_weights
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError

if TYPE_CHECKING:
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer

HEAD_WIDTH = 64  # of every published BERT; its configuration is not in the folder


def clip_text_settings(
    config: OpenClipConfig, weights: Params, tokenizer: CLIPTokenizer, activation: str
) -> Mapping[str, int | str]:
    """The settings of transformers' CLIPTextConfig."""
    text, inner = config.text, text_weights(weights).get("transformer.resblocks.0.mlp.c_fc.weight")
    return {
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.context_length,
        "hidden_size": text.width,
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads,
        "intermediate_size": 4 * text.width if inner is None else len(inner),
        "hidden_act": activation,
        "projection_dim": config.model.embed_dim,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def clip_text_weights(
    config: OpenClipConfig, weights: Params, tokenizer: CLIPTokenizer, activation: str
) -> tuple[Mapping[str, int | str], Params]:
    """Settings and weights of transformers' CLIPTextModelWithProjection."""
    settings = clip_text_settings(config, weights, tokenizer, activation)
    return settings, converted(text_weights(weights), CLIP_TEXT)


class ClipText(nn.Module):
    model: CLIPTextModelWithProjection

    def __init__(self, name: str, made: tuple[Mapping[str, int | str], Params], tokenizer: CLIPTokenizer):
        from transformers import CLIPTextConfig, CLIPTextModelWithProjection

        super().__init__()
        settings, weights = made
        self.model, self.tokenizer = CLIPTextModelWithProjection(CLIPTextConfig(**settings)), tokenizer
        fill(self.model, weights, name)

    def forward(self, phrases: Sequence[str]) -> Tensor:
        """Embeddings [phrases, dim], not normalised."""
        tokens = self.tokenizer(list(phrases), padding=True, truncation=True, return_tensors="pt").to(self.model.device)
        found: Tensor = self.model(**tokens).text_embeds
        return found


class BertText(nn.Module):
    """BERT's sizes are taken from its weights. What is read: the first token's last state, or the mean over tokens."""

    def __init__(self, name: str, folder: Path, text: TextSide, weights: Params):
        from tokenizers import Tokenizer
        from transformers import BertConfig, BertModel

        super().__init__()
        if text.hf_pooler_type not in ("cls_last_hidden_state_pooler", "mean_pooler"):
            raise FedvlmError(f"backbone={name}: hf_pooler_type={text.hf_pooler_type} is not known here")
        if (
            "roberta" in (text.hf_model_name or "").lower()
            or "transformer.embeddings.token_type_embeddings.weight" not in weights
        ):
            raise FedvlmError(
                f"backbone={name}: its text tower is {text.hf_model_name}; known here are CLIP's and BERT's"
            )
        if not (folder / "tokenizer.json").is_file():
            raise FedvlmError(
                f"backbone={name}: no tokenizer.json in that folder; save it there once: "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        inside = {k.removeprefix("transformer."): v for k, v in weights.items() if k.startswith("transformer.")}
        inside = {k: v for k, v in inside.items() if not k.startswith("pooler.") and not k.endswith("position_ids")}
        words, positions = (inside[f"embeddings.{k}_embeddings.weight"] for k in ("word", "position"))
        config = BertConfig(
            vocab_size=len(words),
            hidden_size=words.shape[1],
            num_hidden_layers=1 + max(int(k.split(".")[2]) for k in inside if k.startswith("encoder.layer.")),
            num_attention_heads=max(1, words.shape[1] // HEAD_WIDTH),
            intermediate_size=len(inside["encoder.layer.0.intermediate.dense.weight"]),
            max_position_embeddings=len(positions),
            type_vocab_size=len(inside["embeddings.token_type_embeddings.weight"]),
        )
        self.model, self.mean = BertModel(config, add_pooling_layer=False), text.hf_pooler_type == "mean_pooler"
        fill(self.model, inside, name)
        self.proj = projection({k.removeprefix("proj."): v for k, v in weights.items() if k.startswith("proj.")})
        with loading(folder):
            self.tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokens.enable_truncation(text.context_length)
        self.tokens.enable_padding(pad_id=0)

    def forward(self, phrases: Sequence[str]) -> Tensor:
        """Embeddings [phrases, dim], not normalised."""
        encoded = self.tokens.encode_batch(list(phrases))
        device = self.model.device
        ids, mask = (torch.tensor([getattr(e, k) for e in encoded], device=device) for k in ("ids", "attention_mask"))
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(states)
        pooled = (states * weight).sum(1) / weight.sum(1) if self.mean else states[:, 0]
        found: Tensor = self.proj(pooled)
        return found


def projection(weights: Params) -> nn.Module:
    """None, linear, or two linear layers with GELU between them, by the weights; without biases."""
    if not weights:
        return nn.Identity()
    linear = [nn.Linear(v.shape[1], v.shape[0], bias=False) for v in weights.values()]
    made = linear[0] if len(linear) == 1 else nn.Sequential(linear[0], nn.GELU(), linear[1])
    fill(made, weights, "the text tower's projection")
    return made
