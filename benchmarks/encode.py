"""How fast images become features, and whether an accelerator gives the same ones: `python benchmarks/encode.py`."""

import time

import torch

from fedvlm import backbones
from fedvlm.data.source import decode, open_source

source = open_source("emoji")
images = [decode(data) for k, data in source.read() if k < 1024]
model = backbones.load("mini-clip")
model.images(images[:64])
began = time.perf_counter()
found = torch.cat([model.images(images[i : i + 64]) for i in range(0, len(images), 64)])
took = time.perf_counter() - began
print(f"{model.device}: {len(images) / took:.0f} images/s ({torch.get_num_threads()} threads)")
if model.device.type == "cuda":
    plain = backbones.load("mini-clip")
    plain.device = torch.device("cpu")
    other = plain.images(images[:64])
    print(f"largest difference to the CPU's features: {(found[:64] - other).abs().max():.1e}")
