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
MOST_SERVICES = 3
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

    def __init__(self, random: Random, workdir: str, first_port: int) -> None:
        self.random = random
        self.w = workdir
        self.next_port = first_port
        self.serial = 0
        self.ask = f"python3 {workdir}/tools/ask.py"
        self.files = {path: list(lines) for path, lines in FIRST_FILES.items()}
        self.commits = 1
        self.cwd = workdir
        self.variables: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        self.pipefail = False
        self.services: dict[int, list[int]] = {}
        """Port to count and result."""
        self.program = 0
        """Number of the one that runs from a file of the sandbox; replaced: negative."""
        self.descriptors: dict[int, tuple[str, list[str]]] = {}
        """Descriptor to its file, and the lines written."""

    def new(self) -> int:
        self.serial += 1
        return self.serial

    def a_file(self) -> str:
        return self.random.choice(sorted(self.files))

    def a_service(self) -> int:
        return self.random.choice(sorted(self.services))


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


def _read(world: SessionState) -> Step:
    path = world.a_file()
    return Step(f"cat {world.w}/{path}", _text(world.files[path]))


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


def _compute(world: SessionState) -> Step:
    steps = world.random.randrange(1000, 20000)
    return Step(f"python3 -c 'print(sum(range({steps})))'", f"{sum(range(steps))}\n")


def _recall(world: SessionState) -> Step:
    """Tell a piece of the shell's state that an earlier turn left."""
    choices = [Step("pwd", world.cwd + "\n")]
    choices += [Step(f'echo "${{{name}}}"', value + "\n") for name, value in world.variables.items()]
    choices += [Step(f"{name} you", f"{word} you\n") for name, word in world.functions.items()]
    state = "on" if world.pipefail else "off"
    choices.append(Step("shopt -o pipefail", f"pipefail       \t{state}\n", 0 if world.pipefail else 1))
    return world.random.choice(choices)


def _peek(world: SessionState) -> Step | None:
    if not world.services:
        return None
    port = world.a_service()
    return Step(f"{world.ask} {port} /peek", f"{world.services[port][0]}\n", tags=("input",))


def _result(world: SessionState) -> Step | None:
    if not world.services:
        return None
    port = world.a_service()
    return Step(f"{world.ask} {port} /result", f"{world.services[port][1]}\n", tags=("input",))


def _cd(world: SessionState) -> Step:
    places = [world.w, f"{world.w}/src", f"{world.w}/docs", "/"]
    world.cwd = world.random.choice([place for place in places if place != world.cwd])
    return Step(f"cd {world.cwd}")


def _export(world: SessionState) -> Step:
    number = world.new()
    name = world.random.choice(["MODE", "LEVEL", "STAGE"])
    world.variables[name] = f"value {number}"
    return Step(f"export {name}='value {number}'")


def _function(world: SessionState) -> Step:
    number = world.new()
    name = world.random.choice(["greet", "call"])
    world.functions[name] = f"hello-{number}"
    return Step(f'{name}() {{ echo "hello-{number} $1"; }}')


def _option(world: SessionState) -> Step:
    world.pipefail = not world.pipefail
    return Step(f"set {'-o' if world.pipefail else '+o'} pipefail")


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
    return Step(f"rm {world.w}/{path}")


def _commit(world: SessionState) -> Step:
    number, path = world.new(), world.a_file()
    world.files[path].append(f"for commit {number}")
    world.commits += 1
    command = (
        f"echo 'for commit {number}' >> {world.w}/{path} && git -C {world.w} add -A && "
        f"git -C {world.w} commit -q -m 'change {number}' && git -C {world.w} rev-list --count HEAD"
    )
    return Step(command, f"{world.commits}\n")


def _serve(world: SessionState) -> Step | None:
    if len(world.services) >= MOST_SERVICES:
        return None
    port = world.next_port
    world.next_port += 1
    world.services[port] = [0, 1]
    command = (
        f"python3 {world.w}/tools/svc.py {port} </dev/null >/dev/null 2>&1 & "
        f"SVC_{port}=$!; {world.ask} {port} /peek"
    )
    return Step(command, "0\n")


