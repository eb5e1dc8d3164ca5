"""What `ps` and `top` show for the processes of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.contract.worker.worker_config import JOB, SLOT


def title(text: str) -> None:
    """Show `text`, as far as the process's own arguments leave room for it; without setproctitle nothing changes.

    The environment that /proc shows stays as it is: SPT_NOENV is set for all processes of a job.
    """
    try:
        import setproctitle
    except ImportError:  # the job's own interpreter, with torch and little else
        return
    setproctitle.setproctitle(text)


def worker_title(env: Mapping[str, str], argv: Sequence[str]) -> str:
    slot = env.get(SLOT, "?")
    place = f"slot {slot}" if slot.isdigit() else "standby"
    return f"elastic worker of {env.get(JOB, '?')}, {place}: {' '.join(argv)}"
