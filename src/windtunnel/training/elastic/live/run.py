"""The trainer's loop: form the group of the newest generation, train in it, and come back when it fails.

    run(train)   # train(job) builds the model, restores it and trains; it is called again after each failure

1. The agent says who is in the job (a generation). The group forms, `train` is called.
2. A newer generation comes: the link's thread cuts the group, so that the program, wherever it is blocked,
   gets an exception or, at the next `Job.check`, `MembershipChanged`. Both unwind to here.
3. An operation fails because a peer is gone, and nothing newer is known: the group is cut at once, which
   brings out the neighbours that wait for *this* rank; the supervisor is told (`suspect`); the newer
   generation is waited for.
4. An exception of the program's own: the agent is told (`failed`), the process ends with status 1 (with 2
   for a `UserError`, with 3 for a `LessError`: another try would end alike, and the job ends). `sys.exit`
   with another status than 0 ends it with that one.
5. A program that does not come out of a group that was cut is killed: another process takes its place.
6. `train` returned in every rank (an agreement on the durable key "commit/end", so that a failure in the last
   step still brings everybody back): the result is reported and the process ends with status 0.

The process ends without running destructors: those of gloo hang or abort now and then. What the program has
registered to be done at its exit is done where it ended well.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from windtunnel.base.errors import LessError, UserError
from windtunnel.base.remote import RemoteLink
from windtunnel.linux.forkserver import finish
from windtunnel.training.elastic.live import exactness
from windtunnel.training.elastic.live.group import CuttableGroup
from windtunnel.training.elastic.live.job import Injector, Job, MembershipChanged, plain
from windtunnel.training.elastic.live.link import AgentLink
from windtunnel.training.elastic.live.store import MeetingStore
from windtunnel.training.elastic.policy.evidence import blames_peers
from windtunnel.training.elastic.policy.state import DURABLE
from windtunnel.training.elastic.spec import NAMES

T = TypeVar("T")
OPERATION = NAMES["operation"].default

LONGEST = 2000  # characters of a result that is told in words
END = f"{DURABLE}end"  # the key on which all ranks agree that training is over

# Where a ConnectionError or TimeoutError comes from that is about a peer: a program has its own, too.
_LIBRARIES = ("windtunnel.training.", "torch.distributed")


def run(train: Callable[[Job], T], *, backend: str | None = None, timeout: float | None = None) -> T:
    """Call ``train`` under supervision, again after every failure elsewhere; its result.

    Started by ``windtunnel train`` this call does not return: the result is reported to the supervisor, the
    process ends. Started by torchrun, or alone, ``train`` is called once, in a group made from the
    environment, and its result is returned.

    ``backend``: as for ``init_process_group`` ("nccl" where there is CUDA, else "gloo"). ``timeout`` (s):
    for every operation of the group and every agreement under supervision; what ``windtunnel train`` was
    given as ``--timeout`` where it is None.

    Raises:
        UserError: there is a process group already.
    """
    if dist.is_initialized():
        raise UserError("elastic.run: a process group exists; accepted: none, since run makes it")
    exactness.settle()
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    address = os.environ.get("WINDTUNNEL_AGENT")
    if not address:
        return _once(train, backend, timeout or OPERATION)
    _supervised(train, backend, timeout, address)


def _once(train: Callable[[Job], T], backend: str, timeout: float) -> T:
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if world > 1 or "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # so that DDP and its like work in a process alone, too
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    place = int(os.environ.get("GROUP_RANK", "0"))
    job = Job(rank, world, local_rank, timeout=timeout, process_state={}, place=place)
    result = train(job)
    job.ending()
    if dist.is_initialized():  # a script may have ended it itself, as it had to before
        # Else a thread of gloo may still hold a tensor when the interpreter goes, which aborts the process.
        dist.barrier()
        dist.destroy_process_group()
    return result


def _supervised(train: Callable[[Job], Any], backend: str, timeout: float | None, address: str) -> NoReturn:
    link, to_store = AgentLink(address, _agent_gone), RemoteLink(address)
    timeout = timeout or link.config["operation"]
    injector = Injector(link.faults, Path(os.environ["WINDTUNNEL_RUN"]), link)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    process_state: dict[str, Any] = {}
    first = link.membership.generation
    # What is there now stays for the life of the process. Collecting garbage after a failure then looks only
    # at what training made: some ms in place of some 100.
    gc.collect()
    gc.freeze()
    while True:
        membership, place = link.newest()
        if place is None or (membership.restart_all and membership.generation > first):
            _end(0)
        rank = place * membership.per_host + local_rank
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(membership.world), GROUP_RANK=str(place))
        job = Job(
            rank,
            membership.world,
            local_rank,
            timeout=timeout,
            process_state=process_state,
            place=place,
            membership=membership,
            link=link,
            injector=injector,
        )
        job.event("arrived")
        group = CuttableGroup(backend, timeout)
        link.watch(membership.generation, group.cut, functools.partial(_stuck, link))
        try:
            limit = timedelta(seconds=timeout)
            group.form(membership, rank, MeetingStore(to_store, membership.generation, limit))
            job.event("grouped")
            job.at("regrouped")
            result = _returned(train, job)
            job.ending()
            _all_ended(job, link.config["finish"])
        except BaseException as error:
            _after(error, link, group, membership.generation)
        else:
            link.call("done", _reported(result))
            finish(0)


def _returned(train: Callable[[Job], T], job: Job) -> T | None:
    try:
        return train(job)
    except SystemExit as end:
        if end.code:
            raise
        return None  # a program that ends well has returned


def _all_ended(job: Job, within: float) -> None:
    """One rank may evaluate and save for long after the last step, and the others nothing."""
    try:
        job.agree(END, timeout=within)
    except MembershipChanged:
        if job.decided(END) is None:  # else all ranks had ended before the failure
            raise


def _after(error: BaseException, link: AgentLink, group: CuttableGroup, generation: int) -> None:
    """Come out of the failed generation; returns once a newer one is known, or ends the process."""
    group.cut()
    text = _traceback_of(error)
    if not isinstance(error, MembershipChanged) and not link.newer(generation):
        if isinstance(error, SystemExit):  # as the interpreter does; what argparse printed says why
            if not isinstance(error.code, int):
                sys.stderr.write(f"{error.code}\n")
            _end(error.code & 0xFF if isinstance(error.code, int) else 1)
        if isinstance(error, UserError):
            _failed(link, f"{error}\n", status=2)
        if isinstance(error, LessError):
            _failed(link, f"{error}\n", status=LessError.status)
        if not of_peers(error):
            _failed(link, text)
        link.call("suspect", generation, text[-2000:])
    group.leave(error)
    if not link.newer(generation, link.config["generation"]):
        _failed(link, text)


def of_peers(error: BaseException) -> bool:
    """Whether ``error``, or one that it came from, says that a peer or the store is gone or silent."""
    cause: BaseException | None = error
    while cause is not None:
        words = " ".join(str(cause).split())
        if isinstance(cause, RuntimeError) and blames_peers(f"{_family(cause)}: {words}"):
            return True
        if isinstance(cause, (ConnectionError, TimeoutError)) and _raised_in(cause).startswith(_LIBRARIES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _family(error: RuntimeError) -> str:
    """The name that torch gave an error, or that of all its kind: a program may have kinds of its own."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] == "torch"]
    return kinds[0].__name__ if kinds else "RuntimeError"


