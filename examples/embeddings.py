"""Data as arrays, and a backbone as a function: python embeddings.py

First, embeddings that were computed elsewhere: fedvlm needs no images and no model then. Second, images with an encoder of
our own, which can be any function from PIL images to an array [images, dim].
"""

import numpy as np
import shapes
from PIL import Image

import fedvlm

CLIENTS = ["north", "south", "west"]


def from_embeddings(rng: np.random.Generator) -> fedvlm.Run:
    """Synthetic embeddings: a centre for each class and a shift for each client, plus noise."""
    labels, clients = rng.integers(0, 3, 300), rng.integers(0, 3, 300)
    centres, shifts = rng.normal(size=(3, 64)), rng.normal(size=(3, 64))
    x = centres[labels] + shifts[clients] + 2 * rng.normal(size=(300, 64))
    data = fedvlm.dataset(
        x,
        labels,
        clients=[CLIENTS[c] for c in clients],
        classes=list(shapes.CLASSES),
        text=centres,  # embeddings of the class names; without them, run with init_from="random"
        name="synthetic",
    )
    return fedvlm.run("fedot", data=data, unseen="west", rounds=10)


def encode(images: list[Image.Image]) -> np.ndarray:
    """A toy encoder: the image at 8 × 8 pixels, in grey, with mean 0."""
    small = [np.asarray(i.convert("L").resize((8, 8)), dtype=np.float32).reshape(-1) for i in images]
    return np.stack([row - row.mean() for row in small])


def from_images(rng: np.random.Generator) -> fedvlm.Run:
    labels, clients = rng.integers(0, 3, 150), rng.integers(0, 3, 150)
    images = [shapes.picture(label, 40 * client, rng) for label, client in zip(labels, clients, strict=True)]
    data = fedvlm.dataset(
        images, labels, clients=[CLIENTS[c] for c in clients], classes=list(shapes.CLASSES), name="shapes"
    )
    run = fedvlm.run("fedavg", data=data, backbone=encode, init_from="random", lr=0.3, unseen="west", rounds=30)
    print("prediction for a new square:", run.predict(shapes.picture(1, 80, rng)))
    return run


def main() -> None:
    rng = np.random.default_rng(0)
    for run in (from_embeddings(rng), from_images(rng)):
        print(run.table(), "\n")


if __name__ == "__main__":
    main()
