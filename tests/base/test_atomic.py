"""Whole files and whole lines, whichever step the disk fails at."""

import errno
import multiprocessing
import os
import threading

import pytest

from windtunnel.base import atomic

STEPS = ("open", "write", "fsync", "link", "replace")
OLD, NEW = b"old content", b"new content, which is longer"


@pytest.fixture
def fails(monkeypatch):
    """The disk is full from the nth call of a function of `os` on."""

    def arm(step, after=0):
        real, calls = getattr(os, step), [0]

        def full(*given, **named):
            if step == "open" and given[1] & os.O_DIRECTORY:
                return real(*given, **named)
            calls[0] += 1
            if calls[0] > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*given, **named)

        monkeypatch.setattr(os, step, full)

    return arm


@pytest.fixture
def short(monkeypatch):
    """Every write takes three bytes."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:3]))


def put(way, path, data):
    if way == "replace":
        atomic.replace(path, data, durable=True)
    elif way == "replacing":
        with atomic.replacing(path) as part:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                atomic.write_all(file, data)
                os.fsync(file)
            finally:
                os.close(file)
    else:
        atomic.write_new(path, data)


@pytest.mark.parametrize("way", ["replace", "replacing"])
@pytest.mark.parametrize("there", [False, True])
def test_replaces(tmp_path, way, there, short):
    path = tmp_path / "file"
    if there:
        path.write_bytes(OLD)
    put(way, path, NEW)
    assert path.read_bytes() == NEW
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("way", ["replace", "replacing", "new"])
@pytest.mark.parametrize("step", STEPS)
def test_a_full_disk_leaves_the_old_state(tmp_path, fails, way, step):
    if (way, step) in {("new", "replace"), ("replace", "link"), ("replacing", "link")}:
        pytest.skip("no such step")
    path = tmp_path / "file"
    if way != "new":
        path.write_bytes(OLD)
    fails(step)
    with pytest.raises(OSError, match="No space"):
        put(way, path, NEW)
    assert [file.name for file in tmp_path.iterdir()] == ([] if way == "new" else ["file"])
    assert way == "new" or path.read_bytes() == OLD


@pytest.mark.parametrize("way", ["replace", "new"])
def test_when_the_folder_cannot_be_synced_the_new_state_is_whole(tmp_path, fails, way):
    fails("fsync", after=1)
    with pytest.raises(OSError, match="No space"):
        put(way, tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_not_durable_syncs_nothing(tmp_path, fails):
    fails("fsync")
    atomic.replace(tmp_path / "a", "text ä")
    atomic.write_new(tmp_path / "b", NEW, durable=False)
    assert (tmp_path / "a").read_text(encoding="utf-8") == "text ä"
    assert (tmp_path / "b").read_bytes() == NEW


def test_new_never_replaces(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with pytest.raises(FileExistsError):
        atomic.write_new(path, NEW)
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_modes_are_less_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        atomic.replace(tmp_path / "a", NEW)
        atomic.write_new(tmp_path / "b", NEW, mode=0o600)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o640, 0o600]


def test_the_writer_of_a_block_may_fail(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with pytest.raises(KeyboardInterrupt), atomic.replacing(path) as part:
        assert part.parent == path.parent and part.name.endswith(atomic.PART)
        part.write_bytes(NEW)
        raise KeyboardInterrupt
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_several_writers_at_once(tmp_path):
    """Whoever replaces the file last, it is always one writer's whole."""
    path = tmp_path / "file"
    contents = {bytes([65 + number]) * 100_000 for number in range(4)}
    path.write_bytes(next(iter(contents)))
    done = threading.Event()
    contents_read = set()

    def look():
        while not done.is_set():
            contents_read.add(path.read_bytes())

    reader = threading.Thread(target=look)
    writers = [
        threading.Thread(target=lambda content=content: [atomic.replace(path, content) for _ in range(20)])
        for content in contents
    ]
    reader.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    done.set()
    reader.join()
    assert contents_read <= contents
    assert list(tmp_path.iterdir()) == [path]


def opened(path):
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)


@pytest.mark.parametrize("torn", [0, 1, 70_000, 200_000])
def test_a_torn_tail_is_cut_off(tmp_path, torn, short):
    path = tmp_path / "log"
    for before in (b"", b"one\n", b"one\n" + b"y" * 100_000 + b"\n"):
        path.write_bytes(before + b"x" * torn)
        file = opened(path)
        atomic.append_line(file, b"next\n")
        os.close(file)
        assert path.read_bytes() == before + b"next\n"


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_line_that_does_not_fit_leaves_no_part(tmp_path, fails, short, written):
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    file = opened(path)
    fails("write", after=written)
    with pytest.raises(OSError, match="No space"):
        atomic.append_line(file, b"something\n")
    os.close(file)
    assert path.read_bytes() == b"one\n"


def lines(path, letter):
    file = opened(path)
    for number in range(200):
        atomic.append_line(file, f"{letter * 3000}{number}\n".encode())


def test_processes_append_whole_lines(tmp_path):
    path = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=lines, args=(path, letter)) for letter in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    whole_lines = path.read_text().splitlines()
    for letter in "abc":
        own = [line for line in whole_lines if line[0] == letter]
        assert own == [f"{letter * 3000}{number}" for number in range(200)]
    assert len(whole_lines) == 600
