"""Compare methods on one data set, under one rule: python examples/compare_methods.py [FOLDER]

FOLDER has domain/class/image; without it, images are made. The learning rate of each method is chosen on validation images
from one grid, each domain is held out in turn, and the best value is bold only where it is beyond the spread over seeds.
The same on the command line:

    fedvlm bench fedavg fedclip fedot data=FOLDER lr=0.01,0.1 seeds=1,2 rounds=5 out=runs/compared
    fedvlm report runs/compared --details --images --out compared.html
"""

import sys
from pathlib import Path

import shapes

import fedvlm

METHODS = ["fedavg", "fedclip", "fedot"]


def main(folder: str = "") -> fedvlm.Runs:
    data = folder or str(shapes.write(Path("shapes"), ("pencil", "ink", "chalk")))
    runs = fedvlm.bench(METHODS, data=data, lr=[0.01, 0.1], seeds=[1, 2], rounds=5, jobs=1, out="runs/compared")
    print(runs.table())
    print("page:", runs.report("compared.html", details=True, images=True))
    return runs


if __name__ == "__main__":
    main(*sys.argv[1:])
