"""Threads that hand a token around under a condition, and count under a lock; the counts must agree."""

import os
import threading
import time
from functools import partial

COUNT = 4
turn = 0
total = 0
own = [0] * COUNT
lock = threading.Lock()
moved = threading.Condition()
end = threading.Event()


def due(number: int) -> bool:
    return turn % COUNT == number or end.is_set()


def work(number: int) -> None:
    global turn, total
    while not end.is_set():
        with moved:
            if not moved.wait_for(partial(due, number), timeout=20):
                raise TimeoutError(f"thread {number} was not woken")
            turn += 1
            moved.notify_all()
        with lock:
            total += 1
            own[number] += 1
        time.sleep(0.002)


def tell() -> None:
    while not end.wait(0.05):
        print(total, flush=True)


threads = [threading.Thread(target=work, args=(number,)) for number in range(COUNT)]
threads.append(threading.Thread(target=tell))
for thread in threads:
    thread.start()
while not os.path.exists("/row/go"):
    time.sleep(0.02)
end.set()
with moved:
    moved.notify_all()
for thread in threads:
    thread.join(20)
well = not any(thread.is_alive() for thread in threads) and sum(own) == total
print("ended well" if well else f"ended: {own} are not {total}", flush=True)
