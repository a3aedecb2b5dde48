"""The turns that a generated session is made of, each with what it prints and what it changes in the model.

A recipe reads the model, changes it, and returns the turn; it returns None where the model does not allow it
(no service to ask, nothing to remove). For each class one recipe is always possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from windtunnel.agents.sandbox.model import TurnClass

FOLDERS = ("src", "docs", "logs", "bin")
FIRST_FILES = {
    "src/alpha.txt": ("alpha 1", "alpha 2", "alpha 3"),
    "src/beta.txt": ("beta 1", "beta 2"),
    "docs/notes.txt": ("notes 1",),
}
MOST_PROCESSES = 4
"""More services and jobs than this are not started; one is stopped instead."""
FIRST_FD, LAST_FD = 7, 9


@dataclass(frozen=True)
class Step:
    """A turn: its command, what it prints, how it ends."""

    command: str
    stdout: str = ""
    exit_code: int = 0
    tags: tuple[str, ...] = ()


class SessionState:
    """What the session's sandbox holds, as far as recipes care."""

    def __init__(self, random: Random, workdir: str, first_port: int, ballast: int) -> None:
        self.random = random
        self.w = workdir
        self.ballast = ballast
        self.next_port = first_port
        self.serial = 0
        self.ask = f"python3 {workdir}/tools/ask.py"
        # files: relative path to lines; those held by a descriptor or a job are in ``held``
        self.files = {path: list(lines) for path, lines in FIRST_FILES.items()}
        self.executable: set[str] = set()
        self.held: dict[str, list[str]] = {}
        self.folders = list(FOLDERS)
        self.commits = 1
        # shell
        self.cwd = workdir
        self.variables: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self.pipefail = False
        self.umask = ""
        # processes: port to count and result; job number to file; tool number to name
        self.services: dict[int, list[int]] = {}
        self.jobs: dict[int, str] = {}
        self.mapped: list[int] = []
        self.replaced: set[int] = set()
        self.fds: dict[int, tuple[str, bool]] = {}
        """Descriptor to its file and whether it appends."""

    def new(self) -> int:
        self.serial += 1
        return self.serial

    def a_file(self) -> str:
        return self.random.choice(sorted(self.files))

    def running(self) -> int:
        return len(self.services) + len(self.jobs) + len(self.mapped)


Recipe = Callable[[SessionState], Step | None]


def draw(world: SessionState, turn_class: TurnClass) -> Step:
    """A turn of that class that the world allows."""
    possible = list(RECIPES[turn_class])
    while True:
        recipe = world.random.choice(possible)
        step = recipe(world)
        if step is not None:
            tag = recipe.__name__.removeprefix("_").replace("_", "-")
            return Step(step.command, step.stdout, step.exit_code, (*step.tags, tag))
        possible.remove(recipe)


def _text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


# none -------------------------------------------------------------------------------------------------------


def _read(world: SessionState) -> Step:
    path = world.a_file()
    return Step(f"cat {world.w}/{path}", _text(world.files[path]))


def _count(world: SessionState) -> Step:
    path = world.a_file()
    return Step(f"wc -l < {world.w}/{path}", f"{len(world.files[path])}\n")


def _grep(world: SessionState) -> Step:
    path = world.a_file()
    found = [f"{number}:{line}\n" for number, line in enumerate(world.files[path], 1) if "2" in line]
    return Step(f"grep -n 2 {world.w}/{path}", "".join(found), 0 if found else 1)


def _test(world: SessionState) -> Step:
    inside = [lines for path, lines in world.files.items() if path.startswith("src/")]
    total = sum(len(lines) for lines in inside)
    return Step(f"python3 {world.w}/tools/check.py {world.w}/src", f"ok {len(inside)} files, {total} lines\n")


def _temporary(world: SessionState) -> Step:
    path = world.a_file()
    command = (
        f'temp=$(mktemp) && sort -r {world.w}/{path} > "$temp" && sed -n 1p "$temp"; rm "$temp"; unset temp'
    )
    return Step(command, max(world.files[path]) + "\n")


def _failing(world: SessionState) -> Step:
    return Step(f"test -e {world.w}/absent", "", 1)


