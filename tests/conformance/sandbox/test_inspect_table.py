"""Real programs change real files; the inspector's answer is compared with two walks over the tree."""

# ruff: noqa: E501 (one command a line)

from __future__ import annotations

import pytest

from agents.sandbox.inspect.inspect_cell import Cell, files_may_have_changed
from windtunnel.agents.sandbox.inspect import Inspector
from windtunnel.linux.snapshot import read_snapshot

pytestmark = pytest.mark.root

BEFORE = r"""
mkdir -p old/deep; echo 1 > old/a; echo 2 > old/b; echo 3 > old/deep/c; seq 1000 > big
ln -s old dir; ln -s old/a link; mkfifo pipe; (cd old && tar cf ../t.tar .)
echo 'all: ; cp old/a out' > Makefile; printf 'x\n' > sh.mmap; truncate -s 8192 map
mkdir repo; git -C repo init -q 2>/dev/null; git -C repo commit -q --allow-empty -m one
"""
KEEP = BEFORE + "cp -a /workspace /.windtunnel/before"
AGAIN = "cd /workspace; rm -rf ./* /tmp/* /dev/shm/*; cp -a /.windtunnel/before/. ."
"""What every command of a table finds: made once, and copied."""
PY = "python3 -c "
CHANGED = {
    "create": "echo x > new",
    "append": "echo x >> old/a",
    "overwrite in place": PY + "\"import os; f=os.open('old/a',os.O_RDWR); os.pwrite(f,b'z',0)\"",
    "truncate by shell": ": > old/a",
    "truncate by path": "truncate -s 1 big",
    "truncate by descriptor": PY + "\"f=open('big','r+'); f.truncate(3)\"",
    "sparse": "truncate -s 8M hole",
    "fallocate": "fallocate -l 4096 old/a",
    "mmap": PY + "\"import mmap; f=open('map','r+b'); m=mmap.mmap(f.fileno(),0); m[5]=7\"",
    "rename over": "echo n > n && mv n old/a",
    "rename": "mv old/a old/z",
    "rename directory": "mv old older",
    "exchange": PY + "\"import ctypes; ctypes.CDLL(None).syscall(316,-100,b'old/a',-100,b'old/b',2)\"",
    "delete": "rm old/a",
    "delete tree": "rm -rf old",
    "delete absolute": "rm /workspace/old/a",
    "delete through a link": "rm dir/b",
    "delete through a new link that goes": "ln -s old L; rm L/b; rm L",
    "delete through a new link that moves": "ln -s old L; mv L M; rm M/b; rm M",
    "delete dot dot": "cd old/deep; rm ../../big; cd /workspace",
    "delete by directory descriptor": PY + "\"import os; d=os.open('old',0); os.unlink('a',dir_fd=d)\"",
    "delete through /proc/self/cwd": PY + "\"import os; os.unlink('/proc/self/cwd/big')\"",
    "create through /proc/self/cwd": "echo x > /proc/self/cwd/new",
    "delete and make again": "rm old/a; echo other > old/a",
    "chmod": "chmod 600 old/a",
    "chmod through a link": "chmod 600 link",
    "fchmod": PY + "\"import os; os.fchmod(os.open('old/a',0),0o600)\"",
    "chown": "chown 1:1 old/a",
    "touch": "touch -d 2001-01-01 old/a",
    "futimens": PY + "\"import os; os.utime(os.open('old/a',0),(1,1))\"",
    "xattr": PY + "\"import os; os.setxattr('old/a','user.k',b'v')\"",
    "fxattr": PY + "\"import os; os.setxattr(os.open('old/a',0),'user.k',b'v')\"",
    "hard link": "ln old/a hard",
    "symbolic link": "ln -s nowhere dangling",
    "relink": "ln -sfn old/deep dir",
    "mkdir": "mkdir -p p/q/r",
    "rmdir": "rm old/deep/c; rmdir old/deep",
    "fifo": "mkfifo another",
    "socket file": PY + "\"import socket; socket.socket(socket.AF_UNIX).bind('sock')\"",
    "tmpfile and link": PY + "\"import os,ctypes; f=os.open('.',os.O_TMPFILE|os.O_RDWR); os.write(f,b'x'); ctypes.CDLL(None).linkat(-100,b'/proc/self/fd/%d'%f,-100,b'named',0x400)\"",
    "git init": "git init -q fresh 2>/dev/null",
    "git commit": "cd repo; echo x > f; git add f; git commit -q -m two; cd ..",
    "git checkout": "git -C repo checkout -q -b side",
    "sed -i": "sed -i s/1/2/ old/a",
    "tar x": "mkdir x; tar xf t.tar -C x",
    "tar over": "tar xf t.tar -C old",
    "cp": "cp -a old copy",
    "cp reflink": "cp --reflink=auto big big2",
    "make": "make -s",
    "sendfile": PY + "\"import os; a=open('big','rb'); b=open('old/a','r+b'); os.sendfile(b.fileno(),a.fileno(),0,9)\"",
    "copy_file_range": PY + "\"import os; a=open('big','rb'); b=open('old/a','r+b'); os.copy_file_range(a.fileno(),b.fileno(),9)\"",
    "splice": PY + "\"import os; r,w=os.pipe(); os.write(w,b'zz'); f=os.open('old/a',os.O_RDWR); os.splice(r,f,2)\"",
    "writev": PY + "\"import os; os.writev(os.open('old/a',os.O_WRONLY),[b'q',b'r'])\"",
    "open r+": PY + "\"f=open('old/a','r+'); f.write('q')\"",
    "background": "(sleep 0.02; echo late > late) & wait",
    "double fork": PY + "\"import os\nif os.fork(): os.wait(); raise SystemExit\nos.setsid()\nif os.fork(): os._exit(0)\nopen('daemon','w').write('x')\"; while ! [ -s daemon ]; do :; done",
    "thread": PY + "\"import threading; t=threading.Thread(target=lambda: open('thr','w').write('x')); t.start(); t.join()\"",
    "descriptor over a socket": PY + "\"import socket,os\na,b=socket.socketpair()\nif os.fork():\n f=os.open('old/a',os.O_RDWR); socket.send_fds(a,[b'x'],[f]); os.close(f); os.wait()\nelse:\n f=socket.recv_fds(b,1,1)[1][0]; os.write(f,b'Q')\"",
    "long name": "n=$(printf 'n%.0s' $(seq 200)); mkdir $n; echo x > $n/$n",
    "very long path": "for i in 1 2 3 4 5 6 7 8; do n=$(printf \"$i%.0s\" $(seq 180)); mkdir $n; cd $n; done; echo x > end; cd /workspace",
    "strange name": "echo x > $'a\\nb\\xff c'",
    "temporary directory": "echo x > /tmp/here",
    "chroot inside": "mkdir -p jail; cp -a /bin/true jail 2>/dev/null; python3 -c \"import os; os.chroot('old'); os.unlink('/a')\"",
    "stdout redirect kept open": "exec 9>old/a; echo x >&9; exec 9>&-",
}  # fmt: skip
SAME = {
    "nothing": ":",
    "read": "cat old/a big > /dev/null; grep -r 1 old > /dev/null; ls -R > /dev/null; stat old > /dev/null",
    "failed delete": "rm -f not-there; rmdir old 2>/dev/null; mkdir old 2>/dev/null; true",
    "failed write": "(echo x > /usr/x) 2>/dev/null; true",
    "born and gone": "echo x > t; rm t",
    "born, renamed by link and gone": "echo x > t; ln t u; rm t u",
    "directory born and gone": "mkdir -p t/u; echo x > t/u/f; rm -r t",
    "directory born and gone, absolute": "mkdir -p t/u; echo x > t/u/f; rm /workspace/t/u/f; rmdir /workspace/t/u /workspace/t",
    "cd": "cd old; cd ..; export A=1; f() { :; }",
    "pipes": "seq 100 | sort | tail -1 > /dev/null",
    "here document": "cat <<< hello > /dev/null",
    "opened for writing, not written": "exec 9<>old/a; exec 9>&-; : >> old/a",
    "python": "python3 -c 'print(1)' > /dev/null",
    "git status": "git -C repo log > /dev/null",
    "temporary file of mktemp": "f=$(mktemp); echo x > $f; chmod 644 $f; rm $f",
    "shared memory born and gone": "echo x > /dev/shm/s; rm /dev/shm/s",
    "unnamed file": PY + "\"import tempfile; f=tempfile.TemporaryFile(dir='.'); f.write(b'x'); f.flush()\"",
    "channel": "echo x > /.windtunnel/state",
    "memory file that is gone": PY + "\"import os; f=os.memfd_create('m'); os.write(f,b'x')\"",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["changed", "same"])
def test_the_answer_for_a_table_of_commands(kind: str, cell: Cell, inspector: Inspector) -> None:
    cell.run(KEEP)
    for name, command in (CHANGED if kind == "changed" else SAME).items():
        cell.run(AGAIN)
        if not inspector._boxes:
            cell.watch(inspector)
        inspector.rebase(cell.name, read_snapshot(cell.pids()))
        before = cell.tree()
        printed = cell.run(command)
        effects = inspector.effects(cell.name)
        after = cell.tree()
        truth = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        if kind == "changed":
            assert truth, f"{name}: the command changed nothing; it printed {printed}"
            assert files_may_have_changed(effects), f"{name}: missed {truth}"
        else:
            assert not truth, name
            assert not files_may_have_changed(effects), f"{name}: {effects}"
