"""A method of our own beside FedAvg: python examples/add_a_method.py

recipe.yaml names the method; its adapter, my_adapter.py, is a shared classifier with a private shift on each client. The
same files work on the command line, in this folder: fedvlm bench recipe.yaml fedavg data=FOLDER
"""

from pathlib import Path

import shapes

import fedvlm

HERE = Path(__file__).parent


def main() -> fedvlm.Runs:
    data = str(shapes.write(Path("shapes"), ("pencil", "ink", "chalk")))
    mine = str(HERE / "recipe.yaml")
    print(fedvlm.describe(mine))  # every key, where its value comes from, and what it means
    runs = fedvlm.bench([mine, "fedavg"], data=data, unseen="chalk", seeds=[1], rounds=10, jobs=1, out="runs/mine")
    print(runs.table())
    own = next(run for run in runs if run.record.adapter.code)
    for client in ("pencil", "ink"):
        print(f"{client}'s private shift has the length {own.parameters(client)['shift'].norm():.3f}")
    print("sent to the server:", ", ".join(sorted(own.files.load()[0].shared)))
    return runs


if __name__ == "__main__":
    main()
