"""/metrics: by Prometheus' conventions, each job by one node, and what the dashboard and the alerts ask for."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
from dataclasses import replace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.snapshots import SPEC, job, progress, row, snapshot

from elastic.contract.records.job_records import IncidentRecord, JobState, Phase, SpecRecord
from elastic.contract.records.ledger import STEP_S, Ledger, Spread
from elastic.contract.records.node_records import NodeRecord
from elastic.contract.records.rank_records import RanksRecord, RankTimes
from elastic.contract.step_parts import StepParts
from elastic.etcd.client import MemberHealth
from elasticd.api.metrics import metrics
from elasticd.api.metrics.observations import Histories, Requests
from elasticd.api.routes import routes
from elasticd.api.views import views
from elasticd.base.answers import Certificate
from elasticd.cluster.assignment import Assignment
from elasticd.cluster.cluster import Job, Node
from elasticd.cluster.published_state import Contact, Snapshot

ROOT = pathlib.Path(__file__).resolve().parents[2]
IDENTITY = views.Identity("main", "a", "0.1", 7, 40.0, ("127.0.0.1:2379",), False, "")
LEDGER = Ledger(
    until_ms=0, wall_ms=90_000, ranks_ms={"stepping": 60_000, "form": 1_500}, step=41,
    steps=Spread((0,) * 4 + (7, 3), 1_900), stalls=Spread((2,), 1),
)  # fmt: skip
PARTS = StepParts(step_s=0.1, data_s=0.01, compute_s=0.06, collectives_s=None, optimizer_s=0.01, snapshot_s=0.0)
FULL = {
    "progress": progress(
        ledger=LEDGER, still={"since_wall_s": 940.0, "because": "x"}, checkpoint_step=40, checkpoint_wall_s=990.0,
        checkpoint_write_s=0.7, ranks=[msgspec.to_builtins(msgspec.structs.replace(row(0, "a", 0), parts=PARTS))],
        checkpoint_interval="20 s", snapshot_step=40, snapshot_mb=2.0,
    ),
    "ranks": {
        "a": RanksRecord(node="a", generation=2, wall_s=990.0, ranks=(
            RankTimes(slot=0, rank=0, since_ms=0, until_ms=1500, ranks_ms={"stepping": 1500}),
        )),
    },
}  # fmt: skip
MEMBERS = (MemberHealth("h:1", "3.5", True, "", 2.0), MemberHealth("h:2", "", False, "refused"))


def text(seen: Snapshot, node: str = "a", requests: Requests | None = None) -> str:
    return metrics.exposition(lambda: seen, replace(IDENTITY, node=node), requests)().decode()


def full() -> str:
    """An exposition with every metric in it."""
    requests = Requests()
    requests.etcd_called("KV.Txn", 0.02, "EtcdUnavailable")
    requests.api.observe(0.004, "GET", "/v1/jobs/{job}", "200")
    mine = Certificate(what="client certificate", file="/c.pem", expires_wall_s=2e9)
    contact = Contact(True, 99.5, "", "3.5", members=MEMBERS, certificates=(mine,))
    return text(snapshot(job(**FULL), contact=contact, plan=Assignment(queue=("train",))), requests=requests)


def samples(exposed: str) -> dict[str, float]:
    """'name{label="value"}' -> value."""
    rows = (line for line in exposed.splitlines() if not line.startswith("#"))
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in rows}


def test_a_job_has_gauges_counters_and_histograms() -> None:
    found = samples(full())
    wanted = {
        'elasticd_job_step{job="train"}': 40, 'elasticd_job_steps_total{job="train"}': 41,
        'elasticd_job_restarts_total{job="train"}': 1, 'elasticd_job_phase{job="train",phase="running"}': 1,
        'elasticd_job_last_recovery_seconds{job="train"}': 0.144, 'elasticd_job_snapshot_bytes{job="train"}': 2e6,
        'elasticd_job_seconds_total{bucket="stepping",job="train"}': 60,
        'elasticd_job_seconds_total{bucket="idle",job="train"}': 0,
        'elasticd_job_step_seconds_bucket{job="train",le="0.1"}': 0,
        'elasticd_job_step_seconds_bucket{job="train",le="0.25"}': 7,
        'elasticd_job_step_seconds_bucket{job="train",le="+Inf"}': 10,
        'elasticd_job_step_seconds_sum{job="train"}': 1.9,
        'elasticd_job_checkpoint_stall_seconds_count{job="train"}': 2,
        'elasticd_job_checkpoint_write_seconds_bucket{job="train",le="1"}': 1,
        'elasticd_job_recovery_seconds_bucket{job="train",le="0.2",phase="stepping"}': 1,
        'elasticd_job_step_part_seconds{job="train",part="data"}': 0.01, 'elasticd_job_slow_ranks{job="train"}': 0,
        'elasticd_job_step_part_seconds{job="train",part="collectives"}': None,
        'elasticd_job_rank_seconds_total{bucket="stepping",job="train"}': 1.5,
        'elasticd_job_incidents_total{job="train",kind="exit"}': 1, 'elasticd_job_steps_lost_total{job="train"}': 0,
    }  # fmt: skip
    assert {name: found.get(name) for name in wanted} == wanted


def test_a_histogram_with_too_many_counts_takes_no_metric_from_the_others() -> None:
    """Its job's user can write any record of the job."""
    hostile = msgspec.structs.replace(LEDGER, steps=Spread((1,) * 100, 7))
    found = samples(text(snapshot(job(progress=progress(ledger=hostile)))))
    assert found['elasticd_job_step_seconds_count{job="train"}'] == len(STEP_S) + 1
    assert found["elasticd_registered"] is not None


