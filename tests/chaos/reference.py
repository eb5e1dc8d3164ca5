"""What a run comes to when nothing happens to it."""

from __future__ import annotations

import functools
import pathlib
import shutil

from support import scratch
from support.history import History, check, final_sha256
from support.procs import Procs
from support.wait import eventually

BATCH = 8
SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "train_chaos.py"


@functools.cache
def undisturbed(world_size: int, steps: int, **env: str) -> str:
    """Fingerprint of the final weights, computed once a session: by ranks as torchrun starts them, without elasticd."""
    from torch.distributed import TCPStore

    folder = pathlib.Path(scratch.folder("reference"))
    try:
        with Procs() as procs:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ranks = []
            for rank in range(world_size):
                told = {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
                    "RECORD_DIR": str(folder), "STEPS": str(steps), "BATCH": str(BATCH), "PACE_S": "0.0", **env,
                }  # fmt: skip
                with (folder / f"{rank}.log").open("ab") as log:
                    ranks.append(procs.python([str(SCRIPT)], output=log, env=told))
            eventually(lambda: all(rank.poll() is not None for rank in ranks), 60.0, "the undisturbed run ends")
            said = [(folder / f"{rank}.log").read_text() for rank in range(world_size)]
            assert not any(rank.poll() for rank in ranks), said
        history = History(folder).read()
        check(history, steps=steps, batch=BATCH)
        return final_sha256(history)
    finally:
        shutil.rmtree(folder)
