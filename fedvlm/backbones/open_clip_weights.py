"""The names of open_clip's (and, in image towers, timm's) weights as those of `towers.modules`.

The models compute the same; query, key and value are one matrix there and three here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedvlm.core.state import Params

Names = Sequence[tuple[str, str]]  # beginnings of names: theirs, ours

CLIP_IMAGE: Names = (
    ("visual.class_embedding", "vision_model.embeddings.class_embedding"),
    ("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("visual.conv1.", "vision_model.embeddings.patch_embedding."),
    ("visual.ln_pre.", "vision_model.pre_layrnorm."),
    ("visual.transformer.resblocks.", "vision_model.encoder.layers."),
    ("visual.ln_post.", "vision_model.post_layernorm."),
    ("visual.proj", "visual_projection.weight"),
)
SIGLIP_IMAGE: Names = (
    ("visual.trunk.pos_embed", "vision_model.embeddings.position_embedding.weight"),
    ("visual.trunk.patch_embed.proj.", "vision_model.embeddings.patch_embedding."),
    ("visual.trunk.blocks.", "vision_model.encoder.layers."),
    ("visual.trunk.norm.", "vision_model.post_layernorm."),
    ("visual.trunk.attn_pool.latent", "vision_model.head.probe"),
    ("visual.trunk.attn_pool.in_proj.", "vision_model.head.attention.in_proj_"),
    ("visual.trunk.attn_pool.proj.", "vision_model.head.attention.out_proj."),
    ("visual.trunk.attn_pool.norm.", "vision_model.head.layernorm."),
    ("visual.trunk.attn_pool.mlp.", "vision_model.head.mlp."),
)
TEXT: Names = (
    ("token_embedding.", "text_model.embeddings.token_embedding."),
    ("positional_embedding", "text_model.embeddings.position_embedding.weight"),
    ("transformer.resblocks.", "text_model.encoder.layers."),
    ("ln_final.", "text_model.final_layer_norm."),
)
CLIP_TEXT: Names = (*TEXT, ("text_projection", "text_projection.weight"))
SIGLIP_TEXT: Names = (*TEXT, ("text_projection.", "text_model.head."))
IN_A_BLOCK: Names = (
    (".ln_1.", ".layer_norm1."),
    (".ln_2.", ".layer_norm2."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.in_proj_", ".self_attn.qkv."),
    (".attn.qkv.", ".self_attn.qkv."),
    (".attn.out_proj.", ".self_attn.out_proj."),
    (".attn.proj.", ".self_attn.out_proj."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
)
TRANSPOSED = ("visual.proj", "text_projection")
SCALARS = ("input_resolution", "context_length", "vocab_size")  # in OpenAI's own files; not parameters


def text_weights(weights: Params) -> Params:
    """The text tower's, whose names begin with "text." in some models only."""
    if any(k.startswith("text.") for k in weights):
        return {k.removeprefix("text."): v for k, v in weights.items() if k.startswith("text.")}
    return {k: v for k, v in weights.items() if not k.startswith(("visual.", "logit_")) and k not in SCALARS}


def converted(weights: Params, names: Names) -> Params:
    """The weights under our names; unknown ones keep theirs, for `fill` to refuse."""
    found: Params = {}
    for old, value in joined_pool(weights).items():
        value = value.T if old in TRANSPOSED else value[0] if old.endswith(".pos_embed") else value
        start, new = next(((s, n) for s, n in names if old.startswith(s)), ("", ""))
        name = new + old[len(start) :]
        if ".layers." in name:
            for theirs, ours in IN_A_BLOCK:
                name = name.replace(theirs, ours)
        if ".qkv." in name:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                found[name.replace("qkv.", f"{part}_proj.")] = third
        else:
            found[name] = value
    return found


def joined_pool(weights: Params) -> Params:
    """The weights with query, key and value of timm's attention pool in one matrix, as torch has them."""
    pool = "visual.trunk.attn_pool."
    parts = {f"{pool}{name}.{kind}" for name in ("q", "kv") for kind in ("weight", "bias")}
    if not parts <= weights.keys():
        return weights
    joined = {
        f"{pool}in_proj.{kind}": torch.cat([weights[f"{pool}{name}.{kind}"] for name in ("q", "kv")])
        for kind in ("weight", "bias")
    }
    return {k: v for k, v in weights.items() if k not in parts} | joined