def _raised_in(error: BaseException) -> str:
    """The name of the module that raised ``error``."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return str(at.tb_frame.f_globals.get("__name__", "")) if at is not None else ""


def _traceback_of(error: BaseException) -> str:
    """The traceback, from the program's own first frame on."""
    at = error.__traceback__
    if at is not None and at.tb_next is not None and at.tb_frame.f_code.co_filename == __file__:
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at))


def _reported(result: Any) -> Any:
    try:
        return plain("the result", result)
    except TypeError:
        return repr(result)[:LONGEST]


def _failed(link: AgentLink, text: str, status: int = 1) -> NoReturn:
    sys.stderr.write(text)
    link.call("failed", text, status == LessError.status)
    _end(status)


def _agent_gone(reason: str) -> NoReturn:
    sys.stderr.write(f"the agent is gone ({reason}); this process ends\n")
    _end(1)


def _stuck(link: AgentLink) -> None:
    text = "the program did not come out of a group that was cut; its process ends, another takes its place"
    link.event("note", link.membership.generation - 1, text=text)
    link.call("failed", text)
    sys.stderr.write(f"{text}\n")
    for thread, frame in sys._current_frames().items():
        if thread == threading.main_thread().ident:
            sys.stderr.write("".join(traceback.format_stack(frame)))
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # not a failure of its own, so not by a status


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
