"""A pool of processes, a queue with a producer of its own, and a counter that all of them share."""

import multiprocessing as mp
import os
import queue
import time
from multiprocessing.sharedctypes import Synchronized

counter: "Synchronized[int]"


def begin(shared: "Synchronized[int]") -> None:
    global counter
    counter = shared


def square(number: int) -> int:
    time.sleep(0.02)
    with counter.get_lock():
        counter.value += 1
    return number * number


def produce(out: "mp.Queue[int]", ended: float) -> None:
    number = 0
    while not os.path.exists("/row/go") or number < ended:
        out.put(number)
        number += 1
        time.sleep(0.01)
    out.put(-1)


if __name__ == "__main__":
    shared = mp.Value("i", 0)
    numbers: "mp.Queue[int]" = mp.Queue()
    producer = mp.Process(target=produce, args=(numbers, 100))
    producer.start()
    wrong, expected, asked = [], 0, 0
    with mp.Pool(4, begin, (shared,)) as pool:
        for asked, answer in enumerate(pool.imap(square, iter(range(100_000)), chunksize=1)):
            if answer != asked * asked:
                wrong.append(f"answer {asked} is {answer}")
            try:
                while True:
                    number = numbers.get_nowait()
                    if number != expected and number >= 0:
                        wrong.append(f"{number} came instead of {expected}")
                    expected = number + 1 if number >= 0 else -1
            except queue.Empty:
                pass
            print(f"answer {asked}", flush=True)
            if expected < 0 or wrong:
                break
            if asked > 2000:
                wrong.append("the queue never ended")
                break
    producer.join(20)
    if shared.value < asked + 1:
        wrong.append(f"the counter is {shared.value} after {asked + 1} answers")
    print("ended well" if not wrong else f"ended: {wrong}", flush=True)
