"""The image ``host``: a small root made of this machine's own installed Debian packages.

``host+postgresql,/opt/tools`` has more: packages that are installed here, with all that they need, and
folders or files of this machine (absolute paths), which lie at the same place inside.

Nothing is downloaded: the closure of a list of packages is read from dpkg's database and their files are
copied from where they are installed, less documentation and translations. What the machine knows that a
sandbox must not (password hashes, keys, the machine's identity) is not copied but written anew.

A path that one package diverts for another is what it is here: the diverted file.

Source: dpkg(1), deb-control(5) for dependencies, update-alternatives(1).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.files.tree import Copier, attributes
from windtunnel.base.errors import UserError

RECIPE = 4
"""Moves when the same packages give another image, or the same database other packages."""
STATUS = Path("/var/lib/dpkg/status")

WANTED = [
    "base-files", "base-passwd", "bash", "bzip2", "ca-certificates", "coreutils", "curl", "dash",
    "debianutils", "diffutils", "findutils", "gawk", "git", "grep", "gzip", "hostname", "iproute2", "less",
    "libc-bin", "login", "make", "mawk", "mount", "ncurses-base", "ncurses-bin", "netbase", "patch",
    "procps", "python3", "python3-minimal", "python3-pip", "sed", "tar", "util-linux", "xz-utils", "zlib1g",
]  # fmt: skip
LEFT_OUT = re.compile(
    r"/usr/share/(doc|man|locale|info|lintian|bug|bash-completion|zsh|menu|doc-base|gitweb|pixmaps|icons|"
    r"applications|perl/5\.\d+\.\d+/pod|debconf)(/|$)"
    r"|/usr/share/i18n(/|$)|/etc/(init\.d|cron|apt|systemd|ssh|pam\.d|rc\d|logrotate|default|dpkg|security|shadow)"
    r"|/(usr/)?lib/systemd(/|$)|/boot(/|$)|.*/__pycache__(/|$)"
)
_NAMED = re.compile(r"\s*([a-z0-9][a-z0-9+.-]*)")


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    architecture: str
    needs: tuple[tuple[str, ...], ...]
    """For each dependency, the names that satisfy it."""
    provides: tuple[str, ...]


def installed(status: str) -> dict[str, Package]:
    """The installed packages of a dpkg status file, those of the machine's own architecture first."""
    packages: dict[str, Package] = {}
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): *(.*(?:\n[ \t].*)*)", paragraph, re.MULTILINE))
        if fields.get("Status", "").split()[-1:] != ["installed"]:
            continue
        needs = ",".join(fields[key] for key in ("Pre-Depends", "Depends") if key in fields)
        package = Package(
            fields["Package"],
            fields["Version"],
            fields.get("Architecture", "all"),
            tuple(_alternatives(each) for each in needs.split(",") if each.strip()),
            tuple(name for each in fields.get("Provides", "").split(",") for name in _alternatives(each)),
        )
        packages.setdefault(package.name, package)
    return packages


def _alternatives(dependency: str) -> tuple[str, ...]:
    return tuple(match[1] for each in dependency.split("|") if (match := _NAMED.match(each)))


def closure(packages: dict[str, Package], requested: list[str]) -> list[Package]:
    """``requested``, as far as installed, and all that they need, by name."""
    providers: dict[str, list[str]] = {}
    for package in packages.values():
        for name in package.provides:
            providers.setdefault(name, []).append(package.name)
    chosen: dict[str, Package] = {}
    todo = [name for name in requested if name in packages]
    while todo:
        name = todo.pop()
        if name in chosen:
            continue
        chosen[name] = packages[name]
        for names in packages[name].needs:
            direct = [each for each in names if each in packages]
            todo += direct[:1] or [each for virtual in names for each in providers.get(virtual, ())][:1]
    return [chosen[name] for name in sorted(chosen)]


