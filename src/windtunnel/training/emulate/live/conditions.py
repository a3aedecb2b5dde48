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
import sys
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
DEEP = 20_000
"""Calls within each other that follow an expression through a program; a few are made for each name."""

Atom = tuple[str, tuple[int, ...]]
"""An expression of ``s0``, ``s1``… and the sources that these are."""
Turn = tuple[ast.expr, tuple[int, ...]]
"""The same as a tree, in which every name is written out."""


@dataclass(frozen=True, eq=False)
class Known:
    """An expression of answers and constants alone. Of several ``turns`` it is one at a time: a place in a
    loop over meshes is told something of each."""

    turns: tuple[Turn, ...]

    @property
    def of_rank(self) -> bool:
        return any(sources for _, sources in self.turns)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """What depends on the rank."""
        texts = (
            (ast.unparse(ast.fix_missing_locations(tree)), sources) for tree, sources in self.turns if sources
        )
        return tuple(dict.fromkeys(texts))


@dataclass(frozen=True, eq=False)
class Mixed:
    """Something that these, and things unknown, enter."""

    atoms: frozenset[Atom]

    @property
    def of_rank(self) -> bool:
        return bool(self.atoms)


Found = Known | Mixed
UNKNOWN = Mixed(frozenset())


def conditions(
    answers: Mapping[Place, Mapping[int, list[int]]], files: Iterable[str], world_size: int,
    devices_per_host: int,
) -> tuple[tuple[Condition, ...], tuple[RankSource, ...]]:  # fmt: skip
    """The conditions on the rank in the user's ``files``. ``answers``: of each place, to each rank."""
    files = tuple(dict.fromkeys((*files, *sorted(place.file for place in answers))))
    names, read = _names(tuple(_texts(files)))
    reader = _AnswerReader(answers, world_size, devices_per_host, names)
    result, unread = [], sorted({place.file for place in answers} - read)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEP))
    try:
        result = reader.read()
    except RecursionError:
        unread = unread or sorted({place.file for place in answers})
    finally:
        sys.setrecursionlimit(limit)
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
                if isinstance(node, ast.Subscript) and self._answers(node, scope):
                    continue  # os.environ["RANK"] looks nothing up in a table of the program's
                what = self.follow(decides, scope)
                is_known = isinstance(what, Known)
                for text, sources in what.atoms if is_known else sorted(what.atoms):
                    text = f"bool({text})" if is_known and is_test else text
                    sites.setdefault((text, sources, not is_known or is_test is None), site)
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
        """What an expression is, or what of the rank enters it."""
        if node in self._followed:
            return self._followed[node]
        if node in self._open:
            return UNKNOWN  # it is computed from itself, and from what else there is
        self._open.add(node)
        try:
            what = self._followed[node] = self._follow(node, scope)
        finally:
            self._open.discard(node)
        return what

    def _follow(self, node: ast.expr, scope: Scope) -> Found:
        if rows := self._answers(node, scope):
            return self._answer(node, rows)
        match node:
            case ast.Name(id=name):
                return self._of_values(self.names.look_up(name, scope))
            case ast.Attribute(value=base, attr=name):
                what = self._of_values(self.names.attributes.get(f".{name}", []))
                return what if what.of_rank else _mixed([self.follow(base, scope)])
            case ast.Lambda() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return UNKNOWN
        if (size := self._size(node)) is not None:
            return Known(((ast.Constant(size), ()),))
        match node:
            case ast.Subscript(slice=ast.Constant(value=str(key))) if f"[{key}]" in self.names.attributes:
                return _of_rank(self._of_values(self.names.attributes[f"[{key}]"]))
            case ast.Call():
                return self._call(node, scope)
        return self._written(node, _parts(node), scope, isinstance(node, SIMPLE))

    def _answer(self, node: ast.expr, rows: tuple[int, ...]) -> Found:
        if not all(self.sources[row].values for row in rows):
            return Mixed(frozenset((f"s{row}", (row,)) for row in rows))
        text = "s{}" if isinstance(node, ast.Call) and called(node) not in ("get", "getenv") else "str(s{})"
        return Known(tuple((ast.parse(text.format(row), mode="eval").body, (row,)) for row in rows))

    def _of_values(self, name_values: list[NameValue]) -> Found:
        """What a name is. Of several values that it gets: where one is of the rank and the others are
        constants, that one (the others are for a world of one rank)."""
        values = [self._of_value(name_value) for name_value in name_values]
        if len(values) == 1:
            return values[0]
        of_rank = [value for value in values if value.of_rank]
        others = [
            name_value for name_value, value in zip(name_values, values, strict=True) if not value.of_rank
        ]
        is_one = len(of_rank) == 1 and all(map(self._is_constant, others))
        if is_one or (not others and len({value.atoms for value in of_rank}) == 1):
            return of_rank[0]
        return _mixed(of_rank)

    def _is_constant(self, name_value: NameValue) -> bool:
        what = self.follow(name_value.value, name_value.scope)
        return isinstance(what, Known) and not what.of_rank

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
        if own := self.names.functions.get(name, ()):
            returned = [self.follow(o, inner) for f, inner in own for o in self.names.returned(f)]
            return _of_rank(returned[0]) if len(returned) == 1 else _mixed(returned)
        if name in self.names.classes:
            return UNKNOWN  # what it is given is followed by the names of its attributes
        base: Found = UNKNOWN
        parts = [*call.args, *(keyword.value for keyword in call.keywords)]
        is_known = name in KEEPING
        if isinstance(call.func, ast.Attribute):
            base, is_known = self.follow(call.func.value, scope), name == "get"
            if not base.of_rank and isinstance(call.func.value, ast.Name):
                base = self._seeded(call.func.value.id)
            parts.insert(0, call.func.value)
        if name in PLACED or self.names.module_of(call).split(".")[0] == "torch":
            return _mixed([base])
        what = self._written(call, parts, scope, is_known and not call.keywords)
        return what if isinstance(what, Known) else _mixed([what, base])

    def _seeded(self, module: str) -> Found:
        """What a module's own state depends on: ``random.seed(rank)``."""
        if module not in SEEDED:
            return UNKNOWN
        parts = []
        for node, scope in self.names.scope_of.items():
            if isinstance(node, ast.Call) and called(node) in SEEDED[module]:
                parts += [self.follow(argument, scope) for argument in node.args]
        return _mixed(parts)

    def _written(self, node: ast.expr, parts: list[ast.expr], scope: Scope, is_known: bool) -> Found:
        """The expression with its parts written out, once for each turn where one of them has several.
        ``is_known``: it is a matter of its parts and nothing else."""
        followed = [self.follow(part, scope) for part in parts]
        known = [what for what in followed if isinstance(what, Known)]
        several = {len(what.turns) for what in known} - {1}
        if not is_known or len(known) < len(followed) or len(several) > 1:
            return _mixed(followed)  # of several, which of one goes with which of the other is not known
        turns = []
        for turn in range(max(several, default=1)):
            chosen = [what.turns[turn % len(what.turns)] for what in known]
            trees = {part: tree for part, (tree, _) in zip(parts, chosen, strict=True)}
            turns.append((_with(node, trees), tuple(sorted({row for _, rows in chosen for row in rows}))))
        return Known(tuple(turns))

    def _size(self, node: ast.expr) -> int | str | None:
        """What all ranks are told alike: how large the world is, and a host."""
        match node:
            case ast.Call(args=[], keywords=[]) if called(node) in ("get_world_size", "device_count"):
                return self.world_size if called(node) == "get_world_size" else self.devices_per_host
            case (
                ast.Subscript(slice=ast.Constant(value=str(key)))
                | ast.Call(args=[ast.Constant(value=str(key)), *_])
            ):
                sizes = {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.devices_per_host}
                if key in sizes and "environ" in ast.unparse(node):
                    return str(sizes[key])
        return None


SIMPLE = (
    ast.Constant, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Set,
    ast.Dict, ast.Subscript,
)  # fmt: skip
"""Expressions that are a matter of their parts and nothing else."""


def _with(value: Any, trees: Mapping[ast.expr, ast.expr]) -> Any:
    """A node, or what stands in its fields, with some of its parts written out."""
    if isinstance(value, list):
        return [_with(item, trees) for item in value]
    if not isinstance(value, ast.AST):
        return value
    if isinstance(value, ast.expr) and value in trees:
        return trees[value]
    return type(value)(**{name: _with(item, trees) for name, item in ast.iter_fields(value)})


def _place(node: ast.expr, scope: Scope) -> Place:
    return Place(scope.file, node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)


def _mixed(parts: Iterable[Found]) -> Found:
    """All that enters, as atoms."""
    return Mixed(frozenset(atom for part in parts for atom in part.atoms))


def _of_rank(what: Found) -> Found:
    """Without what does not depend on the rank, such as a constant that may be another in time."""
    return what if what.of_rank else UNKNOWN


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
