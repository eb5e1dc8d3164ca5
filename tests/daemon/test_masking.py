"""What a status shows of a job's secrets: nothing."""

from __future__ import annotations

import json

from elastic.contract.job.spec import Checkpoint, JobSpec
from elasticd.base.masking import MASK, mask_in, masked, masked_setting

SECRETS = {
    "env": {
        "HF_TOKEN": "hush", "MYSQL_PWD": "hush", "DB_PW": "hush", "URL": "https://h/?sig=hush", "LR": "hush", "NONE": ""
    },
    "args": ["--pw", "hush", "model.hf_token=hush", "s3://b/k?X-Amz-Signature=hush", "https://h/?token=hush", "hush"],
    "checkpoint": {"dir": "/c", "remote": "s3://key:hush@bucket/hush?token=hush"},
}  # fmt: skip


def test_other_users_see_names_and_no_value() -> None:
    spec = {"name": "x", "script": "/t.py", **SECRETS}
    before = json.dumps(spec)
    shown = masked(spec)
    assert "hush" not in json.dumps(shown)
    assert shown["env"] == {"HF_TOKEN": MASK, "MYSQL_PWD": MASK, "DB_PW": MASK, "URL": MASK, "LR": MASK, "NONE": ""}
    assert (shown["args"], shown["script"]) == ([MASK], "/t.py")
    assert shown["checkpoint"]["dir"] == "/c"
    assert json.dumps(spec) == before, "the original is unchanged"


def test_each_field_that_holds_values_of_the_user_is_masked() -> None:
    """A new field of text is shown as it is: say here that it names something, or mask it."""
    names = {
        "name",
        "script",
        "module",
        "program",
        "python",
        "workdir",
        "env_file",
        "preload",
        "preload_skip",
        "tensorboard",
    }
    texts = {f for f in JobSpec.__struct_fields__ if isinstance(getattr(JobSpec(name="x"), f), str | tuple | dict)}
    chosen = {"nodes", "workers_per_node", "backend", "forming", "on_loss", "on_bad_numbers", "snapshots"}
    assert texts - chosen == names | {"args", "env", "tensorboard"}
    assert {f for f in Checkpoint.__struct_fields__ if isinstance(getattr(Checkpoint(), f), str)} >= {"dir", "remote"}


def test_the_arguments_of_the_command_of_notifications_are_masked() -> None:
    assert masked_setting("notify.command", ["/bin/mail", "-p", "hush"]) == ["/bin/mail", MASK, MASK]


def test_mask_in_a_submission_is_found() -> None:
    assert mask_in({"env": {"LR": "1", "HF_TOKEN": MASK}}) == "env.HF_TOKEN"
    assert mask_in({"args": [f"--token={MASK}"]}) == "args"
    assert mask_in({"env": {"LR": "1"}, "args": ["x"]}) == ""
    assert mask_in({"env": 3, "args": 4}) == ""
