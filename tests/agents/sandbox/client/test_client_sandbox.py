"""The class that users name: a sandbox by its name, through the daemon."""

import pytest

from windtunnel.agents.sandbox import Sandbox, SandboxDied, SandboxError, SandboxSpec
from windtunnel.agents.sandbox.client import Client
from windtunnel.base.errors import HostError, UserError


def test_a_sandbox_by_its_name(client: Client) -> None:
    home = client.place.home
    with Sandbox("a", where=home, start=False) as box, box.turn():
        assert box.run(["echo", "two words"]).stdout == b"two words\n"
    with Sandbox.connect(home, start=False) as host:
        again = host.get("a")
        assert (again.turns, again.info().status) == (1, "running")
        again.stop()
        with pytest.raises(SandboxDied):
            again.run("true")
        again.wait(timeout=1)


def test_what_cannot_be_made_is_told_in_the_same_errors(client: Client) -> None:
    for image, error in (("missing", UserError), ("full", SandboxError), ("bug", HostError)):
        with pytest.raises(error):
            Sandbox(SandboxSpec("b", image=image), where=client.place.home, start=False)
    with pytest.raises(UserError, match="needs a token"):
        Sandbox("b", where="http://localhost:1")
