"""Keys, certificates and kits of a federation: NVFlare's provisioning, with policies that allow just what a run needs.

A kit is a zip file for one party (the server, a site, the person who starts runs). The folder that `init` makes also holds
the root key: whoever has it can make kits, so it stays with one person and never goes to a server or a site.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import fedvlm
from fedvlm.core.records import build, parsed, read_text
from fedvlm.errors import FedvlmError
from fedvlm.federation.health import end_of
from fedvlm.federation.settings import About, kit_settings
from fedvlm.system import files
from fedvlm.system.names import RESERVED

Kind = Literal["server", "site", "admin"]
SERVER, ADMIN = "server", "admin"  # names of kits that no site may have
USER = "admin@fedvlm.local"  # NVFlare's name of who starts runs: it must look like an address
ORGANISATION = "fedvlm"
ABOUT, FEDERATION, ROOT_KEY, ROOT_CERTIFICATE = "kit.json", "federation.json", "root.key", "root.crt"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # of a site or a federation: NVFlare takes no other
HOST = re.compile(r"(?=.{1,64}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
ROOT_DAYS, KIT_DAYS = 3650, 360  # that certificates are valid; the second number is NVFlare's
MEMBER = re.compile(r"([A-Za-z0-9_]+/)?[A-Za-z0-9_]+\.[A-Za-z0-9]+")  # the names of files in a kit
MOST_FILES, MOST_BYTES = 100, 10 << 20
PURPOSES, REQUEST = ("client", "server"), ".request.zip"  # of a site's certificates: towards the server, and inside
# The certificate with which a site's own processes reach each other (CONNECTIONS in settings.py)
INTERNAL = {"scheme": "tcp", "default_host": "localhost", "connection_security": "mtls"}
MISSING = "a federation across machines needs NVFlare: pip install 'fedvlm[nvflare]'"


@dataclass(frozen=True)
class KeptFederation:
    """What is kept beside the root key, to make further kits (federation.json)."""

    name: str
    host: str
    port: int
    sites: list[str]


def nvflare(module: str) -> ModuleType:
    """A module of NVFlare, which is installed only where it is wanted."""
    try:
        return import_module(f"nvflare.{module}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "nvflare":
            raise FedvlmError(MISSING) from error
        raise


def new_federation(sites: Sequence[str], name: str, host: str, port: int, out: Path) -> list[Path]:
    """A new federation in the folder `out`; its kits: the server's, the sites', and the one that starts runs."""
    check_names(sites)
    if not NAME.fullmatch(name):
        raise FedvlmError(f"name={name}: letters, digits, - and _ make a federation's name, at most 63")
    if not HOST.fullmatch(host):
        raise FedvlmError(f"host={host} is no host name; give the name or address at which the sites reach the server")
    if not 0 < port < 65536:
        raise FedvlmError(f"port={port}: a port is a number from 1 to 65535")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FedvlmError(
            f"{out} exists; choose another out=, or add a site to it: fedvlm federation add SITE in={out}"
        )
    lighter = nvflare("lighter.utils")
    federation = KeptFederation(name, host, port, list(sites))
    with files.writing(out):
        files.private_folder(out)
        try:
            key, public = lighter.generate_keys()
            root = lighter.Identity(name)
            certificate = lighter.generate_cert(root, root, key, public, valid_days=ROOT_DAYS, ca=True)
            files.write(out / ROOT_KEY, lighter.serialize_pri_key(key), private=True, sync=True)
            files.write(out / ROOT_CERTIFICATE, lighter.serialize_cert(certificate), private=True)
            kits = make_kits(federation, [SERVER, *sites, ADMIN], out)
            files.write(out / FEDERATION, json.dumps(asdict(federation), indent=2), private=True)
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
    return kits


def add_sites(names: Sequence[str], out: Path, keys: Mapping[str, Any] | None = None) -> list[Path]:
    """Kits for further sites, made with the kept root key. A name that has one (also `server` and `admin`) gets a new one,
    with a certificate that begins today; the old one stays valid until its day. `keys`: public ones, of a request."""
    federation = read_federation(out)
    check_names([n for n in names if n not in (SERVER, ADMIN)] or ["site"])
    known = {n.lower(): n for n in federation.sites}
    for site in names:
        if known.get(site.lower(), site) != site:
            raise FedvlmError(
                f"there is a site {known[site.lower()]}, and {site} differs only in case; use another name"
            )
    with files.writing(out):
        kits = make_kits(federation, names, out, keys)
        sites = [*federation.sites, *(n for n in names if n not in (*federation.sites, SERVER, ADMIN))]
        content = asdict(federation) | {"sites": sites}
        files.write(out / FEDERATION, json.dumps(content, indent=2), private=True)
    return kits


def request_kit(site: str, folder: Path) -> Path:
    """New keys of a site in `folder`, where they stay, and beside it the request that goes to the office."""
    check_names([site])
    if folder.exists():
        raise FedvlmError(f"{folder} exists; move it away, or join with the kit that it holds")
    lighter = nvflare("lighter.utils")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        for purpose in PURPOSES:
            key, _ = lighter.generate_keys()
            asked = x509.CertificateSigningRequestBuilder().subject_name(lighter.x509_name(site, ORGANISATION))
            content = asked.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
            files.write(folder / "startup" / f"{purpose}.key", lighter.serialize_pri_key(key), private=True)
            files.write(Path(place) / f"{purpose}.csr", content)
        for made in (folder, folder / "startup"):
            files.private_folder(made)
        zip_kit(Path(place), request := folder.with_name(f"{folder.name}{REQUEST}"))
    return request


def sign(request: Path, out: Path) -> Path:
    """The kit of a site without keys: certificates for the keys that its request names."""
    names, keys = set[str](), {}
    from cryptography import x509

    try:
        with zipfile.ZipFile(request) as archive:
            for purpose in PURPOSES:
                asked = x509.load_pem_x509_csr(archive.read(f"{purpose}.csr"))
                if not asked.is_signature_valid:
                    raise ValueError("who asks does not have the key")
                keys[purpose] = asked.public_key()
                names |= {str(a.value) for a in asked.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)}
        (site,) = names
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise FedvlmError(
            f"{request} is no request of `fedvlm join SITE --request` ({error}); ask for it again"
        ) from error
    return add_sites([site], out, keys)[0]


def certify(folder: Path, name: str, federation: KeptFederation, out: Path, keys: Mapping[str, Any]) -> None:
    """Certificates for these public keys in place of the kit's keys and certificates."""
    lighter = nvflare("lighter.utils")
    root, us = lighter.load_private_key_file(str(out / ROOT_KEY)), lighter.Identity(name, ORGANISATION)
    for purpose, key in keys.items():
        host = {"server_default_host": INTERNAL["default_host"]} if purpose == "server" else {}
        made = lighter.generate_cert(us, lighter.Identity(federation.name), root, key, valid_days=KIT_DAYS, **host)
        (folder / "startup" / f"{purpose}.crt").write_bytes(lighter.serialize_cert(made))
        (folder / "startup" / f"{purpose}.key").unlink()


