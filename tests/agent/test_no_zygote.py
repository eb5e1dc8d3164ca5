"""A job whose Python cannot even start workers ends, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agents import Job

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code, codes

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]


def test_job_with_python_without_torch_fails_with_the_zygote_output(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    with Job(nodes="1:1", spec={"python": str(python)}) as job:
        state = job.wait_phase(Phase.FAILED)
        assert Code.ZYGOTE_DIES in codes(state.reason)
        assert state.error is not None
        assert "No module named 'torch'" in state.error.traceback
