"""One run from its keys to its method."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import fedvlm
from fedvlm.config.config import Setup
from fedvlm.data.clients import Federation, shared_out, with_examples
from fedvlm.data.pool import Pool
from fedvlm.errors import FedvlmError
from fedvlm.parts.failures import explained
from fedvlm.rounds.method import Method
from fedvlm.system.machine import runs_home
from fedvlm.system.names import file_name
from fedvlm.training.privacy_plan import check_method, check_secure, planned
from fedvlm.training.sampling import cohort_size


@dataclass
class PlannedRun:
    """A single run: what was decided, its data, its clients, its method and its folder. Clients and method are made when
    they are first asked for, once; an error says why they cannot be."""

    setup: Setup
    pool: Pool
    given: Path | None = None  # its folder, where it has no name of its own

    @cached_property
    def shares(self) -> Federation:
        """Who has which examples."""
        return shared_out(self.pool, self.setup.config, self.setup.config.seed)

    @cached_property
    def federation(self) -> Federation:
        return with_examples(self.shares, self.pool, self.setup.config)

    @cached_property
    def method(self) -> Method:
        """The method, with differential privacy where it is asked for: this is tried on examples."""
        privacy = planned(self.setup, self.federation)
        if privacy is None:
            return self.plain_method
        method = replace(self.plain_method, privacy=privacy)
        check_method(method, self.federation)
        return method

    @cached_property
    def plain_method(self) -> Method:
        setup, federation = self.setup, self.federation
        parts = (setup.adapter, setup.local, setup.merge)
        with explained("building the method", *parts, *setup.metrics.values()):
            method = Method.build(*parts, self.pool.task, setup.config.seed, setup.metrics)
        for name, metric in setup.metrics.items():
            if setup.adapter.task_type not in metric.task_types:
                learns = setup.adapter.task_type.description
                raise FedvlmError(f"metrics={name}: it does not apply to {learns}; leave it out")
        if federation.pooled and method.newcomer:
            raise FedvlmError(
                "partition=pooled has no clients, so nothing can be private; choose an adapter that shares all"
            )
        check_secure(setup, method, cohort_size(setup.config, len(federation.seen)))
        return method

    def on(self, pool: Pool) -> PlannedRun:
        """The same run on the encoded data. What was made of their outline holds, unless images were left out, some are
        there more than once, or names were added."""
        run = PlannedRun(self.setup, pool, self.given)
        if pool.source is self.pool.source and pool.task is self.pool.task and pool.twins is None:
            run.shares, run.plain_method = self.shares, self.plain_method
        return run

    def release(self) -> None:
        """Forget the examples of the clients, which may take much memory."""
        self.__dict__.pop("federation", None)

    @cached_property
    def identity(self) -> str:
        """Two runs with the same identity would give the same numbers."""
        decided = self.setup.binding()
        decided |= {"data": self.pool.fingerprint, "backbone": self.pool.backbone, "version": fedvlm.__version__}
        return hashlib.blake2b(json.dumps(decided, sort_keys=True).encode(), digest_size=4).hexdigest()

    @property
    def name(self) -> str:
        """A name of its own, for its folder."""
        setup, method = self.setup, self.setup.method
        unseen = "+".join(setup.config.unseen) or "all"
        named = f"{method.name}-{method.on}" if method.on else method.name
        return file_name(f"{named}-{self.pool.source.name}-{unseen}-s{setup.config.seed}-{self.identity}")

    @property
    def folder(self) -> Path:
        out = self.setup.config.out
        return self.given or (Path(out) if out else runs_home()) / self.name