def check_names(sites: Sequence[str]) -> None:
    if not sites:
        raise FedvlmError("name the sites: fedvlm federation init north south")
    for site in sites:
        if not NAME.fullmatch(site) or site.lower() in RESERVED:
            raise FedvlmError(
                f"'{site}' cannot be a site's name: give letters, digits, - and _, at most 63, such as north"
            )
        if site.lower() in (SERVER, ADMIN):
            raise FedvlmError(f"'{site}' is the name of another kit; give the site another name")
    lower = [s.lower() for s in sites]
    for site in sites:
        if lower.count(site.lower()) > 1:
            raise FedvlmError(f"the site {site} is named twice; give every site a name of its own")


def read_federation(out: Path) -> KeptFederation:
    try:
        return build(KeptFederation, parsed(read_text(out / FEDERATION)))
    except FileNotFoundError:
        raise FedvlmError(f"{out} holds no federation; give the folder that `fedvlm federation init` made") from None
    except (OSError, ValueError) as error:
        raise FedvlmError(f"{out / FEDERATION} cannot be read ({error}); restore it from a copy") from error


def make_kits(
    federation: KeptFederation, names: Sequence[str], out: Path, keys: Mapping[str, Any] | None = None
) -> list[Path]:
    kits = []
    with tempfile.TemporaryDirectory(dir=out) as temporary:  # inside: nobody else can enter
        for name, folder in provision(federation, names, out, Path(temporary)).items():
            if keys:
                certify(folder, name, federation, out, keys)
            prepare_kit(folder, federation, name)
            kits.append(out / f"{name}.zip")
            zip_kit(folder, kits[-1])
    return kits


