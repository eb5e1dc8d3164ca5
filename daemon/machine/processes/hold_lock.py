"""Run as a program: `hold_lock.py LOCK COMMAND…` becomes COMMAND, which holds LOCK for as long as it lives."""

import fcntl
import os
import signal
import sys


def main() -> None:
    lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    signal.alarm(2)  # another process may look at it for a moment; if one keeps it, that is our end
    fcntl.flock(lock, fcntl.LOCK_EX)
    signal.alarm(0)
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    os.set_inheritable(lock, True)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
