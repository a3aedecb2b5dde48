"""What a program makes of the number of its rank, read from its source.

Starting at the places that were seen to ask for the rank (`windtunnel.training.emulate.live.machine`), what
is computed from the answers is followed by name through the user's own files, and wherever it decides
something (a test, a comparison, a loop, an index, an argument of a collective or of a new tensor) there is a
`Condition`. An expression of answers and constants is written out, so that the policy can work it out for
every rank. Where more enters, such as a file's existence or a table that is read, the condition is involved:
all answers that enter may matter.

What goes into PyTorch's functions other than those is taken to matter only there, such as the rank that a
sampler or a random seed is given; what comes out of anybody else's depends on all that went in.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.training.emulate.graph import Place
from windtunnel.training.emulate.live.scopes import NameValue, ProgramNames, Scope, called
from windtunnel.training.emulate.policy import Condition, RankSource

KEEPING = frozenset((
    "abs", "all", "any", "bool", "divmod", "enumerate", "filter", "float", "format", "frozenset", "hash",
    "int", "iter", "len", "list", "map", "max", "min", "next", "ord", "pow", "range", "repr", "reversed",
    "round", "set", "sorted", "str", "sum", "tuple", "zip",
))  # fmt: skip
"""Functions whose result is a matter of their arguments and nothing else."""
PLACED = frozenset((
    "to", "cuda", "device", "set_device", "set_epoch", "print", "log", "debug", "info", "warning", "error",
))  # fmt: skip
"""Functions that take a rank for a place or a remark, and give nothing back that depends on it."""
SEEDED = {"random": ("seed",), "np": ("seed",), "numpy": ("seed",)}
"""Modules with a state of their own that a function sets."""
MET = frozenset((
    "send", "recv", "isend", "irecv", "P2POp", "broadcast", "reduce", "gather", "scatter", "all_reduce",
    "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "barrier", "new_group", "empty", "ones", "zeros", "full", "rand", "randn", "randint",
    "arange", "linspace", "narrow", "split", "chunk", "expand", "repeat", "view", "reshape",
))  # fmt: skip
"""Functions whose arguments other ranks have to match."""
PLACING = ("device", "group", "process_group", "generator", "dtype")
"""Arguments of these that say where, not what."""
BYTES = 4 << 20
"""Of source that is read; a program that is larger is taken not to be understood."""

Atom = tuple[str, tuple[int, ...]]
"""An expression of ``s0``, ``s1``… and the sources that these are."""


@dataclass(frozen=True)
class RankExpression:
    """An expression of the answers alone. Of several it is one at a time: a place in a loop over meshes is
    told something of each."""

    atoms: tuple[Atom, ...]


@dataclass(frozen=True)
class Mixed:
    """Something that these, and things unknown, enter."""

    atoms: frozenset[Atom]


Found = RankExpression | Mixed | None
"""None: it does not depend on the rank."""


def conditions(
    answers: Mapping[Place, Mapping[int, list[int]]], files: Iterable[str], world_size: int,
    devices_per_host: int,
) -> tuple[tuple[Condition, ...], tuple[RankSource, ...]]:  # fmt: skip
    """The conditions on the rank in the user's ``files``. ``answers``: of each place, to each rank."""
    files = tuple(dict.fromkeys((*files, *sorted(place.file for place in answers))))
    names, read = _names(tuple(_texts(files)))
    reader = _AnswerReader(answers, world_size, devices_per_host, names)
    result = reader.read()
    unread = sorted({place.file for place in answers} - read)
    if unread or (answers and len(read) < len(files)):
        result.append(Condition(f"source of {os.path.basename(unread[0] if unread else files[0])} not read"))
    return tuple(result), tuple(reader.sources)


