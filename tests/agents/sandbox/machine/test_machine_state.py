"""What shells print about themselves is taken apart exactly, whatever the values hold."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine.state import ShellSections, differences, replay_script, shell_effect
from windtunnel.agents.sandbox.model import ShellEffect, ShellState

TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20)


def bash(script: str) -> str:
    program = shutil.which("bash")
    if program is None:
        pytest.skip("needs bash")
    done = subprocess.run(
        [program, "--norc"], input=script.encode(), capture_output=True, env={"LC_ALL": "C"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode(errors="surrogateescape")


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b2", "_c", "D"]), st.one_of(TEXT, st.lists(TEXT, max_size=3))))
def test_variables_survive_being_printed_and_declared(values: dict[str, str | list[str]]) -> None:
    script = ""
    for name, value in values.items():
        script += (
            f"{name}=({' '.join(map(quoted, value))})\n"
            if isinstance(value, list)
            else f"{name}={quoted(value)}\n"
        )
    printed = bash(script + "echo 'm variables'; declare -p")
    state = ShellSections.parse(printed, "m")
    variables = state.variables()
    assert set(values) <= set(variables)
    again = "".join(
        f"declare {flags} {name}{value}\n" for name, (flags, value) in variables.items() if name in values
    )
    then = ShellSections.parse(
        bash(
            again.encode(errors="surrogateescape").decode(errors="replace") + "echo 'm variables'; declare -p"
        ),
        "m",
    )
    assert {n: v for n, v in then.variables().items() if n in values} == {n: variables[n] for n in values}


def state(**sections: str) -> ShellSections:
    return ShellSections({"directory": "/\n", **sections})


def test_volatile_variables_do_not_count() -> None:
    first = state(
        variables='declare -- x="1"\ndeclare -i RANDOM="5"\ndeclare -- _="a"\ndeclare -- SECONDS="3"\n'
    )
    second = state(
        variables='declare -- SECONDS="9"\ndeclare -i RANDOM="6"\ndeclare -- x="1"\ndeclare -- _="b"\n'
    )
    assert first.fingerprint() == second.fingerprint() and differences(first, second) == []
    assert state(variables='declare -- x="2"\n').fingerprint() != first.fingerprint()


def test_a_replay_undoes_and_sets_only_what_differs() -> None:
    now = state(
        variables='declare -- old="1"\ndeclare -- same="s"\ndeclare -r fixed="1"\n',
        attributes="declare -f g\n",
    )
    wanted = state(variables='declare -x new="2"\ndeclare -- same="s"\n', directory="/a b\n")
    script, problems = replay_script(now, wanted)
    lines = script.splitlines()
    assert (
        "builtin unset -v old" in lines and 'declare -x new="2"' in lines and "builtin unset -f -- g" in lines
    )
    assert "builtin cd -- '/a b'" in lines
    assert not [line for line in lines if "same" in line]
    assert problems == ["fixed is read-only in the shell and cannot be changed back"]


def test_states_that_cannot_be_carried() -> None:
    shell = state(variables="").shell_state("main")
    assert shell_effect(shell) == ShellEffect("main")
    for sections, words in (
        ({"descriptors": "7>/x"}, "open descriptors"),
        ({"jobs": "12 "}, "background jobs"),
        ({"variables": 'declare -a COPROC=([0]="63" [1]="60")\n'}, "coprocess"),
    ):
        effect = shell_effect(state(**sections).shell_state("main"))
        assert words in effect.resources[0] and not effect.not_replayable
    broken = ShellState("main", json.dumps([1]), "")
    assert "cannot be read" in shell_effect(broken).not_replayable[0]
    with pytest.raises(MachineError, match="cannot be read"):
        ShellSections.of(broken)
