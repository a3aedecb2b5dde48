"""The names of a program: what is assigned to each, in the scope in which it is.

A plain reading of the source, without order: all that is ever assigned to a name counts. Parameters get what
own calls pass, wherever they are; attributes and items of dictionaries are known by their name alone. What is
put into a list, a set or a dictionary counts as one more value of its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
CHANGING = frozenset((
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "pop",
    "remove", "reverse", "setdefault", "sort", "update",
))  # fmt: skip
"""Functions of lists, sets and dictionaries after which they are no longer what was assigned."""


@dataclass(eq=False)
class Scope:
    """A module, a function, or a class, of ``file``."""

    file: str
    parent: Scope | None = None
    bindings: dict[str, list[NameValue]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class NameValue:
    """What a name gets: an expression in its scope; ``part``: its n-th element (-1: any one of them)."""

    value: ast.expr
    scope: Scope
    part: int | None = None


@dataclass(eq=False)
class ProgramNames:
    """All files of a program. ``functions``, ``classes``: own ones by name. ``attributes``: what is assigned
    to attributes (``.rank``) and items (``[rank]``) of that name. ``scope_of``: of every expression.
    ``imported``: the module that a name is, or is from."""

    modules: list[Scope] = field(default_factory=list)
    functions: dict[str, list[tuple[Function, Scope]]] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    attributes: dict[str, list[NameValue]] = field(default_factory=dict)
    scope_of: dict[ast.AST, Scope] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)

    def read(self, tree: ast.Module, file: str) -> None:
        """Take in a file."""
        scope = Scope(file)
        self.modules.append(scope)
        self._walk(tree.body, scope)

    def bind_calls(self) -> None:
        """Give parameters what calls pass, and names what is put into them. Once, after all files are
        read."""
        for node, scope in list(self.scope_of.items()):
            match node:
                case ast.Call():
                    self._bind(node, scope)
                    if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
                        self._put(node.func.value, [*node.args, *(k.value for k in node.keywords)], scope)
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        match target:
                            case ast.Subscript(value=ast.Attribute(), slice=ast.Constant(value=str())):
                                pass  # one variable of the environment says nothing of the others
                            case ast.Subscript(value=into, slice=key):
                                self._put(into, [key, value], scope)

    def look_up(self, name: str, scope: Scope) -> list[NameValue]:
        """What the name gets, as seen from ``scope``; a name of another own module where it is from there."""
        at: Scope | None = scope
        while at is not None:
            if name in at.bindings:
                return at.bindings[name]
            at = at.parent
        return [name_value for module in self.modules for name_value in module.bindings.get(name, ())]

    def module_of(self, call: ast.Call) -> str:
        """The module that what is called is from: ``torch.nn`` for ``nn.Linear(1, 2)``; "" for one's own."""
        root = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        return self.imported.get(root.id, "") if isinstance(root, ast.Name) else ""

    def returned(self, function: Function) -> Iterator[ast.expr]:
        """What a function returns."""
        waiting: list[ast.AST] = list(function.body)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Return) and node.value is not None:
                yield node.value
            if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
                waiting.extend(ast.iter_child_nodes(node))

    def _walk(self, nodes: list[ast.stmt] | list[ast.AST], scope: Scope) -> None:
        for node in nodes:
            self.scope_of[node] = scope
            inner = scope
            if isinstance(node, Function):
                inner = Scope(scope.file, scope)
                self.functions.setdefault(node.name, []).append((node, inner))
                arguments = node.args
                others = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
                for argument in (
                    *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *others
                ):  # fmt: skip
                    inner.bindings.setdefault(argument.arg, [])
            elif isinstance(node, ast.Import):
                self.imported |= {(o.asname or o.name.split(".")[0]): o.name for o in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {o.asname or o.name: node.module or "" for o in node.names}
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value, scope)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                self._assign(node.target, node.value, scope)
            elif isinstance(node, ast.AugAssign):
                bin_op = ast.BinOp(node.target, node.op, node.value)
                self._assign(node.target, ast.copy_location(bin_op, node), scope)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                self._assign(node.target, node.iter, scope, -1)
            self._walk(list(ast.iter_child_nodes(node)), inner)

    def _assign(self, target: ast.expr, value: ast.expr, scope: Scope, part: int | None = None) -> None:
        name_value = NameValue(value, scope, part)
        match target:
            case ast.Name(id=name):
                scope.bindings.setdefault(name, []).append(name_value)
            case ast.Attribute(attr=name):
                self.attributes.setdefault(f".{name}", []).append(name_value)
            case ast.Subscript(slice=ast.Constant(value=str(key))):
                self.attributes.setdefault(f"[{key}]", []).append(name_value)
            case ast.Starred(value=inner):
                self._assign(inner, value, scope, -1)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for place, element in enumerate(targets):
                    self._assign(element, value, scope, place if part is None else -1)

    def _put(self, into: ast.expr, values: list[ast.expr], scope: Scope) -> None:
        """Something is put into what ``into`` names, or taken from it."""
        match into:
            case ast.Name(id=name):
                bindings = self.look_up(name, scope)
            case ast.Attribute(attr=name):
                bindings = self.attributes.setdefault(f".{name}", [])
            case _:
                return
        nothing = ast.copy_location(ast.Constant(None), into)
        bindings += [NameValue(value, scope, -1) for value in values or [nothing]]

    def _bind(self, call: ast.Call, scope: Scope) -> None:
        name = called(call)
        if name in self.classes:
            self._bind_instance(self.classes[name], call, scope)
        for function, inner in self.functions.get(name, ()):
            self._bind_function(function, inner, call, scope)
        if (inner_call := _call_within(call)) is not None:
            for function, inner in self.functions.get(called(inner_call), ()):
                self._bind_function(function, inner, inner_call, scope)

    def _bind_instance(self, class_def: ast.ClassDef, call: ast.Call, scope: Scope) -> None:
        own = [node for node in class_def.body if isinstance(node, Function) and node.name == "__init__"]
        for function in own:
            inner = next(s for node, s in self.functions["__init__"] if node is function)
            self._bind_function(function, inner, call, scope, bound=True)
        if not own:  # a dataclass, or a named tuple
            fields = [
                n.target.id
                for n in class_def.body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            ]
            pairs = [*zip(fields, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
            for field_name, value in pairs:
                self.attributes.setdefault(f".{field_name}", []).append(NameValue(value, scope))

    def _bind_function(
        self, function: Function, inner: Scope, call: ast.Call, scope: Scope, bound: bool = False
    ) -> None:
        of = function.args
        names = [argument.arg for argument in (*of.posonlyargs, *of.args)]
        if names and names[0] in ("self", "cls") and (bound or isinstance(call.func, ast.Attribute)):
            names = names[1:]
        keywords = {*names, *(kwonlyarg.arg for kwonlyarg in of.kwonlyargs)}
        for place, value in enumerate(call.args):
            spread = isinstance(value, ast.Starred)  # from here on any parameter may get any of these
            for name in names[place:] if spread else names[place : place + 1]:
                inner.bindings[name].append(NameValue(value, scope, -1 if spread else None))
            if of.vararg and (spread or place >= len(names)):
                inner.bindings[of.vararg.arg].append(NameValue(value, scope, -1))
        for keyword in call.keywords:
            if keyword.arg in keywords:
                inner.bindings[keyword.arg].append(NameValue(keyword.value, scope))
                continue
            for name in keywords if keyword.arg is None else ():
                inner.bindings[name].append(NameValue(keyword.value, scope, -1))
            if of.kwarg:
                inner.bindings[of.kwarg.arg].append(NameValue(keyword.value, scope, -1))


def _call_within(call: ast.Call) -> ast.Call | None:
    """The call of a function that is handed to another one, which makes it: to ``partial``, a thread, a
    process, or ``torch.multiprocessing``, which puts the number of the process first."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    match called(call), call.args:
        case "partial", [function, *values]:
            return ast.Call(function, values, call.keywords)
        case "Thread" | "Process", [] if "target" in options:
            return ast.Call(options["target"], _elements(options.get("args")), [])
        case "spawn" | "start_processes", [function, *values]:
            given = values[0] if values else options.get("args")
            return ast.Call(function, [call, *_elements(given)], [])
    return None


def _elements(value: ast.expr | None) -> list[ast.expr]:
    """As arguments that a call takes one by one."""
    if value is None:
        return []
    if isinstance(value, ast.Tuple | ast.List):
        return value.elts
    return [ast.copy_location(ast.Starred(value), value)]


def called(call: ast.Call) -> str:
    """The last word of what is called: ``all_reduce`` of ``dist.all_reduce(x)``."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