def more(source: str) -> tuple[list[str], list[Path]]:
    """The packages and the paths that ``host+…`` names beyond those of ``host``, or UserError."""
    packages, folders = [], []
    for word in source.partition("+")[2].split(",") if source != "host" else []:
        if word.startswith("/"):
            if not Path(word).exists() or ".." in Path(word).parts:
                raise UserError(f"image {source!r}: there is no file or folder {word} on this machine")
            folders.append(Path(word))
        elif _NAMED.fullmatch(word):
            packages.append(word)
        else:
            raise UserError(
                f"image {source!r}: {word!r} is neither the name of a Debian package nor the absolute path "
                "of a folder or file; write 'host+PACKAGE,/FOLDER'"
            )
    return sorted(set(packages)), sorted(set(folders))


def chosen_packages(root: Path = Path("/"), extra: Sequence[str] = ()) -> list[Package]:
    """The packages of the image, with those of ``extra``, or UserError where this machine lacks them."""
    status = root / STATUS.relative_to("/")
    if not status.is_file():
        raise UserError(
            "image 'host': this machine has no dpkg database to make a root from; "
            "give a directory, a tarball or an OCI image layout instead"
        )
    offered = installed(status.read_text(encoding="utf-8", errors="replace"))
    absent = [name for name in extra if name not in offered]
    if absent:
        raise UserError(
            f"image 'host+{','.join(extra)}': packages are not installed here: {', '.join(absent)}; "
            f"'apt-get install {' '.join(absent)}' installs them"
        )
    packages = closure(offered, [*WANTED, *extra])
    missing = {"bash", "coreutils", "libc6"} - {package.name for package in packages}
    if missing:
        raise UserError(f"image 'host': packages are not installed here: {', '.join(sorted(missing))}")
    return packages


def digest(packages: list[Package]) -> str:
    """What the image depends on, hashed: it is made again when a package changes."""
    text = "\n".join([str(RECIPE), platform.machine(), *(f"{each.name} {each.version}" for each in packages)])
    return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()


