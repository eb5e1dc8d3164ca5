"""What a status shows of a job's secrets: nothing."""

from __future__ import annotations

import json

import pytest

from elasticd.masking import MASK, mask_in, masked, masked_args, masked_env


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PGPASSWORD", "db_passwd", "GOOGLE_APPLICATION_CREDENTIALS",
     "MY_AUTH", "SENTRY_DSN", "github_token_2"],
)  # fmt: skip
def test_secret_variable_is_masked(name: str) -> None:
    assert masked_env({name: "hush", "LR": "0.1"}) == {name: MASK, "LR": "0.1"}


def test_empty_secret_stays_visible_as_empty() -> None:
    assert masked_env({"HF_TOKEN": ""}) == {"HF_TOKEN": ""}


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--token=hush"], [f"--token={MASK}"]),
        (["--hf-token", "hush", "x"], ["--hf-token", MASK, "x"]),
        (["--api_key", "--lr", "1"], ["--api_key", "--lr", "1"]),
        (["--tokenizer", "gpt2", "--keep=3", "--passes", "2"], ["--tokenizer", "gpt2", "--keep=3", "--passes", "2"]),
        (["https://me:hush@host/x"], [f"https://{MASK}@host/x"]),
    ],
)
def test_secret_argument_is_masked(args: list[str], shown: list[str]) -> None:
    assert masked_args(args) == shown


def test_description_holds_no_secret_anywhere() -> None:
    spec = {
        "name": "x", "env": {"HF_TOKEN": "hush", "URL": "s3://a:hush@b"}, "args": ["--secret", "hush"],
        "checkpoint": {"dir": "/c", "remote": "s3://key:hush@bucket"},
    }  # fmt: skip
    assert "hush" not in json.dumps(masked(spec))
    assert spec["env"] == {"HF_TOKEN": "hush", "URL": "s3://a:hush@b"}, "the original is unchanged"


def test_mask_in_a_submission_is_found() -> None:
    assert mask_in({"env": {"LR": "1", "HF_TOKEN": MASK}}) == "env.HF_TOKEN"
    assert mask_in({"args": [f"--token={MASK}"]}) == "args"
    assert mask_in({"env": {"LR": "1"}, "args": ["x"]}) == ""
    assert mask_in({"env": 3, "args": 4}) == ""
