"""A site's process whose training takes as long as it is told: `python slow_agent.py HOME SECONDS`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from fedvlm.federation.agent import Agent, Request, serve_site


class Slow(Agent):
    def answer(self, request: Request) -> bytes:
        if request.header.step == "train":
            time.sleep(float(sys.argv[2]))
        return self.told(request, {}, "asked")


if __name__ == "__main__":
    serve_site(Slow(Path(sys.argv[1]), "run"), os.fdopen(0, "rb", buffering=0), os.fdopen(1, "wb", buffering=0))