def test_an_incident_that_gets_another_cause_later_is_counted_once() -> None:
    """Another agent may report after the end what it was: the kind of the record changes, and it may cost more."""
    histories, first = Histories(), msgspec.structs.replace(job().incidents[-1], kind="comm", open=False, steps_lost=1)
    cause = msgspec.structs.replace(first, kind="exit", steps_lost=3)
    for record in (first, first, cause, cause):
        known = histories.look(snapshot(job(incidents=(record,))))["train"]
    assert (dict(known.incidents), known.steps_lost) == ({"comm": 1}, 3)
    beside = msgspec.structs.replace(first, id="beside", kind="late exit", steps_lost=0)
    assert histories.look(snapshot(job(incidents=(cause, beside))))["train"].incidents.total() == 2


def test_a_value_that_is_not_known_has_no_sample() -> None:
    found = text(snapshot(job()))
    assert "elasticd_job_checkpoint_age_seconds{" not in found
    assert "elasticd_job_seconds_total{" not in found


def test_etcd_is_counted_by_its_members() -> None:
    found = samples(full())
    assert (found["elasticd_etcd_members"], found["elasticd_etcd_members_up"]) == (2, 1)
    assert found['elasticd_etcd_database_bytes{endpoint="h:1"}'] == 2e6
    unasked = samples(text(snapshot(contact=Contact(False, 40.0, "refused"))))
    assert (unasked["elasticd_etcd_members"], unasked["elasticd_etcd_members_up"]) == (1, 0)


def test_requests_are_counted_by_their_outcome() -> None:
    found = samples(full())
    assert found['elasticd_etcd_request_duration_seconds_count{method="KV.Txn",result="EtcdUnavailable"}'] == 1
    route = 'code="200",method="GET",route="/v1/jobs/{job}"'
    assert found[f"elasticd_api_request_duration_seconds_count{{{route}}}"] == 1


def test_a_route_has_no_names_in_it() -> None:
    assert routes.template("POST", "/v1/jobs/secret/stop") == ("POST", "/v1/jobs/{job}/stop")
    assert routes.template("GET", "/v1/jobs/a/../b") == ("other", "other")
    assert routes.template("BREW", "/v1/status") == ("other", "other")


def with_nodes(*names: str, **facts: object) -> Snapshot:
    seen = snapshot(job(**FULL | facts))
    record = next(iter(seen.cluster.nodes.values())).record
    nodes = {n: Node(replace_node(record, n), 10 + i) for i, n in enumerate(names)}
    return replace(seen, cluster=replace(seen.cluster, nodes=nodes))


def replace_node(record: NodeRecord, name: str) -> NodeRecord:
    return NodeRecord(**{f: getattr(record, f) for f in record.__struct_fields__} | {"node": name})


@pytest.mark.parametrize(
    ("nodes", "facts", "chosen"),
    [
        (("z", "b", "a"), {}, "a"),  # the first one of its generation
        (("z", "b"), {}, "b"),  # a has no daemon
        (("z", "y"), {}, "z"),  # none of its nodes has one: the node that registered first
        (("z", "a"), {"generation": None}, "z"),  # it waits
        (("z", "a"), {"state": JobState(phase=Phase.FAILED)}, "z"),
    ],
)
def test_each_job_is_exported_by_exactly_one_node(
    nodes: tuple[str, ...], facts: dict[str, object], chosen: str
) -> None:
    seen = with_nodes(*nodes, **facts)
    assert [n for n in nodes if 'elasticd_job_phase{job="train"' in text(seen, n)] == [chosen]
    assert [n for n in nodes if "elasticd_node_state{" in text(seen, n)] == [nodes[0]]


def test_a_job_that_is_over_keeps_its_counters_and_has_no_gauges_but_its_phase() -> None:
    found = text(with_nodes("a", state=JobState(phase=Phase.SUCCEEDED)))
    assert 'elasticd_job_phase{job="train",phase="succeeded"} 1.0' in found
    assert 'elasticd_job_seconds_total{bucket="stepping",job="train"} 60.0' in found
    assert "elasticd_job_no_progress_seconds{" not in found


