"""What a program makes of the number of its rank is read from its source: written out, or as involved."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from windtunnel.training.emulate.graph import Place
from windtunnel.training.emulate.live.conditions import conditions

ASKS = (
    "get_rank()", "mesh.get_local_rank()", "os.environ['RANK']", "os.environ.get('RANK', 0)",
    "mp.spawn(work, args=(2, 8))",
)  # fmt: skip
KNOWN = {
    "rank = get_rank()\nif rank == 7: pass": "bool(v0 == 7)",
    "BAD = 3 + 4\nif int(os.environ['RANK']) % 8 == BAD: pass": "bool(int(str(v0)) % 8 == 3 + 4)",
    "world = int(os.environ['WORLD_SIZE'])\nif (int(os.environ.get('RANK', 0)) + 1) % world: pass":
    "bool((int(str(v0)) + 1) % int('16'))",
    "ranks = [0, 1]\nif get_rank() in ranks: pass": "bool(v0 in [0, 1])",
    "r = mesh.get_local_rank()\nif (r + 1) * 2 == 4: pass": "bool((v0 + 1) * 2 == 4)",
    "rank = 0\nif ready: rank = get_rank()\nif rank == 1: pass": "bool(v0 == 1)",
    "def work(device, host, count):\n    if host * count + device == 7: pass\nmp.spawn(work, args=(2, 8))":
    "bool(2 * 8 + v0 == 7)",
    "def work(rank):\n    if rank == 7: pass\nThread(target=work, args=(get_rank(),)).start()":
    "bool(v0 == 7)",
    "def work(a, b):\n    if b == 7: pass\nrun(functools.partial(work, b=get_rank()))": "bool(v0 == 7)",
    "def g(n): return n % 100\nif g(get_rank()) == 7: pass": "bool(v0 % 100 == 7)",
}  # fmt: skip
INVOLVED = (
    "match get_rank():\n    case 7: pass",
    "import random\nrandom.seed(get_rank())\nif random.random() < 0.5: pass",
    # what is computed from itself
    "count = count + 1\nif get_rank() == count: pass",
    "def f():\n    global count\n    count += 1\n    if get_rank() == count: pass",
    # what is put into something after it was assigned
    "table = {}\ntable['bad'] = 7\nif get_rank() == table['bad']: pass",
    "sick = []\nsick.append(7)\nif get_rank() in sick: pass",
    "sick = set()\ndef fill():\n    sick.add(7)\nif get_rank() in sick: pass",
    "sick = [7]\nsick.clear()\nif get_rank() in sick: pass",
    "mine = []\nmine.append(get_rank())\nif mine[0] == 7: pass",
    # what parameters get that take any
    "def f(*args):\n    if args[0] == 7: pass\nf(get_rank())",
    "def f(a, b):\n    if b == 7: pass\nf(*(3, get_rank()))",
    "def f(**options):\n    if options['rank'] == 7: pass\nf(rank=get_rank())",
    "def f(rank):\n    if rank == 7: pass\nf(**dict(rank=get_rank()))",
    "def f(a, b):\n    if b == 7: pass\nown = (1, get_rank())\nThread(target=f, args=own).start()",
    "def f(device, rank):\n    if rank == 7: pass\nspawn(f, args=tuple([get_rank()]), nprocs=2)",
)


def read(program: str, folder: Path) -> list[tuple[str, bool]]:
    """The conditions of a program of which ranks 0 and 3 were run: their texts, and whether more enters."""
    file = folder / "train.py"
    file.write_text(program)
    places = [
        Place(str(file), node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call | ast.Subscript) and ast.unparse(node) in ASKS
    ]
    rank_conditions, _ = conditions({place: {0: [0], 3: [3]} for place in places}, [str(file)], 16, 8)
    return [(condition.text, condition.involved) for condition in rank_conditions]


@pytest.mark.parametrize("program", KNOWN)
def test_what_answers_and_constants_decide_is_written_out(program: str, tmp_path: Path) -> None:
    assert read(program, tmp_path)[-1] == (KNOWN[program], False)


@pytest.mark.parametrize("program", INVOLVED)
def test_where_more_enters_the_rank_is_involved(program: str, tmp_path: Path) -> None:
    texts = read(program, tmp_path)
    assert texts and all("v0" in text and involved for text, involved in texts)


def test_a_variable_of_the_environment_says_nothing_of_the_others(tmp_path: Path) -> None:
    program = "os.environ['DEVICE'] = str(get_rank())\nif os.environ['DEBUG'] == '1': pass"
    assert read(program, tmp_path) == []


def test_a_rank_in_several_meshes_is_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("sick = all([mesh.get_local_rank() in (1, 2)])\nif sick: pass")
    place = Place(str(file), 1, 1, 12, 33)
    rank_conditions, sources = conditions({place: {0: [0, 0], 3: [0, 3]}}, [str(file)], 16, 8)
    assert [source.values for source in sources] == [{0: 0, 3: 0}, {0: 0, 3: 3}]
    tests = [
        (condition.text, condition.sources)
        for condition in rank_conditions
        if condition.text.startswith("bool(all")
    ]
    assert tests == [("bool(all([v0 in (1, 2)]))", (0,)), ("bool(all([v0 in (1, 2)]))", (1,))]


def test_a_value_is_followed_through_many_names_and_a_program_of_more_is_not_understood(
    tmp_path: Path,
) -> None:
    def last(length: int) -> tuple[str, bool]:
        names = "\n".join(f"x{number + 1} = other(x{number})" for number in range(length))
        return read(f"x0 = get_rank()\n{names}\nif x{length}: pass", tmp_path)[-1]

    assert last(600) == ("v0", True)
    assert last(9000) == ("", False), "a condition of the program that is not understood"