def provision(federation: KeptFederation, names: Sequence[str], out: Path, work: Path) -> dict[str, Path]:
    """NVFlare's own kits, by name, signed with the root key in `out`."""
    entity, lighter = nvflare("lighter.entity"), nvflare("lighter.utils")
    try:
        key = lighter.load_private_key_file(str(out / ROOT_KEY))
        certificate = (out / ROOT_CERTIFICATE).read_bytes()
    except (OSError, ValueError) as error:
        raise FedvlmError(f"{out / ROOT_KEY} cannot be read ({error}); restore it from a copy") from error
    project = entity.Project(federation.name, "", serialized_root_cert=certificate, root_private_key=key)
    # the server's is always made, since the others name it; without being asked for it is not handed on
    project.set_server(SERVER, ORGANISATION, {"fed_learn_port": federation.port, "default_host": federation.host})
    for name in names:
        if name == ADMIN:
            project.add_admin(USER, ORGANISATION, {"role": "project_admin"})
        elif name != SERVER:
            project.add_client(name, ORGANISATION, {"listening_host": INTERNAL})
    builders = [
        nvflare("lighter.impl.workspace").WorkspaceBuilder(),
        nvflare("lighter.impl.static_file").StaticFileBuilder(config_folder="config"),
        nvflare("lighter.impl.cert").CertBuilder(),
    ]
    log = Collected()
    context = nvflare("lighter.provisioner").Provisioner(str(work), builders).provision(project, logger=log)
    if context.get(nvflare("lighter.constants").CtxKey.BUILD_ERROR):
        raise FedvlmError(f"NVFlare cannot make the kits: {'; '.join(log.errors) or 'no reason given'}")
    made = Path(context["current_prod_dir"])
    return {name: made / (USER if name == ADMIN else name) for name in names}


class Collected:
    """Takes what NVFlare would print."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, text: str) -> None:
        self.errors.append(text)

    def warning(self, text: str) -> None:
        self.errors.append(text)

    def info(self, text: str) -> None:
        pass

    debug = info


def prepare_kit(folder: Path, federation: KeptFederation, name: str) -> None:
    """Changes NVFlare's kit into ours: its keys and certificates stay, and settings.py has the rest. There are no scripts:
    `fedvlm serve` and `fedvlm join` start it."""
    kind: Kind = "server" if name == SERVER else "admin" if name == ADMIN else "site"
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        if path.suffix not in (".crt", ".key", ".pem") and path.name != "fed_admin.json":
            path.unlink()
    own = folder / "startup" / ("server.crt" if kind == "server" else "client.crt")
    mark = hashlib.sha256(own.read_bytes()).hexdigest()[:16]
    ends = nvflare("lighter.utils").load_crt_bytes(own.read_bytes()).not_valid_after_utc.isoformat()
    at = (federation.name, federation.host, federation.port)
    about = About(kind, name, *at, ends, mark, fedvlm.__version__, federation.sites if kind == "admin" else [])
    write_json(folder / ABOUT, asdict(about))
    write_settings(folder, about, Path())


def write_settings(folder: Path, about: About, place: Path) -> None:
    """NVFlare's files of a kit that runs at `place`."""
    for name, content in kit_settings(about, place).items():
        write_json(folder / name, content)


def write_json(path: Path, content: object) -> None:
    files.write(path, json.dumps(content, indent=2) + "\n", private=True)


