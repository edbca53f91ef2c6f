"""A model of our own as the frozen backbone: python examples/bring_your_model.py [FOLDER]

A torch module (or any function from PIL images to an array) is given as an object. FOLDER is a model on disk: CLIP or
SigLIP in Hugging Face's format, open_clip's, or a vision-only model; the command line takes it as backbone=FOLDER.
"""

import sys
from pathlib import Path

import shapes
import torch

import fedvlm


class Encoder(torch.nn.Module):
    """Stands for yours: pixels [images, 3, height, width] in 0 to 1 become embeddings [images, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 5, stride=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(256, 64),
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)


def main(folder: str = "") -> fedvlm.Run:
    data = shapes.write(Path("shapes"), ("pencil", "ink", "chalk"))
    torch.manual_seed(0)
    module = Encoder().eval()
    # it has no text tower: the classifier starts at random instead of from the class names
    run = fedvlm.run(
        "fedavg",
        data=str(data),
        backbone=module,
        init_from="random",
        lr=0.3,
        rounds=20,
        unseen="chalk",
        out="runs/module",
    )
    print(run.table())
    run.export("exported", backbone=module)  # the module itself is not in it: give it again
    image = data / "chalk" / "circle" / "00.png"
    print("prediction:", fedvlm.load("exported", backbone=module).predict(image))
    if folder:
        run = fedvlm.run("fedot", data=str(data), backbone=folder, rounds=5, unseen="chalk", out="runs/folder")
        print(run.table())
    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