def _compute(world: SessionState) -> Step:
    steps = world.random.randrange(1000, 20000)
    return Step(f"python3 -c 'print(sum(range({steps})))'", f"{sum(range(steps))}\n")


def _subshell(world: SessionState) -> Step:
    return Step("(cd / && unset PATH && lost=1 && pwd)", "/\n")


def _history(world: SessionState) -> Step:
    return Step(f"git -C {world.w} rev-list --count HEAD", f"{world.commits}\n")


def _recall(world: SessionState) -> Step:
    """Tell a piece of the shell's state that an earlier turn left."""
    told = [Step("pwd", world.cwd + "\n")]
    told += [Step(f'echo "${{{name}}}"', value + "\n") for name, value in world.variables.items()]
    told += [Step(f"{name} you", f"{word} you\n") for name, word in world.functions.items()]
    told += [Step(f"alias {name}", f"alias {name}='{word}'\n") for name, word in world.aliases.items()]
    state = "on" if world.pipefail else "off"
    told.append(Step("shopt -o pipefail", f"pipefail       \t{state}\n", 0 if world.pipefail else 1))
    if world.umask:
        told.append(Step("umask", world.umask + "\n"))
    return world.random.choice(told)


def _peek(world: SessionState) -> Step | None:
    if not world.services:
        return None
    port = world.random.choice(sorted(world.services))
    return Step(f"{world.ask} {port} /peek", f"{world.services[port][0]}\n", tags=("input",))


def _result(world: SessionState) -> Step | None:
    if not world.services:
        return None
    port = world.random.choice(sorted(world.services))
    return Step(f"{world.ask} {port} /result", f"{world.services[port][1]}\n", tags=("input",))


# shell ------------------------------------------------------------------------------------------------------


def _cd(world: SessionState) -> Step:
    places = [world.w, f"{world.w}/src", f"{world.w}/docs", "/"]
    world.cwd = world.random.choice([place for place in places if place != world.cwd])
    return Step(f"cd {world.cwd}")


def _export(world: SessionState) -> Step:
    number = world.new()
    name = world.random.choice(["MODE", "LEVEL", "STAGE"])
    world.variables[name] = f"value {number}"
    return Step(f"export {name}='value {number}'")


def _assign(world: SessionState) -> Step:
    number = world.new()
    world.variables["plain"] = f"plain {number}"
    return Step(f"plain='plain {number}'")


def _function(world: SessionState) -> Step:
    number = world.new()
    name = world.random.choice(["greet", "call"])
    world.functions[name] = f"hello-{number}"
    return Step(f'{name}() {{ echo "hello-{number} $1"; }}')


def _alias(world: SessionState) -> Step:
    number = world.new()
    world.aliases["short"] = f"echo {number}"
    return Step(f"alias short='echo {number}'")


def _option(world: SessionState) -> Step:
    world.pipefail = not world.pipefail
    return Step(f"set {'-o' if world.pipefail else '+o'} pipefail")


def _umask(world: SessionState) -> Step:
    # 0022 is not among them: it may be what the shell started with, and then nothing would change
    world.umask = world.random.choice([mask for mask in ("0027", "0037", "0077") if mask != world.umask])
    return Step(f"umask {world.umask}")


def _unset(world: SessionState) -> Step | None:
    if world.functions and world.random.random() < 0.5:
        name = world.random.choice(sorted(world.functions))
        del world.functions[name]
        return Step(f"unset -f {name}")
    if not world.variables:
        return None
    name = world.random.choice(sorted(world.variables))
    del world.variables[name]
    return Step(f"unset {name}")


# files ------------------------------------------------------------------------------------------------------


def _write(world: SessionState) -> Step:
    number = world.new()
    path = f"{world.random.choice(['src', 'docs'])}/made{number}.txt"
    world.files[path] = [f"made {number}", "line 2"]
    return Step(f"printf 'made {number}\\nline 2\\n' > {world.w}/{path}")


def _append(world: SessionState) -> Step:
    number, path = world.new(), world.a_file()
    world.files[path].append(f"more {number}")
    return Step(f"echo 'more {number}' >> {world.w}/{path}")


def _edit(world: SessionState) -> Step:
    number, path = world.new(), world.a_file()
    place = world.random.randrange(len(world.files[path]))
    world.files[path][place] = f"edited {number}"
    return Step(f"sed -i '{place + 1}s/.*/edited {number}/' {world.w}/{path} && echo edited", "edited\n")


