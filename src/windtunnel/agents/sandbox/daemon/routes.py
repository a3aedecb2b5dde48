"""The endpoints for sandboxes, turns and checkpoints, and what their requests may hold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import asdict, replace

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from windtunnel import __version__
from windtunnel.agents.sandbox import model
from windtunnel.agents.sandbox.client import wire
from windtunnel.agents.sandbox.daemon.service import Body, Command, Execution, Refused, Service, lines
from windtunnel.agents.sandbox.model import Facility, Limits, Manifest, SandboxSpec
from windtunnel.agents.sandbox.protocol import AnySandbox, Log, PendingTurn

LINES = "application/x-ndjson"
LONGEST_WAIT = 30.0
"""Seconds that one request waits for a checkpoint; a client that waits longer asks again."""


class LimitsBody(Body):
    memory: int | None = Field(default=Limits.memory, ge=1, description="Bytes; null: unbounded.")
    cpus: float | None = Field(
        default=Limits.cpus, gt=0, description="1.5 is one and a half CPUs; null: unbounded."
    )
    pids: int | None = Field(default=Limits.pids, ge=1, description="Processes and threads; null: unbounded.")
    disk: int | None = Field(
        default=Limits.disk,
        ge=0,
        description="Bytes beyond the image; 0: the host's choice; null: none.",
    )


class SpecBody(Body):
    """How a sandbox is made."""

    name: str
    image: str = Field(
        "host", description="'host', a directory, a tarball, an OCI layout, or an image imported before."
    )
    network: str = "off"
    limits: LimitsBody = LimitsBody()
    environment: dict[str, str] = Field(default_factory=dict)
    workdir: str = "/workspace"
    hostname: str = ""
    services: dict[str, str] = Field(
        default_factory=dict, description="Commands that a restore without processes starts again."
    )
    proxy_upstream: str = Field("", description="Base URL of the model API, for the network 'proxy'.")
    allow_less: bool = Field(False, description="What cannot be kept or brought back stops nothing.")
    proxy_key_file: str = Field("", description="File of the daemon's host that holds that API's key.")

    def spec(self) -> SandboxSpec:
        plain = self.model_dump()
        return SandboxSpec(**{**plain, "limits": Limits(**plain["limits"])})


AllowLess = Field(False, description="That something lacks is no error of kind 'less'; it is told.")


class TurnEnd(Body):
    request: str = ""
    urgent: bool = Field(False, description="Somebody waits for the checkpoint already.")


class CheckpointBody(Body):
    label: str = ""
    full: bool = Field(False, description="Dump the processes in any case.")
    pin: bool = Field(False, description="Never dropped by the retention.")
    allow_less: bool = AllowLess


class RestoreBody(Body):
    checkpoint: str = Field("", description="Id, or the beginning of one; empty: the newest.")
    allow_less: bool = AllowLess


class ForkBody(Body):
    checkpoint: str = Field(description="Id, the beginning of one, or a sandbox's name (its state now).")
    count: int = Field(1, ge=1, le=4096)
    names: list[str] | None = None
    allow_less: bool = AllowLess


class GcBody(Body):
    dry_run: bool = False


class VerifyBody(Body):
    what: str = Field("", description="A checkpoint's id, its beginning, or a sandbox; empty: all.")


class ExportBody(Body):
    checkpoint: str
    url: str = Field(description="A directory of the daemon's host, or a URL that fsspec knows.")
    allow_less: bool = AllowLess


class ImportBody(Body):
    url: str
    name: str
    key_file: str = Field("", description="File of the daemon's host that holds its model API's key.")
    allow_less: bool = AllowLess


class NoticeBody(Body):
    seconds: float = Field(gt=0, description="How long the machine will still be there.")


def host_routes(service: Service) -> APIRouter:
    """What concerns the host as a whole."""
    routes = APIRouter(prefix="/v1", tags=["host"])
    host, threads = service.host, service.threads

    @routes.get("/health", summary="The daemon that answers")
    async def health() -> wire.Health:
        return wire.Health(os.getpid(), str(service.home), __version__)

    @routes.get("/doctor", summary="What the host has or lacks, and what follows")
    async def doctor() -> list[Facility]:
        return await threads.call(service.doctor)

    @routes.post("/down", summary="End the daemon; sandboxes run on", status_code=202)
    async def down() -> None:
        service.stopping.set()

    @routes.post("/fork", summary="Start sandboxes from one checkpoint")
    async def fork(body: ForkBody) -> list[model.BoxInfo]:
        def work() -> list[model.BoxInfo]:
            made = host.fork(body.checkpoint, body.count, names=body.names, allow_less=body.allow_less)
            return [box.info() for box in made]

        return await threads.call(work)

    @routes.post("/gc", summary="Drop what nothing needs any more")
    async def gc(body: GcBody) -> model.GcReport:
        return await threads.call(lambda: host.gc(dry_run=body.dry_run))

    @routes.post("/verify", summary="Read checkpoints from the disk and check every byte")
    async def verify(body: VerifyBody) -> model.VerifyReport:
        return await threads.call(lambda: host.verify(body.what))

    @routes.post("/export", summary="Write a checkpoint, complete in itself, to a URL")
    async def export(body: ExportBody) -> Manifest:
        allow = body.allow_less
        return await threads.call(lambda: host.export(body.checkpoint, body.url, allow_less=allow))

    @routes.post("/import", summary="Make a sandbox from an exported checkpoint")
    async def import_(body: ImportBody) -> model.BoxInfo:
        allow = body.allow_less
        return await threads.call(
            lambda: host.import_(body.url, body.name, key_file=body.key_file, allow_less=allow).info()
        )

    @routes.post("/notice", summary="The machine will be taken: checkpoint all that runs")
    async def notice(body: NoticeBody) -> dict[str, model.Saved]:
        return await threads.call(lambda: host.notice(body.seconds))

    @routes.get("/events", summary="What happens, as lines of JSON, from now on")
    async def events() -> StreamingResponse:
        async def told() -> AsyncIterator[bytes]:
            queue = service.events.listen()
            try:
                while not service.stopping.is_set() and (event := await queue.get()) is not None:
                    yield wire.json_line(asdict(event))
            finally:
                service.events.leave(queue)

        return StreamingResponse(told(), media_type=LINES)

    @routes.post("/executions/{execution}/cancel", summary="Cancel a command")
    async def cancel(execution: str) -> None:
        service.executions.cancel(execution)

    return routes


def box_routes(service: Service) -> APIRouter:
    """What concerns one sandbox: its life, its commands and its turns."""
    routes = APIRouter(prefix="/v1/boxes", tags=["sandboxes"])
    host, threads, executions = service.host, service.threads, service.executions

    @routes.post("", summary="Make a sandbox", status_code=201)
    async def create(body: SpecBody) -> model.BoxInfo:
        spec = body.spec()
        if spec.name in await threads.call(service.names):
            sentence = (
                f"sandbox: {spec.name!r} exists already; 'windtunnel sandbox rm {spec.name}' removes it"
            )
            raise Refused("conflict", sentence)
        return await threads.call(lambda: host.create(spec).info())

    @routes.get("", summary="All sandboxes")
    async def boxes() -> list[model.BoxInfo]:
        return await threads.call(host.boxes)

    @routes.get("/{name}", summary="One sandbox")
    async def info(name: str) -> model.BoxInfo:
        return await service.look(name, lambda box: box.info())

    @routes.get("/{name}/spec", summary="How it was made")
    async def spec(name: str) -> SandboxSpec:
        return await service.look(name, lambda box: box.spec)

    @routes.delete("/{name}", summary="Kill and forget it")
    async def remove(name: str) -> None:
        await service.change(name, lambda box: host.remove(name), cancel=True)
        threads.forget(name)

    @routes.post("/{name}/stop", summary="Kill its processes; files and checkpoints stay")
    async def stop(name: str) -> None:
        await service.change(name, lambda box: box.stop(), cancel=True)

    @routes.get("/{name}/shells", summary="Names of its persistent shells")
    async def shells(name: str) -> list[str]:
        return await service.look(name, lambda box: box.shells())

    @routes.post("/{name}/exec", summary="Run a command")
    async def execute(name: str, body: Command, request: Request) -> StreamingResponse:
        execution = executions.start(await service.box(name), body)
        watcher = asyncio.create_task(_when_gone(request, execution, cancel=body.cancel_on_disconnect))
        answer = _watching(lines(execution), watcher)
        return StreamingResponse(answer, media_type=LINES)

    @routes.post("/{name}/turns/begin", summary="Wait until the last turn's checkpoint is safe")
    async def begin(name: str, timeout: float | None = Query(None, ge=0.0)) -> None:
        await service.change(name, lambda box: box.wait(timeout))

    @routes.post("/{name}/turns/end", summary="End the turn: classify it and start its checkpoint")
    async def end(name: str, body: TurnEnd) -> wire.TurnAnswer:
        pending = await service.change(name, lambda box: box.end_turn(body.request, urgent=body.urgent))
        return service.tickets.add(pending)

    @routes.get("/{name}/turns/{ticket}", summary="How the checkpoint of a turn stands")
    async def turn(
        name: str, ticket: str, timeout: float = Query(0.0, ge=0.0), promote: bool = False
    ) -> wire.TurnAnswer:
        pending = service.tickets.get(ticket)
        if promote:
            pending.promote()
        if not pending.done and timeout > 0:
            await _wait(service, pending, min(timeout, LONGEST_WAIT))
        return service.tickets.answer(ticket)

    return routes


def checkpoint_routes(service: Service) -> APIRouter:
    """What concerns the past of one sandbox."""
    routes = APIRouter(prefix="/v1/boxes", tags=["checkpoints"])

    @routes.post("/{name}/checkpoint", summary="A checkpoint of the state now")
    async def checkpoint(name: str, body: CheckpointBody) -> Manifest:
        return await service.change(
            name,
            lambda box: box.checkpoint(body.label, full=body.full, pin=body.pin, allow_less=body.allow_less),
        )

    @routes.post("/{name}/restore", summary="Bring a checkpoint back; what runs is killed")
    async def restore(name: str, body: RestoreBody) -> model.RestoreReport:
        return await service.change(
            name,
            lambda box: box.restore(body.checkpoint, allow_less=body.allow_less),
            cancel=True,
        )

    @routes.post("/{name}/rollback", summary="Go back to an earlier checkpoint")
    async def rollback(name: str, body: RestoreBody) -> model.RestoreReport:
        if not body.checkpoint:
            raise Refused("user", "rollback: which checkpoint is missing; 'log' lists them")
        return await service.change(
            name,
            lambda box: box.rollback(body.checkpoint, allow_less=body.allow_less),
            cancel=True,
        )

    @routes.get("/{name}/log", summary="Its checkpoints and turns")
    async def log(name: str) -> Log:
        def work(box: AnySandbox) -> Log:
            return replace(box.log(), tips={info.name: info.tip for info in service.host.boxes()})

        return await service.look(name, work)

    @routes.get("/{name}/diff", summary="What changed between two checkpoints, or since one")
    async def diff(name: str, older: str, newer: str = "") -> model.Diff:
        return await service.look(name, lambda box: box.diff(older, newer))

    return routes


async def _when_gone(request: Request, execution: Execution, *, cancel: bool) -> None:
    """When the client goes away, keep no output for it, and cancel the command if that is asked for."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    execution.leave()
    if cancel:
        execution.cancel.set()


async def _watching(answer: AsyncIterator[bytes], watcher: asyncio.Task[None]) -> AsyncIterator[bytes]:
    """``answer``; when it was read to its end, nobody needs to watch any more."""
    async for line in answer:
        yield line
    watcher.cancel()


async def _wait(service: Service, pending: PendingTurn, seconds: float) -> None:
    """Wait for a checkpoint; whether it came in time, or failed, is asked for afterwards."""

    def work() -> None:
        try:
            pending.wait(seconds)
        except Exception:  # its fault is raised when the answer is made
            return

    await service.threads.call(work)
