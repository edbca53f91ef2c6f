"""t-SNE (van der Maaten and Hinton, 2008), by scikit-learn."""

from __future__ import annotations

import numpy as np

from fedvlm.errors import FedvlmError

PERPLEXITY = 30


def places(x: np.ndarray) -> np.ndarray:
    """[examples, dim] → [examples, 2]."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise FedvlmError("t-SNE needs scikit-learn: pip install scikit-learn") from None
    near = max(1.0, min(PERPLEXITY, (len(x) - 1) / 3))
    return np.asarray(TSNE(2, perplexity=near, init="pca", random_state=0).fit_transform(x))
