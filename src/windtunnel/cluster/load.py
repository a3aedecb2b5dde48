"""`load_cluster`: a name or a file becomes a `Cluster`.

A name is ``DEVICE:HOSTSxDEVICES`` from the catalogue, with what-ifs behind commas:
``h100-sxm:16x8,nic=ib-200,topology=fat-tree-2,oversubscription=4``. A file is YAML (see docs/cluster.md), and
takes the same what-ifs. Both are brought into one `ClusterSpec`, which is then filled in from the catalogue.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from windtunnel.base.errors import UserError
from windtunnel.base.strict_yaml import StrictLoader
from windtunnel.cluster.build import EXAMPLE, build
from windtunnel.cluster.model import Cluster
from windtunnel.cluster.schema import check, suggest

# What may stand behind a comma, and where it belongs in a file.
OPTIONS: dict[str, tuple[str, ...]] = {
    "nic": ("host", "nic"),
    "nics": ("host", "nics"),
    "intra": ("host", "intra"),
    "topology": ("topology", "kind"),
    "oversubscription": ("topology", "oversubscription"),
    "hosts_per_leaf": ("topology", "hosts_per_leaf"),
    "leaves_per_pod": ("topology", "leaves_per_pod"),
    "dims": ("topology", "dims"),
    "hop_latency": ("topology", "hop_latency"),
    "price": ("price_per_device_hour",),
}


def load_cluster(spec: str) -> Cluster:
    """The cluster that ``spec`` names: ``h100-sxm:16x8`` or a YAML file, with or without ``,key=value``.

    Raises `UserError` with one sentence for anything that is not understood.
    """
    spec = spec.strip()
    if not spec:
        raise UserError(f"the cluster is empty, accepted is a YAML file or a name like {EXAMPLE}")
    head, *options = spec.split(",")
    if _is_file(head):
        document = _read_yaml(Path(head))
        name = check(document, head).name  # alone first: a what-if is not merged into what is malformed
        name = name or head
    else:
        document = {"base": head}
        name = head
    given: set[str] = set()
    for option in options:
        key = _apply(document, option, spec)
        if key in given:
            raise UserError(f"{spec}: option {key} is given twice, accepted is once")
        given.add(key)
    document["name"] = ",".join([name, *options])
    return build(check(document, spec), spec)


def _is_file(head: str) -> bool:
    return "/" in head or head.endswith((".yaml", ".yml")) or (":" not in head and Path(head).is_file())


def _apply(document: dict[str, Any], option: str, spec: str) -> str:
    """Write ``key=value`` into the place of ``document`` that it belongs to; returns the key."""
    key, equals, value = option.partition("=")
    key = key.strip()
    if not equals or not value.strip():
        raise UserError(
            f"{spec}: option {option!r} is not understood, accepted is key=value, such as nic=ib-200"
        )
    if key not in OPTIONS:
        raise UserError(f"{spec}: option {key} is unknown{suggest(key, OPTIONS)}")
    *path, last = OPTIONS[key]
    for part in path:
        document[part] = document.get(part) or {}
        document = document[part]
    document[last] = value.strip()
    return key


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except FileNotFoundError:
        raise UserError(
            f"{path}: there is no such file, accepted is a YAML file or a name like {EXAMPLE}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason}), accepted is a readable YAML file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{at}: not valid YAML ({error.problem}), accepted is a cluster file") from None
    except yaml.YAMLError as error:
        raise UserError(
            f"{path}: not valid YAML ({str(error).splitlines()[0]}), accepted is a cluster file"
        ) from None
