"""gradients.json: a sample of any model in a size that the node's daemon reads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from elastic.agent.reports.gradient_file import MOST_ROWS, GradientFile, collapsed
from elastic.contract.agent_files import GRADIENTS_BYTES
from elastic.contract.worker.messages import GradientRow, GradientSample
from elasticd.api.routes import job_routes
from elasticd.base.folders import Folder


def rows(count: int, name: str = "layer") -> tuple[GradientRow, ...]:
    return tuple(GradientRow(f"{name}{i // 2}.{'wb'[i % 2]}", 3.0, None, 4.0, i % 2 == 0) for i in range(count))


def written(folder: Path, held: tuple[GradientRow, ...]) -> list[dict[str, object]]:
    (folder / "agent").mkdir()
    file = GradientFile(folder / "agent", "n", 1.0)
    file.take(0, GradientSample(rank=0, generation=1, step=5, part=0, parts=1, gradients="g", weights="w", rows=held))
    file.write()
    assert (folder / "agent" / "gradients.json").stat().st_size <= GRADIENTS_BYTES
    return job_routes.samples(Folder(folder, ("logs",)), 1.0)


def test_a_few_parameters_are_written_as_they_are(tmp_path: Path) -> None:
    (sample,) = written(tmp_path, rows(10))
    assert sample["rows"] == msgspec.to_builtins(rows(10))


def test_of_many_parameters_their_layers_are_written(tmp_path: Path) -> None:
    (sample,) = written(tmp_path, rows(MOST_ROWS + 2))
    assert len(sample["rows"]) == MOST_ROWS // 2 + 1  # type: ignore[arg-type]
    first = collapsed(rows(4), 3)[0]
    norms = pytest.approx(18**0.5), None, pytest.approx(32**0.5)
    assert (first.name, first.own, first.mean, first.weight) == ("layer0.*", *norms)
    assert (first.trained, first.bad) == (True, False)


def test_long_names_do_not_make_the_file_too_long(tmp_path: Path) -> None:
    (sample,) = written(tmp_path, rows(MOST_ROWS, name="n" * 2000))
    assert sample["rows"]


def test_a_larger_file_in_its_place_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    with (tmp_path / "agent" / "gradients.json").open("wb") as file:
        file.truncate(64 << 20)
    assert job_routes.samples(Folder(tmp_path, ("logs",)), 1.0) == []
