"""Clients at sites of their own, across machines, through NVFlare: `fedvlm run … federation=KIT` (docs/federation.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedvlm.core.state import Message, Params
from fedvlm.engines.base import Job
from fedvlm.errors import FedvlmError
from fedvlm.federation.remote import Remote, Silence

if TYPE_CHECKING:
    from fedvlm.federation.links import Links

connected: Links | None = None  # set in the server's job process (federation/hub.py)


class Nvflare(Remote):
    def __init__(self, job: Job, links: Links):
        super().__init__(job)
        self.links, self.tickets, self.agreement = links, links.tickets, links.agreement
        self.place = {name: i for i, name in enumerate(self.names)}

    @classmethod
    def open(cls, job: Job) -> Nvflare:
        if connected is None:
            raise FedvlmError("engine=nvflare needs sites to run at: give federation=KIT (docs/federation.md)")
        return cls(job, connected)

    def where(self, client: int) -> str:
        trouble = self.links.trouble.get(self.names[client])
        return f" ({trouble})" if trouble else ""

    def exchange(self, frames: dict[int, bytes], limits: dict[int, int]) -> dict[int, bytes | Silence]:
        by_name = {self.names[i]: frame for i, frame in frames.items()}
        most = {self.names[i]: limit for i, limit in limits.items()}
        found = self.links.exchange(by_name, most, self.tickets, self.timeout, self.quorum, self.grace)
        self.links.tickets = self.tickets
        return {self.place[name]: answer for name, answer in found.items()}

    def outputs(self, message: Message, round: int) -> Params:
        """They stay at the sites."""
        return {}
