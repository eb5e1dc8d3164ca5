"""``python -m elastic.checkpoint list|verify|export``: run by elasticctl, and usable without it.

Exit codes: 0 good · 1 damaged, none found, or failed · 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from elastic.checkpoint.format import files
from elastic.checkpoint.format.errors import CheckpointError, Damaged
from elastic.checkpoint.format.names import is_aside, is_final, tmp_of
from elastic.checkpoint.stored.find import verify

from .format import manifest as m


def rows(directory: str, *, hashes: bool) -> list[dict[str, Any]]:
    """One row per checkpoint, newest first; then quarantined and unfinished ones, by name."""
    good, others = [], []
    for name in files.REAL.names(directory):
        path = os.path.join(directory, name)
        if is_final(name):
            good.append(_row(path, hashes=hashes))
        elif is_aside(name):
            others.append({"path": path, "state": "quarantined", "detail": name.partition(".damaged-")[2]})
        elif tmp_of(name):
            others.append({"path": path, "state": "being written, or left over", "detail": ""})
    good.sort(key=lambda row: (row.get("generation", -1), row.get("step", -1)), reverse=True)
    return good + others


def _row(path: str, *, hashes: bool) -> dict[str, Any]:
    names = ("job", "step", "generation", "world_size", "nbytes", "created_wall_s", "versions")
    try:
        manifest = verify(path, hashes=hashes)
        return {"path": path, "state": "good", "detail": "", **{name: getattr(manifest, name) for name in names}}
    except Damaged as damage:
        return {"path": path, "state": damage.reason, "detail": damage.detail}


def _is_checkpoint(path: str) -> bool:
    return os.path.exists(os.path.join(path, m.MANIFEST)) or bool(is_final(os.path.basename(os.path.abspath(path))))


def show(args: argparse.Namespace) -> int:
    """`list` checks sizes and manifests, `verify` every byte. Returns the exit code."""
    hashes = args.command == "verify"
    one = hashes and _is_checkpoint(args.path)
    checkpoint_rows = [_row(args.path, hashes=True)] if one else rows(args.path, hashes=hashes)
    if args.json:
        print(json.dumps(checkpoint_rows))
    else:
        for row in checkpoint_rows:
            size = f"{row['nbytes'] / 1e6:10.1f} MB" if "nbytes" in row else ""
            print(f"{os.path.basename(row['path']):28s} {row['state']:16s} {size:14s} {row['detail']}".rstrip())
    checkpoints = [row for row in checkpoint_rows if is_final(os.path.basename(row["path"])) or "nbytes" in row]
    return int(not checkpoints or any(row["state"] != "good" for row in checkpoints))


def export(args: argparse.Namespace) -> int:
    from elastic.checkpoint.stored.export import to_dcp, to_torch_save

    (to_dcp if args.format == "dcp" else to_torch_save)(args.path, args.target)
    print(args.target)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elastic.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("list", "sizes and manifests"), ("verify", "every byte against its hash")):
        command = commands.add_parser(name, help=what)
        command.add_argument("path", help="a checkpoint directory, or (verify) one checkpoint in it")
        command.add_argument("--json", action="store_true")
        command.set_defaults(run=show)
    command = commands.add_parser("export", help="write it in another tool's format")
    command.add_argument("path", help="one checkpoint: …/step-40")
    command.add_argument("target")
    command.add_argument("--format", choices=("torch", "dcp"), default="torch")
    command.set_defaults(run=export)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (CheckpointError, OSError) as error:
        print(f"{args.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
