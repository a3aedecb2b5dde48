import os
import subprocess
import sys
from dataclasses import replace

from windtunnel.base.processes import Identity, boot_id, start_time

NOBODY = 2**22 + 1


def test_this_process():
    mine = Identity.own()
    assert mine == Identity(os.getpid(), start_time(os.getpid()), boot_id()) == Identity.of(os.getpid())
    assert mine.lives() and Identity.parse(str(mine)) == mine
    assert not replace(mine, started=mine.started + 1).lives()  # the id is another process's now
    assert not replace(mine, boot="another").lives()
    assert not Identity(0, 0, boot_id()).lives()
    assert Identity.of(NOBODY) is None and not replace(mine, pid=NOBODY).lives()


def test_a_zombie_is_gone_and_a_name_may_be_anything():
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) Z (b'); print('named', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    began = start_time(child.pid)
    assert began and began >= start_time(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    assert start_time(child.pid) is None and not Identity(child.pid, began, boot_id()).lives()
    child.communicate()