def _remove(world: SessionState) -> Step | None:
    if len(world.files) < 3:
        return None
    path = world.a_file()
    del world.files[path]
    world.executable.discard(path)
    return Step(f"rm {world.w}/{path}")


def _rename(world: SessionState) -> Step:
    number, path = world.new(), world.a_file()
    other = f"{path.split('/')[0]}/moved{number}.txt"
    world.files[other] = world.files.pop(path)
    if path in world.executable:
        world.executable = (world.executable - {path}) | {other}
    return Step(f"mv {world.w}/{path} {world.w}/{other}")


def _mkdir(world: SessionState) -> Step:
    return Step(f"mkdir -p {world.w}/build/part{world.new()}/deep")


def _chmod(world: SessionState) -> Step:
    path = world.a_file()
    world.executable ^= {path}
    return Step(f"chmod u{'+' if path in world.executable else '-'}x {world.w}/{path}")


def _symlink(world: SessionState) -> Step:
    return Step(f"ln -s ../{world.a_file()} {world.w}/docs/link{world.new()}")


def _binary(world: SessionState) -> Step:
    number = world.new()
    length = world.random.randrange(1, 64)
    command = f"""python3 -c 'open("{world.w}/bin/data{number}", "wb").write(bytes(range(256)) * {length})'"""
    return Step(f"{command}; wc -c < {world.w}/bin/data{number}", f"{256 * length}\n")


def _commit(world: SessionState) -> Step:
    number, path = world.new(), world.a_file()
    world.files[path].append(f"for commit {number}")
    world.commits += 1
    command = (
        f"echo 'for commit {number}' >> {world.w}/{path} && git -C {world.w} add -A && "
        f"git -C {world.w} commit -q -m 'change {number}' && git -C {world.w} rev-list --count HEAD"
    )
    return Step(command, f"{world.commits}\n")


def _append_by_descriptor(world: SessionState) -> Step | None:
    """The descriptor appends, so where the older image has it does not matter."""
    return _by_descriptor(world, appends=True)


def _by_descriptor(world: SessionState, *, appends: bool) -> Step | None:
    fds = [fd for fd, (_, kind) in sorted(world.fds.items()) if kind is appends]
    if not fds:
        return None
    fd = world.random.choice(fds)
    path, number = world.fds[fd][0], world.new()
    world.held[path].append(f"written {number}")
    return Step(f"echo 'written {number}' >&{fd}; cat {world.w}/{path}", _text(world.held[path]))


# full -------------------------------------------------------------------------------------------------------


def _serve(world: SessionState) -> Step | None:
    if world.running() >= MOST_PROCESSES:
        return None
    port = world.next_port
    world.next_port += 1
    world.services[port] = [0, 1]
    size = f" {world.ballast}" if world.ballast else ""
    command = (
        f"python3 {world.w}/tools/svc.py {port}{size} </dev/null >/dev/null 2>&1 & "
        f"SVC_{port}=$!; {world.ask} {port} /peek"
    )
    return Step(command, "0\n")


def _add(world: SessionState) -> Step | None:
    if not world.services:
        return None
    port, number = world.random.choice(sorted(world.services)), world.random.randrange(1, 100)
    world.services[port][0] += number
    return Step(f"{world.ask} {port} /add/{number}", f"{world.services[port][0]}\n")


def _silent_work(world: SessionState) -> Step | None:
    """The answer comes at once; the service computes on after the turn."""
    if not world.services:
        return None
    port, steps = world.random.choice(sorted(world.services)), world.random.randrange(10_000, 200_000)
    value = world.services[port][1]
    for _ in range(steps):
        value = (value * 1103515245 + 12345) % 2**31
    world.services[port][1] = value
    return Step(f"{world.ask} {port} /work/{steps}", f"{steps}\n")


def _stop_service(world: SessionState) -> Step | None:
    if not world.services:
        return None
    port = world.random.choice(sorted(world.services))
    del world.services[port]
    command = f'kill "$SVC_{port}"; wait "$SVC_{port}" 2>/dev/null; unset SVC_{port}; {world.ask} {port} gone'
    return Step(command, "gone\n")


