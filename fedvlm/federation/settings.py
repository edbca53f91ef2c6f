"""NVFlare's settings for a server and a site: they allow just what a run needs. `fedvlm serve` and `fedvlm join` write them
anew at every start, so that of a kit, which others made, only its keys, certificates and address count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LONGEST_MESSAGE = 1 << 30  # bytes; larger ones are refused before memory is taken for them
MOST_SITES = 10_000
SERVER_HOME = "FEDVLM_HOME"  # a variable of the server's processes, set by `fedvlm serve`
OVERVIEW = "overview.json"  # in a server's home: sites and runs, as its keeper last saw them
LOOK, KEEP = (
    "fedvlm_look",
    "fedvlm_keep",
)  # admin commands of the keeper (keeper.py): what runs do, and what they shall do

# The classes that a job may name; there are no others, and a job that brings code is refused (`byoc` below).
CLASSES = {
    "server": ["fedvlm.federation.hub.Hub", "nvflare.collab.runtime.controller.CollabController"],
    "site": ["fedvlm.federation.site.Site", "fedvlm.federation.comeback.Executor"],
}
# Who starts runs may start, watch and stop them, fetch their results, and leave sites out. Files and errors of a site, its
# environment and its processes are not shown, and nobody else has any right.
RIGHTS = {
    "submit_job": "any",
    "manage_job": "any",
    "download_job": "any",
    "view": "any",
    LOOK: "any",
    KEEP: "any",
    "clone_job": "none",
    "operate": "none",
    "shell_commands": "none",
    "byoc": "none",
    "server-predeployed-flwr": "none",
    "show_errors": "none",
    "configure_job_log": "none",
    "delete_workspace": "none",
}
CONNECTIONS = {
    "allow_adhoc_conns": False,
    "backbone_conn_gen": 2,
    # processes of jobs reach their parent through a port of this machine; by default every user of the machine can, too
    "internal": {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}},
    "streaming_max_blob_size": LONGEST_MESSAGE,
}
SESSION = {"idle_timeout": 900.0, "login_timeout": 10.0, "authenticate_msg_timeout": 10.0, "with_debug": False}
LARGEST_LOG = 20 << 20  # bytes
# One file that does not grow without bound
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "plain": {
            "()": "nvflare.fuel.utils.log_utils.BaseFormatter",
            "fmt": "%(asctime)s - %(name)s - %(levelname)s - %(fl_ctx)s - %(message)s",
        }
    },
    "handlers": {
        "file": {
            "class": "logging.handlers.RotatingFileHandler",
            "level": "DEBUG",
            "formatter": "plain",
            "filename": "log.txt",
            "mode": "a",
            "maxBytes": LARGEST_LOG,
            "backupCount": 5,
        }
    },
    "loggers": {"root": {"level": "INFO", "handlers": ["file"]}},
}


def status_file(run: Path) -> Path:
    """What the job of a run says of itself to the server's keeper. A run's own folder holds nothing before it began."""
    return run.parent.parent / "status" / f"{run.name}.json"


def halt_file(run: Path) -> Path:
    """Holds the job that shall end after the round under way: its keeper writes it, the job looks for it."""
    return run.parent.parent / "status" / f"{run.name}.halt"


@dataclass(frozen=True)
class About:
    """What a kit says of itself (kit.json)."""

    kind: str  # server, site or admin
    name: str
    federation: str
    host: str
    port: int
    ends: str  # the day on which its certificate ends
    certificate: str  # the beginning of its SHA-256: a renewed kit has another
    fedvlm: str  # version
    sites: list[str] = field(default_factory=list)  # of the federation, in the kit that starts runs


def kit_settings(about: About, folder: Path) -> Mapping[str, object]:
    """The files of a kit in this folder, beside the keys and certificates."""
    if about.kind == "admin":
        return {"local/resources.json": {"format_version": 1, "admin": SESSION}}
    allowed = {"class_list_enforcement_mode": "enforce", "class_allow_list": CLASSES[about.kind]}
    is_server = about.kind == "server"
    return {
        "local/authorization.json": {"format_version": "1.0", "permissions": {"project_admin": RIGHTS}},
        "local/comm_config.json": CONNECTIONS,
        "local/log_config.json": LOGGING,
        "local/resources.json": {"format_version": 2, **allowed, **(server_parts(folder) if is_server else SITE_PARTS)},
        f"startup/fed_{'server' if is_server else 'client'}.json": {"format_version": 2, **address(about)},
    }


def address(about: About) -> dict[str, object]:
    """The address at which the server listens (localhost: only this machine can connect) and sites find it. One port is
    enough."""
    mine = "server" if about.kind == "server" else "client"
    keys = {"ssl_private_key": f"{mine}.key", "ssl_cert": f"{mine}.crt", "ssl_root_cert": "rootCA.pem"}
    keys |= {"connection_security": "mtls"}
    server: dict[str, object] = {
        "name": about.federation,
        "service": {"target": f"{about.host}:{about.port}", "scheme": "http"},
    }
    if about.kind == "server":
        return {"servers": [server | keys | {"admin_server": "server", "admin_port": about.port}]}
    return {"servers": [server | {"identity": "server"}], "client": keys | {"fqsn": about.name, "is_leaf": True}}


def component(name: str, path: str, **args: object) -> dict[str, object]:
    return {"id": name, "path": f"nvflare.{path}" if not path.startswith("fedvlm.") else path, "args": args}


# Without NVFlare's part that sends error logs to the server; jobs are started by a launcher that starts them again.
SITE_PARTS = {
    "allow_log_streaming": False,
    "client": {"retry_timeout": 30, "compression": "Gzip"},
    "components": [
        component(
            "resource_manager",
            "app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
            num_of_gpus=0,  # that NVFlare shares out among jobs; a run takes what the site has
            mem_per_gpu_in_GiB=0,
        ),
        component("resource_consumer", "app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"),
        component("process_launcher", "fedvlm.federation.comeback.Launcher"),
    ],
}


def server_parts(folder: Path) -> dict[str, object]:
    """Jobs and snapshots are kept in the kit: by default NVFlare writes them to a temporary folder that everybody shares."""
    storage = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
    kept = {"path": storage, "args": {"root_dir": str(folder / "snapshots"), "uri_root": "/"}}
    launcher = "app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher"
    jobs = {"uri_root": str(folder / "jobs"), "job_store_id": "job_store"}
    return {
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": MOST_SITES,
                "heart_beat_timeout": 600,
                "admin_timeout": 10.0,
            }
        ],
        "snapshot_persistor": {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {"uri_root": "/", "storage": kept},
        },
        "components": [
            component("job_scheduler", "app_common.job_schedulers.job_scheduler.DefaultJobScheduler", max_jobs=4),
            component("job_manager", "apis.impl.job_def_manager.SimpleJobDefManager", **jobs),
            component("job_store", "app_common.storages.filesystem_storage.FilesystemStorage"),
            component("process_launcher", launcher),
            component("keeper", "fedvlm.federation.keeper.Keeper"),
        ],
    }
