"""``nvidia-smi`` for devices that are not there: ``python nvidia_smi.py NAME MIB COUNT WORDS...``.

A program by itself, which imports nothing, as scripts call it in a process of its own. It lists the devices,
and answers ``--query-gpu`` as the real one does: ``[N/A]`` for what nobody knows.
"""

import sys


def main(name: str, memory: str, count: str, *words: str) -> int:
    """Print what is asked for. Returns the exit status."""
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    devices = range(int(count))
    if (
        len(options) == len(words)
        and "query-gpu" in options
        and options.keys() <= {"query-gpu", "format", "id"}
    ):
        fields = [field.strip() for field in options["query-gpu"].split(",")]
        form = options.get("format", "").split(",")
        shown = options["id"].split(",") if "id" in options else [*map(str, devices)]
        if not set(shown) <= {*map(str, devices)}:
            print("No devices were found")
            return 6
        mib = "" if "nounits" in form else " MiB"
        if "noheader" not in form:
            print(", ".join(f"{field} [MiB]" if field.startswith("memory.") else field for field in fields))
        for device in shown:
            values = {"index": device, "count": count, "memory.total": memory + mib}
            values |= dict.fromkeys(("name", "gpu_name"), name)
            print(", ".join(values.get(field, "[N/A]") for field in fields))
        return 0
    if words in ((), ("-L",), ("--list-gpus",)):
        for index in devices:
            print(f"GPU {index}: {name}" + ("" if words else f" ({memory} MiB)"))
        return 0
    print(
        f"windtunnel: nvidia-smi {' '.join(words)} cannot be emulated because no driver is there to ask; use"
        " nvidia-smi -L or --query-gpu=name,memory.total,count --format=csv",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