def _add(world: SessionState) -> Step | None:
    if not world.services:
        return None
    port, number = world.a_service(), world.random.randrange(1, 100)
    world.services[port][0] += number
    return Step(f"{world.ask} {port} /add/{number}", f"{world.services[port][0]}\n")


def _silent_work(world: SessionState) -> Step | None:
    """The answer comes at once; the service computes on after the turn."""
    if not world.services:
        return None
    port, steps = world.a_service(), world.random.randrange(10_000, 200_000)
    value = world.services[port][1]
    for _ in range(steps):
        value = (value * 1103515245 + 12345) % 2**31
    world.services[port][1] = value
    return Step(f"{world.ask} {port} /work/{steps}", f"{steps}\n")


def _stop_service(world: SessionState) -> Step | None:
    if not world.services:
        return None
    port = world.a_service()
    del world.services[port]
    command = f'kill "$SVC_{port}"; wait "$SVC_{port}" 2>/dev/null; unset SVC_{port}; {world.ask} {port} gone'
    return Step(command, "gone\n")


def _open_descriptor(world: SessionState) -> Step | None:
    free = [fd for fd in range(FIRST_FD, LAST_FD + 1) if fd not in world.descriptors]
    if not free:
        return None
    path = f"logs/open{world.new()}.txt"
    world.descriptors[free[0]] = (path, [])
    return Step(f"exec {free[0]}>{world.w}/{path}")


def _write_at_offset(world: SessionState) -> Step | None:
    """The offset is the kernel's state: under an older image the next line would overwrite this one."""
    if not world.descriptors:
        return None
    fd = world.random.choice(sorted(world.descriptors))
    path, lines = world.descriptors[fd]
    lines.append(f"written {world.new()}")
    return Step(f"echo '{lines[-1]}' >&{fd}; cat {world.w}/{path}", _text(lines))


def _close_descriptor(world: SessionState) -> Step | None:
    if not world.descriptors:
        return None
    fd = world.random.choice(sorted(world.descriptors))
    del world.descriptors[fd]
    return Step(f"exec {fd}>&-")


def _run_program(world: SessionState) -> Step | None:
    if world.program:
        return None
    number = world.program = world.new()
    tool = f"{world.w}/bin/tool{number}"
    command = f'cp "$(command -v sleep)" {tool} && {{ {tool} 1000000 </dev/null >/dev/null 2>&1 & '
    # the child is the tool only once it has run exec; until then its command line is the shell's
    wait = f'until grep -q tool{number} "/proc/$TOOL_{number}/cmdline"; do :; done; echo running'
    return Step(f"{command}TOOL_{number}=$!; }}; {wait}", "running\n")


def _replace_program(world: SessionState) -> Step | None:
    """Another file takes the name of a program that runs: an image that maps it by name no longer fits.

    Once only: an image taken afterwards holds the old program itself, and fits whatever has its name.
    """
    if world.program <= 0:
        return None
    tool = f"{world.w}/bin/tool{world.program}"
    world.program = -world.program
    return Step(f"cp {tool} {tool}.new && printf x >> {tool}.new && mv {tool}.new {tool}")


RECIPES: dict[TurnClass, tuple[Recipe, ...]] = {
    # _recall counts twice, because it is what shows that shell state was lost
    TurnClass.NONE: (_read, _test, _temporary, _compute, _recall, _recall, _peek, _result),
    TurnClass.SHELL: (_cd, _export, _function, _option),
    TurnClass.FILES: (_write, _append, _edit, _remove, _commit),
    TurnClass.FULL: (
        *(_serve, _add, _silent_work, _stop_service, _open_descriptor, _write_at_offset, _close_descriptor),
        *(_run_program, _replace_program),
    ),
}