def incident(generation: int, **facts: object) -> IncidentRecord:
    base = {
        "id": f"{generation}",
        "generation": generation,
        "kind": "exit",
        "node": "a",
        "ranks": (),
        "detail": "",
        "wall_s": 1.0 * generation,
    }
    return IncidentRecord(**base | {"steps_lost": 2, "timeline_s": {"stepping": 0.4}} | facts)  # type: ignore[arg-type]


def counted(histories: Histories, *found: IncidentRecord, **facts: object) -> tuple[int, int]:
    """(incidents, steps lost) after a look at a job with these incidents."""
    known = histories.look(snapshot(job(incidents=found, **facts)))["train"]
    return known.incidents.total(), known.steps_lost


def test_an_incident_is_counted_once_when_it_is_over_and_stays_counted_when_etcd_drops_it() -> None:
    histories = Histories()
    assert counted(histories, incident(1, open=True)) == (0, 0)
    assert counted(histories, incident(1)) == (1, 2)
    assert counted(histories, incident(1), incident(2)) == (2, 4)
    assert counted(histories, incident(2)) == (2, 4)


def test_another_job_of_the_same_name_begins_anew_and_one_that_is_forgotten_is_dropped() -> None:
    histories = Histories()
    assert counted(histories, incident(1)) == (1, 2)
    assert counted(histories, submitted=6) == (0, 0)
    assert counted(histories, incident(1), spec=None, submitted=0) == (1, 2), "wiped from etcd: the same job"
    lost = replace(snapshot(), contact=Contact(False, 0.0, "refused"))
    assert "train" in histories.look(lost)
    assert "train" not in histories.look(snapshot())


def test_a_number_in_a_record_that_is_no_number_spoils_no_sum() -> None:
    histories = Histories()
    assert counted(histories, incident(1, timeline_s={"stepping": float("nan"), "synced": float("inf")})) == (1, 2)
    found = histories.look(snapshot(job(incidents=(incident(1),))))["train"].recovery_s.items()
    assert all(total == 0.0 for _, _, total in found)


def test_names_follow_the_conventions() -> None:
    for family in text_string_to_metric_families(full()):
        assert family.documentation, family.name
        assert family.type != "unknown", family.name
        assert not re.search(r"_(mb|ms|age|took|megabytes|milliseconds)$", family.name), family.name
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total"), sample.name
            assert family.type == "counter" or not sample.name.endswith("_total"), sample.name


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian's package prometheus)")
def test_promtool_accepts_metrics_and_rules() -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=full(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    rules = ROOT / "monitoring" / "alerts.yml"
    done = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def exported() -> set[str]:
    """Names of all samples that elasticd exports."""
    return {sample.name for family in text_string_to_metric_families(full()) for sample in family.samples}


def named(query: str) -> set[str]:
    return set(re.findall(r"\b(?:elasticd|process)_\w+", query))


def alerts() -> dict[str, str]:
    """Alert -> its part of the rules file."""
    parts = (ROOT / "monitoring" / "alerts.yml").read_text().split("- alert: ")[1:]
    return {part.split("\n")[0].strip(): part for part in parts}


def test_every_metric_that_an_alert_uses_is_exported() -> None:
    for name, rule in alerts().items():
        expression = re.search(r"expr: (.*?)\n +(?:for|labels):", rule, re.DOTALL)
        assert expression, name
        used = named(expression[1])
        assert used or 'up{job="elasticd"}' in expression[1], name
        assert used <= exported(), name


def test_every_alert_has_its_section_in_the_documentation_and_names_it() -> None:
    sections = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE))
    assert sections == set(alerts())
    for name, rule in alerts().items():
        assert f"docs/alerts.md#{name.lower()}" in rule, name


def test_every_metric_of_the_dashboard_is_exported() -> None:
    published = json.loads((ROOT / "monitoring" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in published["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 10
    for query in queries:
        assert named(query) or "up{" in query, query
        assert named(query) <= exported(), query


def test_the_documentation_lists_every_metric() -> None:
    listed = named((ROOT / "docs" / "metrics.md").read_text())
    mine = {family.name for family in text_string_to_metric_families(full()) if family.name.startswith("elasticd_")}
    wanted = {name + ("_total" if f"{name}_total" in exported() else "") for name in mine}
    shown = {name.removesuffix("_bucket") for name in listed if name.startswith("elasticd_")}
    assert shown == wanted


def spec_of(name: str) -> SpecRecord:
    return SpecRecord(spec=SPEC, submitted_wall_s=1.0, submitted_by=name)


def test_a_hostile_job_name_is_escaped() -> None:
    odd: Job = job(name='x"\n', spec=spec_of("x"))
    assert 'job="x\\"\\n"' in text(snapshot(odd))
