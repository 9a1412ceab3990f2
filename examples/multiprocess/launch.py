"""Starts a script in several processes on this machine, as a cluster would on many.

    python examples/multiprocess/launch.py 4 examples/multiprocess/train.py --steps 50

Each process gets the address of the first one, the number of processes, and its own
number. Their output appears as they print it.
"""

import socket
import subprocess
import sys


def start(count: int, *command: str, **settings) -> list[subprocess.Popen]:
    """Starts the processes.

    Args:
        count: How many.
        command: The script and its arguments.
        settings: For `subprocess.Popen`.
    """
    address = f"localhost:{free_port()}"
    return [
        subprocess.Popen(
            [
                *(sys.executable, *command),
                *("--coordinator", address),
                *("--processes", str(count)),
                *("--process", str(process)),
            ],
            **settings,
        )
        for process in range(count)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def main():
    count, *command = sys.argv[1:]
    processes = start(int(count), *command)
    try:
        sys.exit(max(abs(process.wait()) for process in processes))
    except KeyboardInterrupt:
        for process in processes:
            process.terminate()


if __name__ == "__main__":
    main()
