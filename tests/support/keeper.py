"""keeper.py FOLDER LOG COMMAND...: run a command until the test session of FOLDER ends, as nobody's descendant."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress


def main() -> None:
    folder, log, *command = sys.argv[1:]
    if os.fork():
        return
    keepers = os.open(f"{folder}/keepers", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(keepers, fcntl.LOCK_SH)
    alive = os.open(f"{folder}/alive", os.O_RDONLY | os.O_NONBLOCK)
    with open(log, "wb") as output:  # noqa: PTH123 - nothing is imported that takes long
        service = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    ended = select.poll()
    ended.register(alive, 0)  # Its end is reported unasked.
    ended.register(os.pidfd_open(service.pid), select.POLLIN)
    ended.poll()
    service.terminate()
    deadline = time.monotonic() + 60
    while service.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(service.pid, signal.SIGKILL)
    service.wait()


main()
