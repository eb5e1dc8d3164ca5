"""An Ethernet switch in user space, with delay, jitter and loss for each port: netem is not in every kernel.

    tapsw.py LABEL PID:NAME…      one tap device for each port, moved into the network namespace of process PID as NAME

Says `up` when the ports are there. Then takes one JSON object per line on stdin and answers `ok`:
{"port": 0, "delay_s": 0.05, "jitter_s": 0.01, "loss": 0.1}. A frame suffers what its two ports say. Ends with stdin.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x0002 | 0x1000


class Port:
    def __init__(self, label: str, index: int, pid: str, name: str) -> None:
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        own = f"{label}{index}"[:15]
        fcntl.ioctl(self.fd, TUNSETIFF, struct.pack("16sH22x", own.encode(), IFF_TAP_NO_PI))
        if int(pid) == os.getppid():
            subprocess.run(["ip", "link", "set", own, "name", name], check=True, timeout=10)
        else:
            subprocess.run(["ip", "link", "set", own, "netns", pid, "name", name], check=True, timeout=10)
        self.delay_s = self.jitter_s = self.loss = 0.0


def main() -> None:
    label, *wanted = sys.argv[1:]
    ports = [Port(label, i, *port.split(":")) for i, port in enumerate(wanted)]
    by_fd = {port.fd: port for port in ports}
    home: dict[bytes, Port] = {}  # MAC address -> port
    queue: list[tuple[float, int, Port, bytes]] = []
    count = 0
    poll = select.poll()
    for fd in [*by_fd, sys.stdin.fileno()]:
        poll.register(fd, select.POLLIN)
    print("up", flush=True)
    while True:
        wait_ms = max(0.0, (queue[0][0] - time.monotonic()) * 1000) if queue else None
        for fd, _ in poll.poll(wait_ms):
            if fd == sys.stdin.fileno():
                if not (line := sys.stdin.readline()):
                    return
                change = json.loads(line)
                port = ports[change.pop("port")]
                for name, value in change.items():
                    setattr(port, name, value)
                print("ok", flush=True)
                continue
            source = by_fd[fd]
            for _ in range(64):
                try:
                    frame = os.read(fd, 65536)
                except OSError:  # nothing more, or the device is down or gone
                    break
                home[frame[6:12]] = source
                known = home.get(frame[:6])
                for target in [known] if known else [p for p in ports if p is not source]:
                    loss = 1 - (1 - source.loss) * (1 - target.loss)
                    if target is source or (loss and random.random() < loss):
                        continue
                    jitter_s = source.jitter_s + target.jitter_s
                    late_s = source.delay_s + target.delay_s + (random.uniform(-jitter_s, jitter_s) if jitter_s else 0)
                    count += 1
                    heapq.heappush(queue, (time.monotonic() + late_s, count, target, frame))
        now_s = time.monotonic()
        while queue and queue[0][0] <= now_s:
            _, _, target, frame = heapq.heappop(queue)
            try:
                os.write(target.fd, frame)
            except OSError:  # full or down: a switch drops
                continue


if __name__ == "__main__":
    main()