def _texts(files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            yield file, Path(file).read_bytes()


@functools.lru_cache(maxsize=1)
def _names(texts: tuple[tuple[str, bytes], ...]) -> tuple[ProgramNames, frozenset[str]]:
    """The names of a program, and the files that could be read. By the texts: a path may hold another program
    at the next run."""
    names, trees = ProgramNames(), {}
    if sum(len(text) for _, text in texts) > BYTES:
        return names, frozenset()
    for file, text in texts:
        with contextlib.suppress(SyntaxError, ValueError):
            trees[file] = ast.parse(text)
    for file, tree in trees.items():
        names.read(tree, file)
    names.bind_calls()
    return names, frozenset(trees)


@dataclass
class _AnswerReader:
    answers: Mapping[Place, Mapping[int, list[int]]]
    world_size: int
    devices_per_host: int
    names: ProgramNames
    sources: list[RankSource] = field(default_factory=list)
    _rows: dict[Place, tuple[int, ...]] = field(default_factory=dict)
    _followed: dict[ast.expr, Found] = field(default_factory=dict)
    _open: set[ast.expr] = field(default_factory=set)

    def read(self) -> list[Condition]:
        """The conditions, in the order of the source."""
        for place, answers in self.answers.items():
            self._rows[place] = self._sources(place, answers)
        sites: dict[tuple[str, tuple[int, ...], bool], str] = {}
        for node, scope in self.names.scope_of.items():
            for decides, is_test in _deciding(node):
                site = f"{os.path.basename(scope.file)}:{decides.lineno}"
                if self._answers(decides, scope):
                    continue  # os.environ["RANK"] looks nothing up in a table of the program's
                what = self.follow(decides, scope)
                if isinstance(what, RankExpression):
                    for text, sources in what.atoms:
                        text = f"bool({text})" if is_test else text
                        sites.setdefault((text, sources, is_test is None), site)
                elif isinstance(what, Mixed):
                    for text, sources in sorted(what.atoms):
                        sites.setdefault((text, sources, True), site)
        return [
            Condition(site, _renumbered(text, sources), sources, involved)
            for (text, sources, involved), site in sites.items()
        ]

    def _sources(self, place: Place, by_rank: Mapping[int, list[int]]) -> tuple[int, ...]:
        """A source for each time the place was passed: a loop over meshes asks for several."""
        times = max(1, *(len(answers) for answers in by_rank.values()))
        rows: dict[int, None] = {}
        site = f"{os.path.basename(place.file)}:{place.line}"
        for turn in range(times):
            values = {rank: answers[turn] for rank, answers in by_rank.items() if turn < len(answers)}
            same = next((row for row, source in enumerate(self.sources) if source.values == values), None)
            if same is None:
                same = len(self.sources)
                self.sources.append(RankSource(site, values))
            rows[same] = None
        return tuple(rows)

    def _answers(self, node: ast.expr, scope: Scope) -> tuple[int, ...]:
        """The sources that the expression asks, if any. What is told no number is the coordinate in a mesh,
        for which the dispatcher of DTensor asks as well, below any operator of the user's."""
        rows = self._rows.get(_place(node, scope), ())
        has_values = any(self.sources[row].values for row in rows)
        return rows if has_values or (isinstance(node, ast.Call) and called(node) == "get_coordinate") else ()

    def follow(self, node: ast.expr, scope: Scope) -> Found:
        """What of the rank enters an expression."""
        if node in self._followed:
            return self._followed[node]
        if node in self._open:
            return None  # it is computed from itself, and from what else there is
        self._open.add(node)
        try:
            sources = self._followed[node] = self._follow(node, scope)
        finally:
            self._open.discard(node)
        return sources

    def _follow(self, node: ast.expr, scope: Scope) -> Found:
        if rows := self._answers(node, scope):
            return self._answer(node, rows)
        match node:
            case ast.Name(id=name):
                return self._of_values(self.names.look_up(name, scope))
            case ast.Attribute(value=base, attr=name):
                return self._of_values(self.names.attributes.get(f".{name}", [])) or _mixed(
                    [self.follow(base, scope)]
                )
            case ast.Subscript(slice=ast.Constant(value=str(key))) if f"[{key}]" in self.names.attributes:
                return self._of_values(self.names.attributes[f"[{key}]"])
            case ast.Call():
                return self._call(node, scope)
            case ast.Lambda() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return None
        parts = [self.follow(part, scope) for part in _parts(node)]
        if not any(parts):
            return None
        return self._written(node, scope) or _mixed(parts)

    def _answer(self, node: ast.expr, rows: tuple[int, ...]) -> Found:
        if not all(self.sources[row].values for row in rows):
            return Mixed(frozenset((f"s{row}", (row,)) for row in rows))
        text = "s{}" if isinstance(node, ast.Call) and called(node) not in ("get", "getenv") else "str(s{})"
        return RankExpression(tuple((text.format(row), (row,)) for row in rows))

    def _of_values(self, name_values: list[NameValue]) -> Found:
        """What enters a name: where one thing that it gets is of the rank and the others are constants, that
        one (the others are for a world of one rank)."""
        pairs = [(argument, self._of_value(argument)) for argument in name_values]
        of_rank = [what for _, what in pairs if what is not None]
        if len(of_rank) == 1 and all(
            what is not None or self._constant(argument.value, argument.scope) for argument, what in pairs
        ):
            return of_rank[0]
        return of_rank[0] if len(set(of_rank)) == 1 and len(of_rank) == len(pairs) else _mixed(of_rank)

    def _of_value(self, name_value: NameValue) -> Found:
        value, scope, part = name_value.value, name_value.scope, name_value.part
        if part is None:
            return self.follow(value, scope)
        if isinstance(value, ast.Call) and part >= 0:
            returns = [
                (returned, inner)
                for function, inner in self.names.functions.get(called(value), ())
                for returned in self.names.returned(function)
            ]
            if len(returns) == 1:
                value, scope = returns[0]
        if isinstance(value, ast.Tuple | ast.List) and 0 <= part < len(value.elts):
            return self.follow(value.elts[part], scope)
        return _mixed([self.follow(value, scope)])

    def _call(self, call: ast.Call, scope: Scope) -> Found:
        name = called(call)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        own = self.names.functions.get(name, ())
        if own:
            returned = [self.follow(o, inner) for f, inner in own for o in self.names.returned(f)]
            return returned[0] if len(returned) == 1 else _mixed(returned)
        if name in self.names.classes:
            return None  # what it is given is followed by the names of its attributes
        expressions = [self.follow(argument, scope) for argument in arguments]
        base = None
        if isinstance(call.func, ast.Attribute):
            base = self.follow(call.func.value, scope)
            if base is None and isinstance(call.func.value, ast.Name):
                base = self._seeded(call.func.value.id)
        if name in PLACED or self.names.module_of(call).split(".")[0] == "torch":
            return _mixed([base])
        if not any((*expressions, base)):
            return None
        return self._written(call, scope) or _mixed([*expressions, base])

    def _seeded(self, module: str) -> Found:
        """What a module's own state depends on: ``random.seed(rank)``."""
        parts = []
        for node, scope in self.names.scope_of.items():
            if isinstance(node, ast.Call) and called(node) in SEEDED.get(module, ()):
                parts += [self.follow(argument, scope) for argument in node.args]
        return _mixed(parts)

    def _written(self, node: ast.expr, scope: Scope) -> Found:
        """The expression with all names written out, once for each turn where something in it has several;
        None where something is not known."""
        atoms: dict[Atom, None] = {}
        turn, turns = 0, 1
        while turn < turns:
            written = _AnswerWriter(self, scope, turn)
            try:
                text = ast.unparse(ast.fix_missing_locations(written.write(node)))
            except _Unknown:
                return None
            if len(written.turns) > 1:
                return None  # which of one goes with which of the other is not known
            atoms[text, tuple(sorted(written.sources))] = None
            turn, turns = turn + 1, max(written.turns, default=1)
        return RankExpression(tuple(atoms))

    def _constant(self, node: ast.expr, scope: Scope) -> bool:
        return self.follow(node, scope) is None and self._written(node, scope) is not None

    def constant(self, node: ast.expr, scope: Scope) -> ast.expr | None:
        """Another expression that a name or call has been given once and for all."""
        match node:
            case ast.Name(id=name):
                name_values = self.names.look_up(name, scope)
                if len(name_values) == 1 and name_values[0].part is None:
                    written = self._written(name_values[0].value, name_values[0].scope)
                    if isinstance(written, RankExpression) and len(written.atoms) == 1:
                        return ast.parse(written.atoms[0][0], mode="eval").body
            case ast.Call(args=[], keywords=[]) if called(node) in ("get_world_size", "device_count"):
                return ast.Constant(
                    self.world_size if called(node) == "get_world_size" else self.devices_per_host
                )
            case (
                ast.Subscript(slice=ast.Constant(value=str(key)))
                | ast.Call(args=[ast.Constant(value=str(key)), *_])
            ):
                sizes = {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.devices_per_host}
                if key in sizes and "environ" in ast.unparse(node):
                    return ast.Constant(str(sizes[key]))
        return None


class _Unknown(Exception):
    pass


SIMPLE = (
    ast.Constant, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Set,
    ast.Dict, ast.Subscript,
)  # fmt: skip
"""Expressions that are written as they are, with their parts written out."""


class _AnswerWriter:
    """Writes out an expression: what depends on the rank by its answers, and names as the constants that they
    are."""

    def __init__(self, reader: _AnswerReader, scope: Scope, turn: int) -> None:
        self.reader, self.scope, self.turn = reader, scope, turn
        self.sources: set[int] = set()
        self.turns: set[int] = set()  # how many there are of what has several

    def write(self, node: ast.expr) -> ast.expr:
        """Raises `_Unknown` where something in it is not known."""
        source = self.reader._followed.get(node)
        if node not in self.reader._open and source is None:
            source = self.reader.follow(node, self.scope)
        if isinstance(source, RankExpression):
            several = len(source.atoms) > 1
            if several:
                self.turns.add(len(source.atoms))
            text, sources = source.atoms[self.turn if several else 0]
            self.sources.update(sources)
            return ast.parse(text, mode="eval").body
        if isinstance(source, Mixed):
            raise _Unknown
        constant = self.reader.constant(node, self.scope)
        if constant is not None:
            return constant
        match node:
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in KEEPING:
                return ast.Call(node.func, self._written(node.args), [])
            case ast.Call(func=ast.Attribute(value=base, attr="get")):
                return ast.Call(
                    ast.Attribute(self.write(base), "get"), self._written(node.args), node.keywords
                )
        if not isinstance(node, SIMPLE):
            raise _Unknown
        return type(node)(**{name: self._written(value) for name, value in ast.iter_fields(node)})

    def _written(self, part: Any) -> Any:
        """A field of a node: an expression, several, or something else."""
        if isinstance(part, list):
            return [self._written(item) for item in part]
        return self.write(part) if isinstance(part, ast.expr) else part


def _place(node: ast.expr, scope: Scope) -> Place:
    return Place(scope.file, node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)


def _mixed(parts: Iterable[Found]) -> Found:
    """All that enters, as atoms."""
    atoms = frozenset(atom for part in parts if part is not None for atom in part.atoms)
    return Mixed(atoms) if atoms else None


def _parts(node: ast.expr) -> list[ast.expr]:
    """The expressions of which one is made; of a comprehension its element, iterators and tests."""
    parts: list[ast.expr] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            parts.append(child)
        elif isinstance(child, ast.comprehension):
            parts += [child.iter, *child.ifs]
    return parts


def _deciding(node: ast.AST) -> list[tuple[ast.expr, bool | None]]:
    """The expressions in a node that decide what happens, and whether only their truth does; None: each value
    may decide something else."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            return [(test, True)]
        case ast.For(iter=over) | ast.AsyncFor(iter=over):
            return [(over, False)]
        case ast.comprehension(iter=over, ifs=tests):
            return [(over, False), *((test, True) for test in tests)]
        case ast.Match(subject=subject):
            return [(subject, None)]
        case ast.BoolOp(values=values):
            return [(value, True) for value in values]
        case ast.Compare():
            return [(node, True)]
        case ast.Subscript(ctx=ast.Load()):
            return [(node, False)]
        case ast.Call(args=arguments, keywords=keywords) if called(node) in MET:
            named = [argument.value for argument in keywords if argument.arg not in PLACING]
            return [(argument, False) for argument in (*arguments, *named)]
    return []


def _renumbered(text: str, sources: tuple[int, ...]) -> str:
    """The same expression with its sources numbered from 0, ``v0``, ``v1``…"""
    for place, row in enumerate(sources):
        text = re.sub(rf"\bs{row}\b", f"v{place}", text)
    return text
