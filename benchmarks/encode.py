"""Images encoded per second in each precision, and how far the embeddings are from float32 on a CPU:
`python benchmarks/encode.py`. Of mini-clip, on a GPU if there is one; files are decoded before."""

import time
from itertools import islice

import torch
from torch.nn import functional as F

from fedvlm import backbones
from fedvlm.backbones.base import Precision, in_precision
from fedvlm.backbones.hf import Clip
from fedvlm.data.encoding import BATCH, GPU_BATCH
from fedvlm.data.source import decode, open_source
from fedvlm.system import console

IMAGES = 1024
PRECISIONS: tuple[Precision, ...] = ("full", "tf32", "half")

mini = backbones.ASSETS / backbones.BUNDLED
model, reference = Clip("mini-clip", mini), Clip("mini-clip", mini)
reference.device = torch.device("cpu")
ready = [model.prepare(decode(data), "raw") for _, data in islice(open_source("emoji").read(), IMAGES)]
exact = F.normalize(reference.embeddings(ready[:BATCH]), dim=-1)  # type: ignore[arg-type]
batch = BATCH if model.device.type == "cpu" else GPU_BATCH
rows = []
for precision in PRECISIONS:
    encoder = in_precision(model, precision)
    assert isinstance(encoder, Clip)
    with encoder.computing():
        found = F.normalize(encoder.embeddings(ready[:BATCH]).float(), dim=-1).cpu()  # type: ignore[arg-type]
        began = time.perf_counter()
        for first in range(0, IMAGES, batch):
            encoder.embeddings(ready[first : first + batch]).cpu()  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
    cosine = (found * exact).sum(-1).min()
    rows.append([precision, f"{IMAGES / seconds:,.0f}", f"{(found - exact).abs().max():.1e}", f"{cosine:.6f}"])
print(f"{model.device}, {torch.get_num_threads()} threads")
console.rows(["precision", "images/s", "largest difference", "smallest cosine"], rows)
