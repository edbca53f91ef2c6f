"""Prostate MRI of six sites (Liu et al., 2020: SAML; FFT-GP's Fed-Prostate): SITE/CaseNN.nii.gz with a
CaseNN_segmentation.nii.gz beside it, as site/image/NAME.png and site/mask/NAME.png.

Every axial slice whose mask is not empty becomes an image (as in FedDG); numbers between the volume's 1st and 99th
percentile become 0 … 255, and any label above 0 the prostate. Sites of the original names get FedDG's letters A to F.

python tools/convert_prostate.py saml prostate
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from converting import parser, run
from nifti import read_volume
from PIL import Image

from fedvlm.errors import FedvlmError
from fedvlm.system.names import file_name

LETTERS = {"RUNMC": "A", "BMC": "B", "I2CVB": "C", "UCL": "D", "BIDMC": "E", "HK": "F"}
VOLUME = re.compile(r"(.+?)\.nii(?:\.gz)?", re.IGNORECASE)
MASK = re.compile(r"(.+?)_seg(?:mentation)?\.nii(?:\.gz)?", re.IGNORECASE)


def convert(source: Path, out: Path, every: int = 1) -> str:
    """Writes the folder `out` and says what it holds. every: take only every so many slices."""
    sites = sorted(p for p in source.iterdir() if p.is_dir()) if source.is_dir() else []
    pairs = {site: _pairs(site) for site in sites}
    if not any(pairs.values()):
        raise FedvlmError(
            f"{source}: no volumes; it has a folder for each site, with CASE.nii.gz and CASE_segmentation.nii.gz"
        )
    count = sum(_write(site, name, *paths, out, every) for site, each in pairs.items() for name, paths in each.items())
    if not count:
        raise FedvlmError(f"{source}: every mask is empty")
    return f"{count} slices of {sum(map(len, pairs.values()))} volumes from {sum(map(bool, pairs.values()))} sites"


def _pairs(site: Path) -> dict[str, tuple[Path, Path]]:
    """Each case with its volume and its mask."""
    files = sorted(p for p in site.iterdir() if p.is_file())
    masks = {m[1]: p for p in files if (m := MASK.fullmatch(p.name))}
    volumes = {m[1]: p for p in files if not MASK.fullmatch(p.name) and (m := VOLUME.fullmatch(p.name))}
    if lonely := sorted(volumes.keys() ^ masks.keys()):
        raise FedvlmError(f"{site}: {lonely[0]} has a volume or a segmentation, and not both")
    return {name: (volumes[name], masks[name]) for name in volumes}


def _write(site: Path, name: str, volume: Path, mask: Path, out: Path, every: int) -> int:
    x, y = read_volume(volume), read_volume(mask) > 0
    if x.shape != y.shape:
        raise FedvlmError(
            f"{mask}: {'×'.join(map(str, y.shape))} numbers, and its volume has {'×'.join(map(str, x.shape))}"
        )
    low, high = np.percentile(x, (1, 99))
    grey = np.rint(255 * np.clip((x - low) / max(float(high - low), 1e-6), 0, 1)).astype(np.uint8)
    used = [z for z in range(x.shape[2]) if y[:, :, z].any()][::every]
    folder = out / file_name(LETTERS.get(site.name, site.name))
    for part, values in (("image", grey), ("mask", np.where(y, 255, 0).astype(np.uint8))):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for z in used:
            Image.fromarray(np.ascontiguousarray(values[:, :, z].T)).save(
                folder / part / f"{file_name(name)}-{z:03}.png"
            )
    return len(used)


def main(words: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--every", type=int, default=1, help="take only every so many slices")
    return run(convert, options, words)


if __name__ == "__main__":
    sys.exit(main())
