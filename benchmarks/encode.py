"""Images encoded per second and, on a GPU, how far the features are from those of a CPU: `python benchmarks/encode.py`."""

import time

import torch

from fedvlm import backbones
from fedvlm.backbones.hf import Clip
from fedvlm.data.source import decode, open_source

BATCH = 64

source = open_source("emoji")
images = [decode(data) for k, data in source.read() if k < 1024]
model = backbones.load("mini-clip")
assert isinstance(model, Clip)
model.images(images[:BATCH])  # the first call loads the weights
began = time.perf_counter()
found = torch.cat([model.images(images[i : i + BATCH]) for i in range(0, len(images), BATCH)])
seconds = time.perf_counter() - began
print(f"{model.device}: {len(images) / seconds:.0f} images/s ({torch.get_num_threads()} threads)")
if model.device.type == "cuda":
    on_cpu = backbones.load("mini-clip")
    assert isinstance(on_cpu, Clip)
    on_cpu.device = torch.device("cpu")
    difference = (found[:BATCH] - on_cpu.images(images[:BATCH])).abs().max()
    print(f"largest difference from the CPU's features: {difference:.1e}")