def fill(
    target: Path, packages: list[Package], root: Path = Path("/"), folders: Sequence[Path] = ()
) -> list[str]:
    """Make the root in the empty folder ``target``, with ``folders`` of this machine in their places. What is
    left out since this user may not read it, in words."""
    copier = Copier()
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        merged = root / name
        if merged.is_symlink():
            os.symlink(os.readlink(merged), target / name)
            (target / "usr" / name).mkdir(parents=True, exist_ok=True)
    for package in packages:
        for path in _listed(root, package):
            if LEFT_OUT.match(path):
                continue
            _copy(root, target, path, copier)
            if path.endswith(".py"):
                _compiled(root, target, path, copier)
    _alternatives_links(root, target, copier)
    _etc(root, target, copier)
    for folder in folders:
        place = target / folder.relative_to("/")
        if place.is_file() or (place.exists() and any(place.iterdir())):
            raise UserError(
                f"image 'host+{folder}': the packages of the image have files in {folder} already"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            place.mkdir(exist_ok=True)
            copier.tree(str(folder), str(place))
        else:
            copier.entry(str(folder.resolve()), str(place))
    some, count = ", ".join(copier.skipped[:3]), len(copier.skipped)
    more = ", ..." if count > 3 else ""
    words = f"host image: {count} files that this user may not read are left out ({some}{more})"
    return [words] if count else []


def _listed(root: Path, package: Package) -> list[str]:
    folder = root / "var/lib/dpkg/info"
    for name in (package.name, f"{package.name}:{package.architecture}"):
        file = folder / f"{name}.list"
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return []


def _copy(root: Path, target: Path, path: str, copier: Copier) -> None:
    """One listed path; parents are resolved on this machine, so that none is a link in the image."""
    original = root / path.lstrip("/")
    try:
        about = os.lstat(original)
    except OSError:
        return  # left out by a dpkg filter, or removed by the machine's owner
    base = os.path.realpath(root)
    parent = os.path.relpath(os.path.realpath((root / path.lstrip("/")).parent), base)
    if parent.startswith(".."):
        return
    place = target / parent / os.path.basename(path)
    if stat.S_ISDIR(about.st_mode):
        if path not in ("", "/", "/."):
            _folder(base, target, os.path.normpath(f"{parent}/{os.path.basename(path)}"))
    elif not os.path.lexists(place):
        _folder(base, target, parent)
        try:
            copier.entry(str(original), str(place))
        except PermissionError:
            # only who reads all of this machine's files has all of its packages'
            if os.geteuid() == 0:
                raise
            copier.skipped.append(str(original))


def _compiled(root: Path, target: Path, path: str, copier: Copier) -> None:
    """What Python has compiled of a module here: else the first program to import it would write that, and
    its turn would count as one that changed files."""
    module = root / path.lstrip("/")
    for file in module.parent.glob(f"__pycache__/{module.stem}.*.pyc"):
        name = f"{os.path.dirname(path)}/__pycache__/{file.name}"
        _copy(root, target, name, copier)


def _folder(base: str, target: Path, path: str) -> None:
    """A folder and its parents, with this machine's modes and owners."""
    place = target / path
    if path == "." or os.path.lexists(place):
        return
    _folder(base, target, os.path.dirname(path) or ".")
    os.mkdir(place)
    about = os.stat(f"{base}/{path}")
    attributes(f"{base}/{path}", str(place), about)


def _alternatives_links(root: Path, target: Path, copier: Copier) -> None:
    """The links that update-alternatives keeps (awk, pager, editor, ...), where the image has what they
    name."""
    chosen = root / "etc/alternatives"
    for link in sorted(chosen.iterdir()) if chosen.is_dir() else []:
        record = root / "var/lib/dpkg/alternatives" / link.name
        if not record.is_file() or not link.is_symlink():
            continue
        program = os.readlink(link)
        if not os.path.lexists(target / program.lstrip("/")):
            continue
        _copy(root, target, f"/etc/alternatives/{link.name}", copier)
        name = record.read_text(encoding="utf-8").splitlines()[1]
        _copy(root, target, name, copier)


PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"
HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"


def _etc(root: Path, target: Path, copier: Copier) -> None:
    for name, mode in (
        ("proc", 0o555), ("sys", 0o555), ("dev", 0o755), ("run", 0o755), ("run/lock", 0o1777),
        ("tmp", 0o1777), ("root", 0o700), ("home", 0o755), ("workspace", 0o755), ("mnt", 0o755),
        ("etc", 0o755), ("var", 0o755), ("var/tmp", 0o1777), ("var/lib", 0o755), ("var/log", 0o755),
        ("var/cache", 0o755), ("usr/local/bin", 0o755),
    ):  # fmt: skip
        path = target / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
    for name, link in (("var/run", "/run"), ("var/lock", "/run/lock"), ("etc/mtab", "/proc/self/mounts")):
        if not os.path.lexists(target / name):
            os.symlink(link, target / name)
    for name, master, plain in (("passwd", "passwd.master", PASSWD), ("group", "group.master", GROUP)):
        source = target / "usr/share/base-passwd" / master
        text = source.read_text(encoding="utf-8") if source.is_file() else plain
        (target / "etc" / name).write_text(text.replace(":*:", ":x:"), encoding="utf-8")
    for name, text in (
        ("hosts", HOSTS), ("hostname", "sandbox\n"), ("resolv.conf", ""), ("fstab", ""), ("machine-id", ""),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
    ):  # fmt: skip
        (target / "etc" / name).write_text(text, encoding="utf-8")
    for name in (".bashrc", ".profile"):
        skeleton = target / "etc/skel" / name
        if skeleton.is_file():
            shutil.copyfile(skeleton, target / "root" / name)
    _certificates(root, target, copier)
    loader = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if loader and os.geteuid() == 0:
        # programs start without the cache too, only slower
        subprocess.run([loader, "-r", str(target)], capture_output=True, check=False)


def _certificates(root: Path, target: Path, copier: Copier) -> None:
    """The public certificates that update-ca-certificates made; no private keys."""
    folder = root / "etc/ssl/certs"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        ends = os.path.realpath(path)
        if path.name == "ca-certificates.crt" or os.path.exists(target / os.path.relpath(ends, root)):
            _copy(root, target, f"/etc/ssl/certs/{path.name}", copier)
