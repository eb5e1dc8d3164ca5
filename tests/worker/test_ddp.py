"""Real gloo ranks: the gradient is the exact global mean, and re-forming does not change a bit."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from support import gloo_scenarios

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def played() -> dict[str, list[Any]]:
    script = pathlib.Path(gloo_scenarios.__file__)
    env = os.environ | {"PYTHONPATH": str(script.parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # The last line: gloo of torch 2.10 prints there too, for each group that a rank forms.
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["uneven", "empty", "alone", "micro", "static", "unused"])
def test_the_gradient_is_the_exact_mean_over_the_global_batch(played: dict[str, list[Any]], name: str) -> None:
    for rank in played[name]:
        assert rank["got"] == [pytest.approx(step, rel=1e-12, abs=1e-14) for step in rank["want"]]
        assert any(abs(g) > 1e-3 for g in rank["got"][0])
        assert rank["contributed"] == 2  # once a step, whatever the micro-batches


def test_micro_batches_add_up_without_a_group(played: dict[str, list[Any]]) -> None:
    ((got,), (want,)) = (played["no group"][0][side] for side in ("got", "want"))
    assert got == pytest.approx(want, rel=1e-12, abs=1e-14)


def test_re_forming_does_not_change_a_bit(played: dict[str, list[Any]]) -> None:
    assert played["undisturbed"][0] == played["undisturbed"][2]
    assert played["disturbed"] == played["undisturbed"]


def test_buffers_follow_rank_0_or_are_left_alone(played: dict[str, list[Any]]) -> None:
    (first,), (second,) = played["buffers synced"]
    assert first == pytest.approx(0.19)  # 0.9 × 0.1 + 0.1
    assert second == pytest.approx(0.29)  # rank 0's 0.1, then its own: 0.9 × 0.1 + 0.2
    (first,), (second,) = played["buffers apart"]
    assert (first, second) == (pytest.approx(0.19), pytest.approx(0.38))


def test_buffers_of_types_that_gloo_does_not_take_follow_rank_0(played: dict[str, list[Any]]) -> None:
    """Of int16 or float8 (a quantized scale): gloo has raised "Invalid scalar type", without a name."""
    assert played["buffers of rare types"] == [[0.0] * 5] * 2


def test_rank_0s_buffers_are_everywhere_before_a_step_is_applied(played: dict[str, list[Any]]) -> None:
    """Once a step, as in stock DDP, and once more at the first forward of a group."""
    assert played["buffers shared"] == [[pytest.approx(0.271), 4]] * 2


@pytest.mark.parametrize("name", ["buffers of a part", "buffers without gradients"])
def test_buffers_are_alike_at_each_commit_whatever_changed_them(played: dict[str, list[Any]], name: str) -> None:
    """In a part of the model that trains while the whole does not, and in forwards without gradients, of which the
    ranks have different numbers."""
    assert played[name] == [[pytest.approx(0.1), pytest.approx(0.19), pytest.approx(0.271)]] * 2


def test_a_step_that_was_skipped_is_committed_with_rank_0s_buffers_too(played: dict[str, list[Any]]) -> None:
    assert played["skipped step"] == [[pytest.approx(0.1), ""]] * 2


def test_gradients_of_some_ranks_are_not_applied_by_a_script_that_catches_the_error(
    played: dict[str, list[Any]],
) -> None:
    changed, clean, join_said, said, commit_said, forward_said, steps = played["swallowed"][0]
    assert not changed
    assert clean
    assert "Join around job.ddp" in join_said
    assert "an exchange between the ranks has failed" in said
    assert commit_said == said  # a step that was not applied is not committed
    assert forward_said == said  # a loop that never gets as far
    assert steps == 0


def test_nan_of_a_rank_without_samples_does_not_spread(played: dict[str, list[Any]]) -> None:
    assert played["nan"] == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


def test_ddp_drift_of_one_ulp_is_detected_within_a_round_with_its_rank(played: dict[str, list[Any]]) -> None:
    for rank in played["drift"]:
        assert rank["before"] == []
        assert rank["found"] == [[]] * (len(rank["found"]) - 1) + [[1]]


def test_loader_processes_die_with_their_worker(played: dict[str, list[Any]]) -> None:
    assert played["orphans"] == [{"children": 2, "left": 0}]
