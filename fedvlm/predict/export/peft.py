"""A low-rank adapter in PEFT's layout, beside our own files: peft/adapter_model.safetensors and peft/adapter_config.json.

from peft import PeftModel
from transformers import CLIPModel

model = PeftModel.from_pretrained(CLIPModel.from_pretrained(BACKBONE), "EXPORTED/peft")
"""

from __future__ import annotations

import json

from safetensors.torch import save

from fedvlm.backbones.hf import Clip
from fedvlm.core.state import Params, with_client_axis
from fedvlm.parts.adapters.layered import towers_of
from fedvlm.parts.adapters.lora import Lora
from fedvlm.predict.predictor import Predictor

FOLDER = "peft"
MODULES = {"image": "vision_model", "text": "text_model"}  # of CLIP and SigLIP in Hugging Face's format
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}


def to_peft(predictor: Predictor) -> dict[str, bytes]:
    """The files by name; none for an adapter that is not low-rank, or a backbone in another format."""
    adapter, task = predictor.model.adapter, predictor.model.task
    if not isinstance(adapter, Lora) or not isinstance(predictor.backbone, Clip):
        return {}
    factors = {k: v[0] for k, v in adapter.factors(task, with_client_axis(predictor.params)).items()}
    both = towers_of(task)
    below = {
        "image": len(both.image.layers) - len(both.image.last(adapter.layers).layers),
        "text": len(both.text.layers) - len(both.text.last(adapter.layers)),
    }
    tensors: Params = {}
    modules: list[str] = []
    for changed in adapter.changed(task):
        tower, layer, projection = changed.name.split(".")
        number = below[tower] + int(layer)
        modules.append(f"{MODULES[tower]}.encoder.layers.{number}.self_attn.{PROJECTIONS[projection]}")
        for factor in "AB":
            name = f"base_model.model.{modules[-1]}.lora_{factor}.weight"
            tensors[name] = factors[f"{changed.name}.{factor}"].contiguous()
    rank = len(next(v for k, v in tensors.items() if ".lora_A." in k))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": predictor.backbone.name,
        "r": rank,
        "lora_alpha": adapter.scale * rank,  # PEFT multiplies by lora_alpha / r
        "target_modules": modules,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    files = {"adapter_config.json": json.dumps(config, indent=1).encode(), "adapter_model.safetensors": save(tensors)}
    return {f"{FOLDER}/{name}": data for name, data in files.items()}