def _start_job(world: SessionState) -> Step | None:
    if world.running() >= MOST_PROCESSES:
        return None
    number = world.new()
    path = f"logs/job{number}.txt"
    world.jobs[number] = path
    command = (
        f"python3 {world.w}/tools/job.py {world.w}/{path} </dev/null >/dev/null 2>&1 & JOB_{number}=$!; "
        f"{world.ask} lines {world.w}/{path} 3"
    )
    return Step(command, "3\n")


def _stop_job(world: SessionState) -> Step | None:
    if not world.jobs:
        return None
    number = world.random.choice(sorted(world.jobs))
    path = world.jobs.pop(number)
    command = f'kill "$JOB_{number}"; wait "$JOB_{number}" 2>/dev/null; unset JOB_{number}'
    return Step(f"{command}; cat {world.w}/{path}", "step 1\nstep 2\nstep 3\n")


def _open_descriptor(world: SessionState) -> Step | None:
    free = [fd for fd in range(FIRST_FD, LAST_FD + 1) if fd not in world.fds]
    if not free:
        return None
    number, fd, appends = world.new(), free[0], world.random.random() < 0.5
    path = f"logs/open{number}.txt"
    world.fds[fd] = (path, appends)
    world.held[path] = []
    return Step(f"exec {fd}{'>>' if appends else '>'}{world.w}/{path}")


def _write_at_offset(world: SessionState) -> Step | None:
    """The offset is the kernel's state: under an older image the next line would overwrite this one."""
    return _by_descriptor(world, appends=False)


def _close_descriptor(world: SessionState) -> Step | None:
    if not world.fds:
        return None
    fd = world.random.choice(sorted(world.fds))
    del world.fds[fd]
    return Step(f"exec {fd}>&-")


def _run_program(world: SessionState) -> Step | None:
    if world.running() >= MOST_PROCESSES:
        return None
    number = world.new()
    world.mapped.append(number)
    tool = f"{world.w}/bin/tool{number}"
    command = f'cp "$(command -v sleep)" {tool} && {{ {tool} 1000000 </dev/null >/dev/null 2>&1 & '
    # the child is the tool only once it has run exec; until then its command line is the shell's
    wait = f'until grep -q tool{number} "/proc/$TOOL_{number}/cmdline"; do :; done; echo running'
    return Step(f"{command}TOOL_{number}=$!; }}; {wait}", "running\n")


def _replace_program(world: SessionState) -> Step | None:
    """Another file takes the name of a program that runs: an image that maps it by name no longer fits.

    Once only: an image taken afterwards holds the old program itself, and fits whatever has its name.
    """
    whole = [number for number in world.mapped if number not in world.replaced]
    if not whole:
        return None
    number = world.random.choice(whole)
    world.replaced.add(number)
    tool = f"{world.w}/bin/tool{number}"
    return Step(f"cp {tool} {tool}.new && printf x >> {tool}.new && mv {tool}.new {tool}")


def _stop_program(world: SessionState) -> Step | None:
    if not world.mapped:
        return None
    number = world.mapped.pop(world.random.randrange(len(world.mapped)))
    command = f'kill "$TOOL_{number}"; wait "$TOOL_{number}" 2>/dev/null; unset TOOL_{number}; echo stopped'
    return Step(command, "stopped\n")


RECIPES: dict[TurnClass, tuple[Recipe, ...]] = {
    TurnClass.NONE: (
        *(_read, _count, _grep, _test, _temporary, _failing, _compute, _subshell, _history),
        *(_recall, _recall, _peek, _result),
    ),
    TurnClass.SHELL: (_cd, _export, _assign, _function, _alias, _option, _umask, _unset),
    TurnClass.FILES: (
        *(_write, _append, _edit, _remove, _rename, _mkdir, _chmod, _symlink, _binary, _commit),
        _append_by_descriptor,
    ),
    TurnClass.FULL: (
        *(_serve, _add, _silent_work, _stop_service, _start_job, _stop_job, _open_descriptor),
        *(_write_at_offset, _close_descriptor, _run_program, _replace_program, _stop_program),
    ),
}
"""Recipes by class; ``_recall`` counts twice, because it is what shows that shell state was lost."""
