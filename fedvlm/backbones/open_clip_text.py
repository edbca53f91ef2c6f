"""Text towers in open_clip's format: CLIP's own, and BERT with a projection (BiomedCLIP)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fedvlm.backbones.known import sizes
from fedvlm.backbones.model_folder import loading
from fedvlm.backbones.open_clip_config import OpenClipConfig, TextSide
from fedvlm.backbones.open_clip_weights import text_weights
from fedvlm.backbones.through_transformers import transformers_for
from fedvlm.backbones.weights import fill
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.towers.modules import TextSizes, TextWithProjection
from fedvlm.towers.text import Tokenizer, padded

HEAD_WIDTH = 64  # of every published BERT; its configuration is not in the folder


def clip_text_sizes(
    name: str, config: OpenClipConfig, weights: Params, tokenizer: Tokenizer, activation: str
) -> TextSizes:
    text, inner = config.text, text_weights(weights).get("transformer.resblocks.0.mlp.c_fc.weight")
    given = {
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.context_length,
        "hidden_size": text.width,
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads,
        "intermediate_size": 4 * text.width if inner is None else len(inner),
        "hidden_act": activation,
        "layer_norm_eps": 1e-5,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return sizes(name, TextSizes, given)


class ClipText(nn.Module):
    def __init__(self, model: TextWithProjection, tokenizer: Tokenizer):
        super().__init__()
        self.model, self.tokenizer = model, tokenizer

    def forward(self, phrases: Sequence[str]) -> Tensor:
        """Embeddings [phrases, dim], not normalised."""
        longest = self.model.text_model.config.max_position_embeddings
        ids = padded(self.tokenizer.phrases(phrases, longest), self.tokenizer.pad_token_id)
        found: Tensor = self.model(ids.to(self.model.text_projection.weight.device))
        return found


class BertText(nn.Module):
    """BERT's sizes are taken from its weights. What is read: the first token's last state, or the mean over tokens."""

    def __init__(self, name: str, folder: Path, text: TextSide, weights: Params):
        from tokenizers import Tokenizer as Tokens

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
        with transformers_for(f"backbone={name}: its text tower, BERT,") as transformers:
            config = transformers.BertConfig(
                vocab_size=len(words),
                hidden_size=words.shape[1],
                num_hidden_layers=1 + max(int(k.split(".")[2]) for k in inside if k.startswith("encoder.layer.")),
                num_attention_heads=max(1, words.shape[1] // HEAD_WIDTH),
                intermediate_size=len(inside["encoder.layer.0.intermediate.dense.weight"]),
                max_position_embeddings=len(positions),
                type_vocab_size=len(inside["embeddings.token_type_embeddings.weight"]),
            )
            self.model = transformers.BertModel(config, add_pooling_layer=False)
        self.mean = text.hf_pooler_type == "mean_pooler"
        fill(self.model, inside, name)
        self.proj = projection({k.removeprefix("proj."): v for k, v in weights.items() if k.startswith("proj.")})
        with loading(folder):
            self.tokens = Tokens.from_file(str(folder / "tokenizer.json"))
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
