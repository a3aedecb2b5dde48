"""An asyncio server and twenty clients, each with a connection of its own on which messages are numbered."""

import asyncio
import os

CLIENTS = 20
done = asyncio.Event()
rounds = 0


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    expected = 0
    while line := await reader.readline():
        number = int(line)
        if number != expected:
            writer.write(b"-1\n")
            break
        expected += 1
        writer.write(b"%d\n" % number)
        await writer.drain()
    writer.close()


async def client(path: str) -> None:
    global rounds
    reader, writer = (
        await asyncio.open_unix_connection(path) if path else await asyncio.open_connection("127.0.0.1", 4000)
    )
    number = 0
    while not done.is_set():
        writer.write(b"%d\n" % number)
        answer = await asyncio.wait_for(reader.readline(), 20)
        if int(answer or -1) != number:
            raise ValueError(f"{answer!r} is no answer to {number}")
        number += 1
        rounds += 1
        await asyncio.sleep(0.01)
    writer.close()


async def tell() -> None:
    while not done.is_set():
        print(rounds, flush=True)
        await asyncio.sleep(0.05)
        if os.path.exists("/row/go"):
            done.set()
            with open("/row/fifo", "w") as fifo:
                fifo.write("go\n")


async def main() -> None:
    await asyncio.start_server(serve, "127.0.0.1", 4000)
    await asyncio.start_unix_server(serve, "/row/socket")
    os.mkfifo("/row/fifo")
    child = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        "read word < /row/fifo; echo child; exit 5",
        stdout=asyncio.subprocess.PIPE,
    )
    clients = [asyncio.create_task(client("/row/socket" if number % 2 else "")) for number in range(CLIENTS)]
    await asyncio.gather(tell(), *clients)
    out, _ = await child.communicate()
    well = out == b"child\n" and child.returncode == 5
    print("ended well" if well else f"ended: the child said {out!r} and {child.returncode}", flush=True)


asyncio.run(main())
