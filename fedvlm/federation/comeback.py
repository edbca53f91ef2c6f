"""A site's job process that was killed comes back into the same job: NVFlare as shipped would end the job for all.

The launcher (in the site's local/resources.json) starts a process again that ended by itself; the executor (in the job)
remembers how it was set up, and sets itself up again when it finds itself in a job that runs already.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.collab.runtime.defs import SETUP_TASK_NAME, SyncKey
from nvflare.collab.runtime.executor import CollabExecutor

STARTS = 20  # of a job's process
PAUSE = 2.0  # seconds before it is started again
KEPT = "collab_setup.json"
KEYS = (SyncKey.COLLAB_INTERFACE, SyncKey.SERVER_FQCN, SyncKey.CLIENT_INTERFACES)


class Again(ProcessHandle):  # type: ignore[misc]
    """A job's process, and those after it."""

    adapter: Any

    def __init__(self, start: Callable[[], Any]):
        self.start, self.ended = start, False
        super().__init__(process_adapter=start())

    def terminate(self) -> None:
        self.ended = True
        super().terminate()

    def poll(self) -> Any:
        """A process that was killed is this site's trouble and not the end of the job."""
        return JobReturnCode.SUCCESS if self.adapter.poll() == 0 else JobReturnCode.UNKNOWN

    def wait(self) -> None:
        for _ in range(STARTS):
            self.adapter.wait()
            if self.ended or self.adapter.poll() == 0:
                return
            time.sleep(PAUSE)
            if self.ended:
                return
            self.adapter = self.start()


class Launcher(ClientProcessJobLauncher):  # type: ignore[misc]
    def launch_job(self, job_meta: Any, fl_ctx: Any) -> Again:
        first = super().launch_job
        return Again(lambda: first(job_meta, fl_ctx).adapter)


class Executor(CollabExecutor):  # type: ignore[misc]
    def kept(self, fl_ctx: Any) -> Path:
        return Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())) / KEPT

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        if task_name == SETUP_TASK_NAME:
            self.kept(fl_ctx).write_text(json.dumps({k: shareable.get(k) for k in KEYS}), encoding="utf-8")
        return super().execute(task_name, shareable, fl_ctx, abort_signal)

    def _handle_start_run(self, event_type: str, fl_ctx: Any) -> None:
        super()._handle_start_run(event_type, fl_ctx)
        if self.kept(fl_ctx).exists():
            setup = Shareable(json.loads(self.kept(fl_ctx).read_text(encoding="utf-8")))
            super().execute(SETUP_TASK_NAME, setup, fl_ctx, Signal())
