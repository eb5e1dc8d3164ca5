"""Every benchmark runs to its end in its smallest size, and its last line has all of its figures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from support.source import ROOT

BENCHMARKS = ROOT / "benchmarks"
IN_MAKE_TEST = {
    "evidence": {"records", "wrong"},
    "goodput": {
        "elasticd, standbys", "elasticd, no standby", "torchrun, tuned", "torchrun, defaults", "FlashRecovery's 150 s",
        "FT-HSDP's 3 minutes", "its baseline's 10 minutes",
    },
    "step_marks": {"marks_us", "for_parts_us", "percent_of_a_step"},
}  # fmt: skip
IDLE = {"idle_pss_mb", "idle_pss_daemon_mb", "idle_pss_agent_mb", "idle_pss_zygote_mb"}
LONGER = {
    "commit": {"percent_of_a_step", "us_a_step"},
    "compared": {
        "elasticd", "torchrun", "torchrun_defaults", "torchft", "torchft_tuned", "nvrx_launcher", "nvrx_inprocess",
        "ray_train",
    },
    "bounds": {"slow_connections", "large_jobs", "jobs_over", "quick", "figures"},
    "faults": {
        "exit_median_s", "standby_exit_median_s", "node_kill_median_s", "node_silent_over_ttl_s", "sigstop_median_s",
        "drain_gap_median_s", "growth_gap_median_s", "etcd_outage_slowest_step_ratio",
        "daemon_kill_slowest_step_ratio", "chaos_goodput", "steps_lost", "daemon_kill_restarts",
        "daemon_kill_undisturbed_slowest_step_ratio",
    },
    "footprint": {
        "nodes", "runs", "status_cpu_s", "status_cpu_s_max", "status_few_cpu_s", "python_cpu_s", "elasticd_rss_mb",
        "elasticd_few_rss_mb", *IDLE,
    },
    "overhead": {
        "per_tensor_us", "per_tensor_sockets_us", "per_tensor_core_us", "per_tensor_sockets_core_us",
        "per_tensor_snapshot_us", "per_tensor_restore_us", "batches_over_dataloader_8", "batches_over_dataloader_64",
        "api_us_per_step", "snapshots_on_over_off", "snapshot_step_ms", "snapshot_every_s", "snapshot_excess_ms",
        "snapshot_cost_ms", *IDLE,
    },
    "recovery": {
        "steady_ratio", "steady_ratio_error", "steady_mean_ratio", "steady_mean_ratio_error", "torchrun_median_s",
        "kill_median_s", "kill_seconds", "kill_worst_s", "steps_lost", "torchrun_ratio",
    },
    "scale": {
        "reform_s_at_max", "agents_max", "writes_per_reform_at_max", "torch_ratio_at_32", "steady_writes_per_s_at_max",
        "rows", "torch_reform_s",
    },
    "sharded": {
        "fsdp_kill_s", "fsdp_lost", "fsdp_lost_over_snapshot_steps", "hsdp_kill_s", "hsdp_lost", "tp_kill_s", "tp_lost",
        "tp_lost_over_snapshot_steps", "node_kill_s", "node_lost", "idle_node_kill_s", "idle_node_lost", "steady_ratio",
        "steady_ratio_error", "steady_mean_ratio",
        "steady_mean_ratio_error", "torchrun_s", "torchrun_lost", "torchrun_ratio",
    },
    "thousand_kills": {
        "kills", "steps", "losses_compared", "steps_seen", "different", "weights_equal", "steps_lost", "seconds",
        "seconds_undisturbed", "equal",
    },
    "unchanged": {
        "ddp_tutorial_elasticd_s", "ddp_tutorial_elasticd_steps_again", "ddp_tutorial_torchrun_to_elasticd",
    },
}  # fmt: skip
"""`versions` has a key for each torch; its parts are those of `recovery` and `reform`."""
OF_VERSIONS = {"reform", "versions"}
ELSEWHERE = {
    "frameworks": "needs the environment of `make test-compat`",
    "nccl": "tests/worker/test_gpu_smoke.py",
    "state": "tests/worker/test_state_benchmark.py",
    "newcomer": "installs torch from the package index",
    "readme_two_nodes": "installs on two booted machines; its commands are in tests/worker/test_readme.py",
}


def last_line(name: str, limit_s: float = 100.0) -> dict[str, object]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--smoke"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it ends what it has started
            raise
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    return dict(json.loads(out.splitlines()[-1]))


def test_every_benchmark_is_here() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("[a-z]*.py")}
    assert scripts == IN_MAKE_TEST.keys() | LONGER.keys() | OF_VERSIONS | ELSEWHERE.keys()


@pytest.mark.parametrize("name", IN_MAKE_TEST)
def test_a_benchmark_runs(name: str) -> None:
    assert last_line(name).keys() == IN_MAKE_TEST[name]


@pytest.mark.long  # some 15 s of a core each
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", LONGER)
def test_a_benchmark_with_a_cluster_runs(name: str) -> None:
    assert last_line(name, 400.0).keys() == LONGER[name]


@pytest.mark.long
@pytest.mark.timeout(420)
def test_the_benchmark_of_versions_runs_recovery_and_reform() -> None:
    for figures in last_line("versions", 400.0).values():
        assert isinstance(figures, dict)
        assert figures["recovery"]["new"].keys() == {"kills", "kill_median_s", "steps_lost"}
        assert {"form_ms", "freed_s", "descriptors_left"} <= figures["forming"]["new"].keys()
