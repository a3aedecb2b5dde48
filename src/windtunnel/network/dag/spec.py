"""Jobs and what they run on: the file that users write, checked field by field.

    version: 1
    resources:
      a: {processors: 2, nic: 10 Gb/s}           # a host: a, and its NIC's directions, a.out and a.in
      b: {processors: 2, nic: 10 Gb/s}
      core: 5 Gb/s                               # any other link
    jobs:
      sort:
        begins: 1 s                              # 0 s by default
        tasks:
          read: {compute: 4 s, host: a, unit: 1 s}
          shuffle: {send: 2 GB, from: a, to: b, pipelined: read, unit: 500 MB, coflow: shuffle}
          copy: {send: 1 GB, loads: {a.out: 1, core: 2}, after: [read]}
          merge: {compute: 1 s, host: b, after: shuffle, command: [sort, -m, parts]}   # with --live

What comes after a task begins when that has ended; what is pipelined, when that has given out a unit. An
error becomes one sentence: file, field, value, what is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.base.units import parse_quantity
from windtunnel.cluster.schema import Bytes, Count, Rate, Seconds
from windtunnel.network.dag.policy import GraphJob, GraphTask
from windtunnel.network.dag.policy.paths import checked, some

MOST_TASKS = 10_000
"""In one file."""
ACCEPTED = {
    "[key]": "up to 200 characters without spaces, # and /",
    "version": "1, the only one that this windtunnel reads",
    "resources": "a mapping of names to hosts and links",
    "jobs": "a mapping of names to jobs",
    "tasks": f"a mapping of names to tasks, 1 to {MOST_TASKS:,}",
    "rate": "a rate, such as 10 Gb/s",
    "processors": "a whole number from 1 up",
    "nic": "a rate, such as 10 Gb/s",
    "begins": "seconds, such as 500 ms",
    "compute": "seconds above 0, such as 4 s",
    "send": "bytes above 0, such as 2 GB",
    "host": "the name of a host",
    "from": "the name of a host",
    "to": "the name of a host",
    "loads": "a mapping of links to how many times the rate is on them",
    "after": "a task's name, or a list of them",
    "pipelined": "a task's name, or a list of them",
    "unit": "seconds or bytes above 0, as the task's size is",
    "coflow": "a name",
    "command": "a program and its words, such as [python, merge.py]",
}


def _names(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _rate(value: object) -> object:
    """``5 Gb/s`` is short for ``{rate: 5 Gb/s}``."""
    return value if isinstance(value, dict) else {"rate": value}


def _positive(value: object) -> object:
    return parse_quantity(value, "seconds")


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Name = Annotated[str, Field(pattern=r"^[^#/\s]{1,200}$")]


class Resource(BaseModel, extra="forbid"):
    """A host, or with ``rate`` a link."""

    processors: Annotated[Count, Field(le=2**20)] | None = None
    """computing tasks that the host runs at once"""
    nic: Rate | None = None
    """rate of the NIC, each way: the links `HOST.out` and `HOST.in`"""
    rate: Rate | None = None
    """rate of a link that is no NIC"""


class TaskSpec(BaseModel, extra="forbid"):
    compute: Annotated[float, BeforeValidator(_positive)] | None = None
    """seconds of one processor"""
    send: Bytes | None = None
    """bytes of a flow"""
    host: str | None = None
    """the host of a computing task"""
    source: Annotated[str | None, Field(alias="from")] = None
    """the host that sends"""
    to: str | None = None
    """the host that receives"""
    loads: Annotated[dict[str, Annotated[float, Field(gt=0, le=1e6)]], Field(min_length=1)] | None = None
    """in place of `from` and `to`: links, with how many times the rate of the flow is on each"""
    after: Names = ()
    """tasks that end first"""
    pipelined: Names = ()
    """tasks that have given out one `unit` first"""
    unit: Any = None
    """bytes or seconds of a pipelined task that are passed on at once"""
    coflow: str = ""
    """the group of flows that count as one for `sebf`"""
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """with `--live`: the program that the task runs"""


class GraphJobSpec(BaseModel, extra="forbid"):
    begins: Seconds = 0.0
    """seconds until the job is there"""
    tasks: Annotated[dict[Name, TaskSpec], Field(min_length=1, max_length=MOST_TASKS)]
    """its tasks by name"""


class GraphSpec(BaseModel, extra="forbid"):
    version: Literal[1]
    """of this form"""
    resources: Annotated[dict[Name, Annotated[Resource, BeforeValidator(_rate)]], Field(min_length=1)]
    """hosts and links by name"""
    jobs: Annotated[dict[Name, GraphJobSpec], Field(min_length=1)]
    """jobs by name"""


Read = tuple[tuple[GraphJob, ...], dict[str, float]]


def read(path: Path) -> Read:
    """Jobs and resources in the file at ``path``. Raises `UserError` for the first thing that is wrong."""
    return check(read_mapping(path, "file of jobs"), str(path))


def check(document: Mapping[Any, Any], where: str) -> Read:
    """``document`` as jobs and resources; ``where`` is the file that errors name.

    Raises:
        UserError: the first thing in it that is wrong.
    """
    spec = fitted(GraphSpec, document, where, ACCEPTED)
    resources: dict[str, float] = {}
    for name, resource in spec.resources.items():
        if (resource.rate is None) == (resource.processors is None):
            raise UserError(f"{where}: resources.{name}, accepted is a host (processors) or a link (rate)")
        resources[name] = float(resource.processors or resource.rate or 0.0)
        for own in (f"{name}.out", f"{name}.in") if resource.nic is not None else ():
            if own in spec.resources or resource.nic is None or resource.rate is not None:
                raise UserError(f"{where}: resources.{name} has a NIC, accepted is a host, and no link {own}")
            resources[own] = resource.nic
    if sum(len(job.tasks) for job in spec.jobs.values()) > MOST_TASKS:
        raise UserError(f"{where}: jobs have more than {MOST_TASKS:,} tasks in all, accepted are that many")
    hosts = [name for name, resource in spec.resources.items() if resource.processors]
    jobs = []
    for name, job in spec.jobs.items():
        at = f"{where}: jobs.{name}.tasks"
        tasks = [_task(f"{at}.{own}", own, task, hosts) for own, task in job.tasks.items()]
        jobs.append(GraphJob(name, tuple(tasks), job.begins))
    return checked(jobs, resources, where), resources


def _task(at: str, name: str, spec: TaskSpec, hosts: list[str]) -> GraphTask:
    if (spec.compute is None) == (spec.send is None):
        raise UserError(f"{at} has {'both' if spec.send else 'neither'} of compute and send, accepted is one")
    for field, host in (("host", spec.host), ("from", spec.source), ("to", spec.to)):
        if host is not None and host not in hosts:
            raise UserError(f"{at}.{field} is {host!r}, accepted are hosts that there are: {some(hosts)}")
    if spec.compute is not None:
        if spec.host is None or spec.source or spec.to or spec.loads:
            raise UserError(f"{at} computes, accepted is that on one host, without from, to and loads")
        kind, size, loads = "seconds", spec.compute, {spec.host: 1.0}
    else:
        both = spec.source is not None and spec.to is not None and spec.loads is None
        if spec.host is not None or not (both or (spec.loads and spec.source is None and spec.to is None)):
            raise UserError(f"{at} sends, accepted is that with from and to, or with loads")
        if spec.source is not None and spec.source == spec.to:
            raise UserError(f"{at} sends from {spec.to!r} to itself, accepted are two hosts")
        if link := next((link for link in spec.loads or () if link in hosts), ""):
            raise UserError(f"{at} loads {link}, a host, accepted are links, such as {link}.out")
        loads = spec.loads or {f"{spec.source}.out": 1.0, f"{spec.to}.in": 1.0}
        kind, size = "bytes", spec.send or 0.0
    unit = size
    if spec.command and (kind == "bytes" or spec.unit is not None):
        raise UserError(f"{at} has a command, accepted is that with compute, and without unit")
    if spec.unit is not None:
        try:
            unit = parse_quantity(spec.unit, kind)
        except ValueError as error:
            raise UserError(f"{at}.unit is {spec.unit!r}, {error}") from None
    return GraphTask(
        name, "compute" if kind == "seconds" else "network", size, tuple(loads.items()), spec.after,
        spec.pipelined, unit, spec.coflow, spec.command or (),
    )  # fmt: skip


def changed(document: Mapping[Any, Any], changes: Iterable[str]) -> dict[Any, Any]:
    """A ``document`` that `check` accepts, with other values: each of ``changes`` is ``JOB/TASK.FIELD=VALUE``
    (``TASK`` where one job has it; without ``.FIELD`` its size) or ``RESOURCE.FIELD=VALUE``.

    Raises:
        UserError: one that is not understood.
    """
    result: dict[Any, Any] = json.loads(json.dumps(document))  # what an alias named twice is two now
    entries: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for job_name, job in result["jobs"].items():
        for name, task in job["tasks"].items():
            for label in (name, f"{job_name}/{name}"):
                entries.setdefault(label, []).append((task, "send" if "send" in task else "compute"))
    for name, entry in result["resources"].items():
        result["resources"][name] = entry if isinstance(entry, dict) else {"rate": entry}
        entries.setdefault(name, []).append((result["resources"][name], "rate"))
    for change in changes:
        label, equals, value = change.partition("=")
        label, dot, field = (label, "", "") if label in entries else label.rpartition(".")
        matches = entries.get(label, [])
        if len(matches) != 1 or not equals:
            raise UserError(
                f"`what_if` {change!r} names {len(matches)} tasks and resources, accepted is one, such as "
                "JOB/TASK=VALUE, JOB/TASK.FIELD=VALUE or RESOURCE.FIELD=VALUE"
            )
        fields, size = matches[0]
        fields[field if dot else size] = value
    return result