def zip_kit(folder: Path, path: Path) -> None:
    """A zip file of the folder, which nobody but this user may read."""
    with (
        files.replaced(path, private=True, sync=True) as out,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            member = zipfile.ZipInfo(file.relative_to(folder).as_posix())
            member.external_attr = 0o600 << 16
            archive.writestr(member, file.read_bytes(), zipfile.ZIP_DEFLATED)


def unzip_kit(path: Path) -> Path:
    """The folder beside the zip file that holds its content; one that holds this very kit already is taken as it is."""
    folder = path.with_suffix("")
    try:
        with zipfile.ZipFile(path) as archive:
            about = archive.read(ABOUT)
            if (folder / ABOUT).is_file() and (folder / ABOUT).read_bytes() == about:
                return folder
            members = [m for m in archive.infolist() if not m.is_dir()]
            if len(members) > MOST_FILES or sum(m.file_size for m in members) > MOST_BYTES:
                raise FedvlmError(f"{path} is too large for a kit; ask for it again")
            if odd := [m.filename for m in members if not MEMBER.fullmatch(m.filename)]:
                raise FedvlmError(f"{path} is not a kit: it holds {odd[0]}")
            if not any(m.filename.endswith(".key") for m in members):
                check_keys(folder, archive)
                for member in members:
                    files.write(folder / member.filename, archive.read(member), private=True)
                return folder
            if folder.exists():
                raise FedvlmError(f"{folder} exists and holds another kit; move it away, and give {path.name} again")
            part = Path(tempfile.mkdtemp(dir=path.parent, suffix=files.PART))
            try:
                for member in members:
                    files.write(part / member.filename, archive.read(member), private=True)
                for made in [part, *(p for p in part.rglob("*") if p.is_dir())]:
                    files.private_folder(made)
                part.rename(folder)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, RuntimeError, zlib.error) as error:
        raise FedvlmError(f"{path} is not a kit: {error}") from error
    return folder


def check_keys(folder: Path, archive: zipfile.ZipFile) -> None:
    """An error where a kit without keys is not the answer to the request whose keys are here."""
    lighter = nvflare("lighter.utils")
    for purpose in PURPOSES:
        path, certificate = folder / "startup" / f"{purpose}.key", archive.read(f"startup/{purpose}.crt")
        if not path.exists():
            raise FedvlmError(f"{path} is missing: this kit is for keys that `fedvlm join SITE --request` made there")
        key = lighter.load_private_key_file(str(path)).public_key()
        if key != lighter.load_crt_bytes(certificate).public_key():
            raise FedvlmError(f"{path} is another key than the kit is for; send the office the request of this one")


def open_kit(name: str, kind: Kind) -> tuple[Path, About]:
    """The folder of a kit, given as its zip file or as the folder, and what it says of itself."""
    path = Path(name).expanduser()
    try:
        folder = (unzip_kit(path) if path.is_file() else path).resolve()
        about = build(About, parsed(read_text(folder / ABOUT)))
    except FileNotFoundError:
        raise FedvlmError(f"{name} is not a kit; give a file that `fedvlm federation init` made") from None
    except (OSError, ValueError) as error:
        raise FedvlmError(f"{name} cannot be opened as a kit ({error}); ask for it again") from error
    if not (NAME.fullmatch(about.name) and NAME.fullmatch(about.federation) and HOST.fullmatch(about.host)):
        raise FedvlmError(f"{name} is not a kit: {ABOUT} holds names that no kit has")
    if about.kind != kind:
        command = {"server": "fedvlm serve", "site": "fedvlm join", "admin": "fedvlm run METHOD federation="}
        use = command.get(about.kind, "another command")
        raise FedvlmError(
            f"{name} is the kit of {about.kind} {about.name}, for `{use}`; this needs the kit of a {kind}"
        )
    if end_of(about) < datetime.now(UTC):
        raise FedvlmError(
            f"{name}: its certificate ended on {about.ends}; ask for a new kit (`fedvlm federation add {about.name}`)"
        )
    return folder, about
