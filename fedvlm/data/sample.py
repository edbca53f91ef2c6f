"""A few images encoded in place of all, to know before a run how long encoding takes. The feature store is looked at and
never written: otherwise a second look would find just these images there."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvlm.backbones.alone import encoder_threads
from fedvlm.backbones.base import RAW, Backbone, offered, view_format
from fedvlm.config.config import Setup
from fedvlm.core.data import Extra
from fedvlm.core.tasks import SEGMENTATION
from fedvlm.data.ahead import ready
from fedvlm.data.encoding import Images, Pace, pace_of
from fedvlm.data.images import BadImage
from fedvlm.data.pool import Outline, Pool
from fedvlm.data.source import Source, open_outsiders
from fedvlm.data.store import content_key, encoded_images, open_view
from fedvlm.errors import FedvlmError

MOST = 32  # images that are encoded


class Sample(NamedTuple):
    rows: Tensor  # [images, …] as the encoder gives them
    seconds: float  # for each image
    stored: float  # share of the images that the store has already
    tried: int


class SampledPool(NamedTuple):
    pool: Pool  # every item has the features of one of the sampled images
    images: int  # that the run encodes, with outsiders and corrupted versions
    sample: Sample | None  # None: nothing has to be encoded


def sampled_pool(setup: Setup, outlined: Outline) -> SampledPool:
    """The outlined pool with features of a few of its images. Extra images have those of the images."""
    pool, backbone = outlined
    if backbone is None:
        return SampledPool(pool, 0, None)
    config, source, view = setup.config, pool.source, setup.adapter.view
    masked = source.task_type is SEGMENTATION
    tried = sample_images(source, backbone, view, MOST // 2 if masked else MOST)
    pool, images = replace(pool, x=repeated_rows(tried.rows, len(source.items))), len(source.items) * (1 + masked)
    if masked:
        masks = sample_images(replace(source, items=source.masks), backbone, view, MOST // 2)
        y = (masks.rows.float().mean(1) > 127).to(torch.uint8)
        pool = replace(pool, y=repeated_rows(y, len(source.items)))
    if config.outsiders:
        count = len(open_outsiders(config.outsiders).items)
        pool = replace(pool, extras=pool.extras | {"outsiders": Extra(repeated_rows(tried.rows, count))})
        images += count
    if config.corrupt:
        versions = torch.stack([pool.x] * config.corrupt, dim=1)
        pool = replace(pool, extras=pool.extras | {"corrupted": Extra(versions, aligned=True)})
        images += len(source.items) * config.corrupt
    return SampledPool(pool, images, tried)


def sample_images(source: Source, backbone: Backbone, view: str, most: int) -> Sample:
    """Encodes at most so many images, evenly spaced; those that cannot be read are passed over."""
    chosen, pace = np.unique(np.linspace(0, len(source.items) - 1, most).astype(int)), pace_of(backbone)
    known = [open_view(backbone, v).index for v in {view, RAW} if offered(backbone, v) == v]
    images: Images = []
    stored = 0
    began = time.perf_counter()
    for _, data in replace(source, items=tuple(source.items[k] for k in chosen)).read():
        stored += any(content_key(data) in index for index in known)
        try:
            images.append(ready(backbone, view, data, None).image)
        except BadImage:
            continue
    if not images:
        raise FedvlmError(f"data={source.name}: none of {len(chosen)} of its images can be read")
    decoding = (time.perf_counter() - began) / len(chosen)
    format = view_format(backbone, view)
    half = -(-len(images) // 2)
    with encoder_threads(min(1, pace.threads)):
        first = encoded_images(backbone, view, format, images[:half])  # warms up, with a batch of the same size
        began = time.perf_counter()
        rest = encoded_images(backbone, view, format, images[half:]) if images[half:] else first[:0]
        encoding = (time.perf_counter() - began) / max(1, len(images) - half)
    rows = torch.from_numpy(np.concatenate([first, rest]))
    return Sample(rows, at_pace(pace, decoding, encoding), stored / len(chosen), len(chosen))


def at_pace(pace: Pace, decoding: float, encoding: float) -> float:
    """Seconds for an image among many, from those of one alone, in one thread each."""
    if pace.threads and pace.piece < pace.batch:  # on a CPU, decoding and the model share the cores
        return (decoding + encoding) / pace.threads
    return max(decoding / pace.decoders, encoding)


def repeated_rows(rows: Tensor, count: int) -> Tensor:
    return rows[torch.arange(count) % len(rows)]
