"""What a checkpoint costs training, how fast it is safe, and how fast the state comes back from disk or from a peer.

    python benchmarks/state.py            2 GB of state, some ten minutes, 9 GB of memory
    python benchmarks/state.py --quick    256 MB, under two minutes on an idle machine

Everything it is compared with is measured in the same run, in turn. The last line is one JSON object of ratios.
The parts are programs beside this one, each with a last line of its own: `_state_save.py` and `broadcast.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
PARTS = {"save": "_state_save.py", "broadcast": "broadcast.py"}
KEYS = (
    *("stall_over_memcpy", "torch_save_over_stall", "dcp_async_over_stall", "durable_over_disk"),
    *("lost_time_dcp_over_ours", "broadcast_over_socket", "object_list_over_broadcast", "resume_over_read"),
)
"""What the last line holds first; further figures of the parts follow."""


def run(part: str, args: list[str]) -> dict[str, float]:
    """Run a part in a process of its own, show what it says, and return its last line. Raises CalledProcessError."""
    argv = [sys.executable, str(HERE / PARTS[part]), *args]
    last = ""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if last:
                    print(last, end="", flush=True)
                last = line
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)
    return dict(json.loads(last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mb", type=int, help="size of the state in 10^6 bytes")
    parser.add_argument("--runs", type=int, help="medians are over this many")
    parser.add_argument("--dir", default="/var/tmp", help="a folder on the disk to measure")
    parser.add_argument("--part", choices=PARTS)
    args = parser.parse_args()
    megabytes = args.mb or (256 if args.quick else 2000)
    common = ["--mb", str(megabytes), "--runs", str(args.runs or 5)]
    print(
        f"{megabytes} MB; {datetime.date.today()}; {os.cpu_count()} CPUs ({platform.machine()}), "
        f"load {os.getloadavg()[0]:.1f}, Linux {platform.release()}",
        flush=True,
    )
    ratios: dict[str, float] = {}
    if args.part in (None, "save"):
        with tempfile.TemporaryDirectory(prefix="elastic-state-", dir=args.dir) as directory:
            ratios |= run("save", [*common, "--dir", directory])
    if args.part in (None, "broadcast"):
        ratios |= run("broadcast", [*common, "--worlds", "2" if args.quick else "2,4"])
    print(json.dumps({key: ratios[key] for key in KEYS if key in ratios} | ratios))


if __name__ == "__main__":
    main()
