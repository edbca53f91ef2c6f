"""DICOM files (.dcm, .dicom) in any of the other formats: rescaled, windowed, 8 bits deep (fedvlm[dicom]).

A grey value v is slope·v + intercept; the window (the first one that the file has, else the darkest to the brightest value)
is spread over 0 … 255, and MONOCHROME1, where low values are bright, is inverted. Of several frames the first is read.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fedvlm.data.format import Format

if TYPE_CHECKING:
    from pydicom import Dataset

MAGIC = slice(128, 132)  # where a DICOM file says DICM
DEFLATED = b"1.2.840.10008.1.2.1.99"  # a transfer syntax that unpacks to any size


class Dicom(Format):
    endings = (".dcm", ".dicom")

    def picture(self, data: bytes, most_pixels: int) -> Image.Image | None:
        if data[MAGIC] != b"DICM":
            return None
        if missing := self.lacks():
            raise ValueError(f"a DICOM file, which needs a further package: {missing}")
        return picture(data, most_pixels)

    def lacks(self) -> str:
        return "" if find_spec("pydicom") else "pip install 'fedvlm[dicom]'"


def picture(data: bytes, most_pixels: int) -> Image.Image:
    from pydicom import dcmread
    from pydicom.pixels.utils import pixel_array

    if DEFLATED in data:
        raise ValueError("a DICOM file that is deflated as a whole; save it with another transfer syntax")
    file = dcmread(io.BytesIO(data))
    width, height = int(file.get("Columns", 0)), int(file.get("Rows", 0))
    if not 0 < width * height <= most_pixels:
        raise ValueError(f"a DICOM file of {width}×{height} pixels; expected 1 to {most_pixels:,}")
    kind = str(file.get("PhotometricInterpretation", "MONOCHROME2"))
    try:
        pixels = pixel_array(file, index=0)
    except (RuntimeError, NotImplementedError) as error:
        syntax = file.file_meta.TransferSyntaxUID.name
        raise ValueError(f"a DICOM file compressed as {syntax}, which cannot be decoded here") from error
    if kind == "PALETTE COLOR":
        from pydicom.pixels.processing import apply_color_lut

        pixels = apply_color_lut(pixels, file)
        return Image.fromarray((pixels >> 8 if pixels.dtype.itemsize > 1 else pixels).astype(np.uint8))
    if pixels.ndim == 3:
        return Image.fromarray(
            (pixels >> (int(file.BitsStored) - 8) if file.BitsStored > 8 else pixels).astype(np.uint8)
        )
    return Image.fromarray(eight_bits(pixels, file, kind == "MONOCHROME1"))


def eight_bits(pixels: np.ndarray, file: Dataset, inverted: bool) -> np.ndarray:
    values = pixels * number(file, "RescaleSlope", 1.0) + number(file, "RescaleIntercept", 0.0)
    width = number(file, "WindowWidth", 0.0)
    if width >= 1:  # DICOM PS3.3, C.11.2.1.2: the window has width − 1 steps around the centre − 0.5
        low = number(file, "WindowCenter", 0.0) - 0.5 - (width - 1) / 2
        high = low + width - 1
    else:
        low, high = float(values.min()), float(values.max())
    grey = np.clip((values - low) / max(high - low, 1e-9), 0, 1)
    return np.rint(255 * (1 - grey if inverted else grey)).astype(np.uint8)


def number(file: Dataset, name: str, default: float) -> float:
    """A value, or the first of several."""
    found = file.get(name)
    if found is None or found == "":
        return default
    return float(found[0] if hasattr(found, "__len__") and not isinstance(found, str) else found)
