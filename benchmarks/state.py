"""What a checkpoint costs training, how fast it is safe, and how fast the state comes back from disk or from a peer.

    python benchmarks/state.py            2 GB of state, some eight minutes, 13 GB of memory
    python benchmarks/state.py --quick    128 MB, three runs: under two minutes on an idle machine

Everything it is compared with is measured in the same run, in turn; medians of five runs, quick ones of three, or of
nine where state goes from rank to rank. What is promised is promised of 2 GB. The last line is one JSON object of
ratios. The parts are programs beside this one, which may be run alone (`--part`): `_state_save.py` and
`_state_broadcast.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import subprocess
import sys
import tempfile

from _harness import machine

HERE = pathlib.Path(__file__).parent
PARTS = {
    "save": ("_state_save.py", "--what", "save"),
    "resume": ("_state_save.py", "--what", "resume"),
    "broadcast": ("_state_broadcast.py", "--world", "2"),
    "broadcast-4": ("_state_broadcast.py", "--world", "4"),
}
PROMISED = {
    "stall_over_memcpy": ("at most", 1.2),
    "torch_save_over_stall": ("at least", 12),
    "dcp_async_over_stall": ("at least", 3),
    "durable_over_disk": ("at most", 1.3),
    "lost_time_dcp_over_ours": ("at least", 2.5),
    "broadcast_over_socket": ("at most", 1.15),
    "broadcast_by_socket_over_socket": ("at most", 1.15),
    "object_list_over_broadcast": ("at least", 15),
    "resume_over_read": ("at most", 1.5),
    "four_ranks_best_of_torch_over_broadcast": ("at least", 1),
    "four_ranks_by_socket_best_of_torch_over_broadcast": ("at least", 1),
    "save_extra_mb": ("at most", 256),
    "resume_extra_mb": ("at most", 256),
    "broadcast_extra_mb": ("at most", 256),
    "four_ranks_extra_mb": ("at most", 256),
}
"""Figures of the last line and what they are to be with 2 GB; further figures of the parts follow."""


def run(part: str, args: list[str]) -> dict[str, float]:
    """Run a part in a process of its own, show what it says, and return its last line. Raises CalledProcessError."""
    script, *more = PARTS[part]
    argv = [sys.executable, str(HERE / script), *more, *args]
    last = ""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    last = line
                else:
                    print(line, end="", flush=True)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)
    return dict(json.loads(last))


def compare(figures: dict[str, float]) -> None:
    print()
    for name, (bound, limit) in PROMISED.items():
        if name in figures:
            met = figures[name] <= limit if bound == "at most" else figures[name] >= limit
            print(f"  {name:42s} {figures[name]:8.2f}  {bound} {limit:g}{'' if met else '   NOT MET'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mb", type=int, help="size of the state in 10^6 bytes")
    parser.add_argument("--runs", type=int, help="medians are over this many")
    parser.add_argument("--dir", default="/var/tmp", help="a folder on the disk to measure")
    parser.add_argument("--part", choices=PARTS)
    args = parser.parse_args()
    megabytes = args.mb or (128 if args.quick else 2000)
    runs = {part: 5 if not args.quick else 9 if part.startswith("broadcast") else 3 for part in PARTS}
    print(f"{megabytes} MB; {datetime.date.today()}; {machine()}, Linux {platform.release()}", flush=True)
    figures: dict[str, float] = {}
    for part in [args.part] if args.part else PARTS:
        with tempfile.TemporaryDirectory(prefix="elastic-state-", dir=args.dir) as directory:
            common = ["--mb", str(megabytes), "--runs", str(args.runs or runs[part])]
            figures |= run(part, [*common, "--dir", directory])
    compare(figures)
    print(json.dumps({name: figures[name] for name in PROMISED if name in figures} | figures))


if __name__ == "__main__":
    main()
