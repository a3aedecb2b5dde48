from pathlib import Path

import pytest

from windtunnel.base import paths

DATA, CACHE = "/u/.local/share/windtunnel", "/u/.cache/windtunnel"


@pytest.mark.parametrize(
    ("given", "home", "data", "cache"),
    [
        ({}, DATA, DATA, CACHE),
        ({"XDG_DATA_HOME": "/d"}, "/d/windtunnel", "/d/windtunnel", CACHE),
        ({"XDG_CACHE_HOME": "/c"}, DATA, DATA, "/c/windtunnel"),
        ({"WINDTUNNEL_HOME": "/w"}, "/w", DATA, CACHE),
        ({"WINDTUNNEL_HOME": "~/w"}, "/u/w", DATA, CACHE),
        ({"WINDTUNNEL_HOME": "", "XDG_DATA_HOME": "", "XDG_CACHE_HOME": ""}, DATA, DATA, CACHE),
    ],
)
def test_where_things_lie(monkeypatch, given, home, data, cache):
    for name in ("WINDTUNNEL_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/u"} | given).items():
        monkeypatch.setenv(name, value)
    assert (paths.home(), paths.data(), paths.cache()) == (Path(home), Path(data), Path(cache))
    assert paths.profiles() == Path(home) / "profiles"


@pytest.mark.parametrize(("user", "folder"), [(0, "/var/lib/windtunnel"), (1000, DATA)])
def test_what_a_host_shares(monkeypatch, user, folder):
    monkeypatch.setenv("HOME", "/u")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert paths.of_host() == Path(folder)
