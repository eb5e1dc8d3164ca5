"""Mistakes planted in the core, one at a time: each promise is shown to bite."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    """Under `elastic.recovery`, or `elastic.agent.etcd.writer`."""
    right: str
    wrong: str
    test: str = ""
    """The test that catches it, where no history does: "FOLDER/FILE.py::NAME" under `tests`. It takes no fixtures."""


MUTANTS = (
    Mutant("an expired lease condemns while steps advance", "recovery.facts.membership",
           "or (member is None and not steps_advance)", "or member is None"),
    Mutant("survivors change their ranks", "recovery.facts.membership",
           "kept = [left.pop(p.node, None) for p in before]",
           "kept = [left.pop(p.node, None) for p in reversed(before)]"),
    Mutant("a slot that is lost is closed up, though its node has another one", "recovery.facts.membership",
           "[slot if slot in record.ready else next(new, None) for slot in before]",
           "[slot for slot in before if slot in record.ready]",
           "unit/test_membership.py::test_every_worker_keeps_its_place_and_newcomers_take_those_that_are_lost"),
    Mutant("a newcomer comes last, and the place of the lost node is closed up", "recovery.facts.membership",
           "if len(m.record.ready) == len(old.slots)", "if False"),
    Mutant("a newcomer in the lowest place leads at once", "recovery.facts.membership",
           "key=lambda place: place.node in new", "key=lambda place: False",
           "unit/test_membership.py::test_a_newcomer_in_the_place_of_a_lost_node_leads_last_until_a_generation_has_stepped"),
    Mutant("a restarted agent is taken for its predecessor", "recovery.facts.membership",
           "restarted = member is not None and member.record.incarnation != place.incarnation", "restarted = False"),
    Mutant("no node with the state stays for the hand-over", "recovery.facts.state_holders",
           "return [alive[holders[0]], *chosen]", "return chosen"),
    Mutant("an excluded node is not asked for the state", "recovery.leading",
           "last_committed=turn.formed.last_committed", "last_committed=None",
           "unit/test_recovery.py::test_excluded_node_is_asked_for_its_state_before_its_record_says_that_it_has_one"),
    Mutant("a node without a place is not asked for its older state when no other is left",
           "recovery.facts.state_holders",
           "if not chosen:", "if True:",
           "simulation/test_simulation.py::test_a_node_without_a_place_hands_over_its_state_if_no_other_is_left"),
    Mutant("absence right after a wipe proves death", "recovery.facts.membership",
           "if not (self.failed and self.blind):", "if True:"),
    Mutant("what etcd has lost is not written back", "recovery.workers.announce",
           "turn.ask(Restore(adopted, turn.etcd.state, turn.etcd.spec), \"restore\")", "pass"),
    Mutant("that a generation is broken is said only once", "recovery.workers.announce",
           "turn.ask(PutBroken(record), f\"broken {adopted.number}\")", "pass"),
    Mutant("the state is kept as it was before the wipe", "recovery.knowledge",
           "turn.etcd = replace(turn.etcd, wiped_until_s=until_s, asked={})\n"
           "    turn.lead = replace(turn.lead, publishing=0)", "pass"),
    Mutant("a worker that does not abort is left alone", "recovery.workers.workers",
           "turn.kill(worker, reason(Code.LATE_ABORT))\n        return", "return"),
    Mutant("a broken generation is formed all the same, and its group not aborted", "recovery.workers.workers",
           "    if not older and not turn.is_broken():\n        return\n",
           "    if not older:\n        return\n"),
    Mutant("a lost publication is waited for without end", "recovery.knowledge",
           "if turn.lead.publishing == number and not turn.lead.publishing_again:", "if False:",
           "unit/test_recovery.py::test_failed_publish_is_retried_only_for_the_current_attempt"),
    Mutant("a publication that etcd has lost is waited for without end", "recovery.leading",
           "and turn.now_s - lead.publishing_since_s < PUBLISH_AGAIN_S", "",
           "unit/test_recovery.py::test_a_publication_that_the_view_does_not_show_in_time_is_decided_on_anew"),
    Mutant("a planned change does not wait for its boundary", "recovery.leading",
           "at_step = turn.progress.step + ahead if", "at_step = None if True or"),
    Mutant("the leaver hosts the next generation's store", "recovery.facts.membership",
           "if member.record.draining is None and place.node not in view.state.excluded_nodes:", "if True:"),
    Mutant("a crash loop is never stopped", "recovery.facts.restart_budget",
           "if max(alike, crawling) < rules.same_failure:", "if True:"),
    Mutant("what a node lacks is charged to the job's script", "recovery.workers.exits",
           "if event.shortage:", "if False:"),
    Mutant("a slot that cannot be filled is given a rank", "recovery.workers.announce",
           "if slot not in lacking", "if True",
           "unit/test_recovery.py::"
           "test_a_worker_that_cannot_be_started_is_charged_to_nobody_and_its_slot_waits_until_it_can"),
    Mutant("a slot that could not be filled once is never given a rank again", "recovery.knowledge",
           'turn.move(replace(worker, lacks=""), Trigger.SET_UP)', "turn.move(worker, Trigger.SET_UP)"),
    Mutant("the newest state does not win", "worker.state.state_source",
           "newest = max(common)", "newest = min(common)"),
    Mutant("parts of the state are put together from different steps", "worker.state.state_source",
           "versions[newest] for key", "versions[max(versions)] for key",
           "unit/test_state_source.py::test_all_parts_are_of_one_version_and_no_newer_one_was_there"),
    Mutant("a part gets its state from a rank that has another", "worker.state.state_source",
           "newest, alike[key])", "newest, offers)",
           "unit/test_state_source.py::test_a_replica_gives_its_part_and_nobody_goes_back"),
    Mutant("a copy in another node's memory is not seen", "worker.state.state_source",
           "for key, version in offer.others if", "for key, version in () if",
           "unit/test_state_source.py::test_a_part_whose_node_is_lost_comes_from_the_node_that_has_a_copy"),
    Mutant("a copy elsewhere is nearer than a rank's own snapshot", "worker.state.state_source",
           "key == offer.key, -offer.rank", "key != offer.key, -offer.rank",
           "unit/test_state_source.py::test_a_rank_that_can_load_its_part_itself_is_nearer_than_a_copy_elsewhere"),
    Mutant("the newest snapshot is replaced before the next is whole", "checkpoint.memory.buffers",
           "if self._keep_newest and ages", "if False and ages",
           "worker/test_sharded_state.py::test_the_newest_snapshot_stays_while_the_other_buffer_is_written_to_disk"),
    Mutant("what is newer than what all have gone back to stays", "worker.state.handover.restore",
           "is not None and kept > version", "is not None and False",
           "simulation/test_parts.py::test_all_go_on_from_one_version_and_lose_no_more_than_was_said"),
    Mutant("copies that are newer than what all have gone back to stay", "worker.state.handover.restore",
           "in (*self._kept, *self._others):\n            if (kept", "in self._kept:\n            if (kept",
           "worker/test_sharded_state.py::"
           "test_what_is_newer_than_what_all_have_gone_back_to_is_discarded_and_the_next_copy_replaces_it"),
    Mutant("a copy that was cut off is not made good in the next generation", "worker.snapshots.agent_snapshots",
           "if newest is not None and newest.key()", "if False and newest.key()",
           "worker/test_buddy.py::test_a_generation_begins_with_a_copy_of_the_newest_snapshot"),
    Mutant("the only copy of a part is replaced by one of another", "worker.snapshots.buddy",
           "return header.complete, header.complete and", "return header.complete, not",
           "worker/test_buddy.py::test_a_copy_replaces_what_is_needed_least"),
    Mutant("a snapshot is copied for a part that it is not of", "worker.snapshots.agent_snapshots",
           "newest.key() == everyone[rank].key", "newest.key()",
           "worker/test_buddy.py::test_a_snapshot_of_the_part_that_the_slot_had_before_is_not_sent_for_the_present_one"),
    Mutant("the next snapshot replaces one that is not copied yet", "worker.snapshots.agent_snapshots",
           " and not self.buddy.sending", "",
           "worker/test_buddy.py::test_the_next_snapshot_waits_until_the_last_one_is_copied"),
    Mutant("one node's end is everybody's", "recovery.leading",
           "all(m.record.done == generation.number for m in there)", "any(m.record.ready for m in there)"),
    Mutant("the last checkpoint is not waited for", "recovery.workers.announce",
           "done=number if turn.saved_here() else 0", "done=number if turn.done_here() else 0"),
    Mutant("a hang is ignored", "recovery.knowledge",
           "if worker.stage in IN_GROUP | {Stage.STARTING, Stage.READY}:", "if False:"),
    Mutant("an agent that left for nothing never joins again", "recovery.workers.announce",
           "if turn.now_s - since_s < IDLE_S:", "if True:"),
    Mutant("generations are not counted", "recovery.leading",
           "number = formed.number + 1 if formed else 1", "number = 1"),
    Mutant("a generation is published without compare-and-swap", "agent.etcd.writer",
           "guards.append(ModIs(self.keys.generation, effect.expect_revision))",
           "pass"),
    Mutant("a generation is published on a base that etcd has lost", "agent.etcd.writer",
           "guards.append(ModIs(self.keys.base, view.base_revision))", "pass",
           "agent/test_etcd_writer.py::test_a_large_generation_is_not_published_without_its_base"),
    Mutant("an agent that is no member any more publishes", "agent.etcd.member_writes",
           "return [ModIs(key, revision), Present(self.key)]", "return [ModIs(key, revision)]"),
    Mutant("who holds no generation writes the spec back at once", "recovery.workers.announce",
           "if adopted is None and turn.now_s < turn.etcd.absence_ignored_until_s:", "if False:"),
    Mutant("an older generation replaces a newer one in etcd", "agent.etcd.writer",
           "elif decode(GenerationHead, kv.value).number < generation.number:", "else:"),
    Mutant("an older generation is taken on", "recovery.workers.announce",
           "seen.number > adopted.number", "seen.number != adopted.number"),
    Mutant("half a state is handed on", "worker.state.state_source",
           "offer.clean and offer.established:", "offer.established:"),
    Mutant("a release of an older generation is accepted", "recovery.knowledge",
           "if message.generation != worker.generation or worker.stage not in IN_GROUP | {Stage.ABORTING}:",
           "if worker.stage not in IN_GROUP | {Stage.ABORTING}:"),
    Mutant("the death of a node that is not in the view is forgotten", "recovery.knowledge",
           "members.union((p.node, p.incarnation) for held in formed for p in held.nodes)", "members"),
    Mutant("the larger step wins, whatever its lineage", "worker.state.state_source",
           "newest = max(common)", "newest = max(common, key=lambda version: version[1])"),
    Mutant("a rank takes no part of what does not divide evenly", "worker.data.sharding",
           "return first, first + each + (rank < over)", "return first, first + each"),
    Mutant("the last batch of an epoch is as large as the others", "worker.data.sharding",
           "stop if stop < samples else samples", "stop"),
    Mutant("failures never leave the budget's window", "recovery.facts.restart_budget",
           "if abs(wall_s - f.wall_s) < rules.window_s", "if True"),
    Mutant("an expired lease is believed within a long step", "recovery.machine.turn",
           "max(STALL_S, 3 * self.progress.step_s)", "STALL_S"),
    Mutant("the node that reports a failed collective is blamed for it", "recovery.facts.restart_budget",
           'node="" if broken.kind in OF_THE_NETWORK else broken.node', "node=broken.node"),
    Mutant("further failures of a broken generation are dropped", "recovery.facts.evidence",
           "if _adds(primary, also, loss):", "if False:"),
    Mutant("a node that leaves is not asked for its state", "recovery.facts.state_holders",
           "return [*chosen, *asked]",
           "return chosen",
           "unit/test_membership.py::test_excluded_node_hands_over_its_state_before_it_leaves"),
    Mutant("an excluded node is not asked for its state", "recovery.facts.state_holders",
           "m.record.draining is not None or current.at(m.record.node) is not None", "m.record.draining is not None",
           "unit/test_membership.py::test_excluded_node_hands_over_its_state_before_it_leaves"),
    Mutant("equal steps of different lineages count as the same state", "worker.state.state_source",
           "offer.clean and offer.established and offer.version == version",
           "offer.clean and offer.established and offer.version[1] == version[1]",
           "unit/test_state_source.py::test_equal_steps_of_different_lineages_are_not_the_same_state"),
    Mutant("a roll-back that was cut short is forgotten", "recovery.facts.membership",
           'or (s.held.restore == "snapshot" and not s.settled)', "",
           "unit/test_membership.py::test_a_rollback_that_was_cut_short_is_not_over"),
    Mutant("a worker in a long step is killed before it can abort", "recovery.workers.workers",
           "max(turn.policy.timeouts.abort_s, 3 * turn.progress.step_s)", "turn.policy.timeouts.abort_s",
           "unit/test_recovery.py::test_long_steps_are_given_as_long"),
    Mutant("the record of an older generation's failure counts for the newest one", "recovery.knowledge",
           " or broken.generation != view.generation.number:", ":",
           "unit/test_recovery.py::test_the_record_of_an_older_generation_says_nothing_of_the_newest_one"),
    Mutant("a death that is reported late is not the cause", "recovery.facts.evidence",
           "heavier = _weight(more) > _weight(first)", "heavier = False",
           "unit/test_evidence.py::test_a_death_takes_the_place_of_a_failed_collective"),
    Mutant("a planned change replaces a generation that has just broken", "recovery.workers.announce",
           "if slots and here and seen.at_step is not None:", "if False:",
           "unit/test_recovery.py::test_planned_generation_published_over_a_failure_is_reported_broken_too"),
    Mutant("what a lost leader has left open keeps an incident open", "contract.records.incident_fold",
           "open=closer is None and not facts.ends_in,", "open=facts.accounts[0].outcome is Outcome.OPEN,"),
    Mutant("two false alarms of one generation are one incident", "contract.records.incident_fold",
           "if own.repeat == account.repeat:", "if True:",
           "unit/test_incident_fold.py::test_each_incident_has_an_id_and_those_of_one_generation_are_counted"),
    Mutant("a leader does not count the false alarm that it has just closed", "recovery.reporting",
           "return min(last.incident.repeat + 1, KEPT_REPEATS)", "return 0 and (last.incident.repeat)",
           "simulation/test_incidents.py::test_each_of_several_cuts_that_end_has_a_record_of_its_own"),
    Mutant("a cause that is reported after the recovery is not told", "contract.records.incident_fold",
           "reports=tuple(r for r in broken if facts.has(r.generation))", "reports=()",
           "unit/test_incident_fold.py::test_a_death_that_is_reported_late_is_the_cause"),
    Mutant("the end of an incident that its leader did not live to tell is not told", "recovery.reporting",
           "turn.incidents = replace(turn.incidents, unwritten=False)\n    if not any(",
           "turn.incidents = replace(turn.incidents, unwritten=False)\n    if False and any(",
           "unit/test_accounts.py::test_the_next_leader_tells_once_how_an_incident_has_ended_if_the_one_before_did_not"),
    Mutant("the failures of a recovery's earlier generations are not read", "recovery.facts.view",
           "numbers[: RECOVERY_GENERATIONS - 1]", "numbers[:1]"),
    Mutant("a worker that dies on a node while it leaves is not named", "recovery.workers.exits",
           "_report_left_out(turn, worker, detail)", "pass",
           "simulation/test_incidents.py::test_a_worker_that_is_killed_on_the_node_that_leaves_is_named"),
    Mutant("an exclusion that a daemon has set is overwritten", "recovery.facts.restart_budget",
           "sorted({*state.no_agent, *by_failures})", "sorted(by_failures)",
           "unit/test_restart_budget.py::test_node_excluded_by_its_daemon_stays_excluded_on_failures_elsewhere"),
    Mutant("a rank without state is charged beside the failure that it follows from", "recovery.facts.restart_budget",
           "if _follows_from_another(state, broken, before):", "if False:",
           "unit/test_restart_budget.py::test_a_worker_that_finds_no_state_after_a_failure_is_not_charged_again"),
    Mutant("a drained node leaves before the others have stepped", "recovery.workers.leaving",
           "if free and not _is_needed(turn):", "if free:"),
    Mutant("a checkpoint of a course that the job has left counts for a drain", "recovery.workers.leaving",
           "if not generation or turn.progress.settled < worker.synced:", "if True:",
           "unit/test_recovery.py::test_a_checkpoint_of_the_course_that_the_job_has_gone_back_from_does_not_count_for_a_drain"),
    Mutant("an incident is certain of what no agent has reported", "contract.records.incident_fold",
           "return all(set(place.slots) <= _reported(facts, place) for place in closer.absent if not place.back)",
           "return True"),
    Mutant("an exit of before covers the worker that has replaced it", "contract.records.incident_fold",
           "if report.generation == place.generation)", "if report.generation <= place.generation)",
           "unit/test_incident_fold.py::test_the_exit_of_an_earlier_worker_says_nothing_of_the_one_that_replaced_it"),
    Mutant("what an agent that was away writes back sets the numbers back", "recovery.leading",
           "return max(number, 1 + saved.generation, ", "return max(number, ",
           "simulation/test_numbers.py::test_what_an_agent_that_was_away_writes_back_does_not_set_the_numbers_back"),
    Mutant("the causes that only a lost leader has learnt of are dropped", "contract.records.incident_fold",
           "if (cause.generation, cause.node) not in places:", "if False:",
           "simulation/test_incidents.py::test_a_cause_that_only_the_leader_before_has_learnt_of_stays_on_record"),
    Mutant("a death in the generation before that of its own incident is dropped", "contract.records.incident_fold",
           "first = since or min(min(account.failed) for account in members)",
           "first = max(min(account.failed) for account in members)",
           "simulation/test_incidents.py::test_a_death_on_a_node_that_leaves_is_named_by_that_node_if_the_leader_is_lost"),
    Mutant("steps that were lost are counted from the last failure alone", "worker.state.state_source",
           "return max(known)[1]", "return 0"),
)  # fmt: skip


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """While inside, the functions of the module are the wrong ones, for everyone who has imported them."""
    module = importlib.import_module(f"elastic.{mutant.module}")
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    if source.count(mutant.right) < 1:
        raise AssertionError(f"{mutant.name}: not found in {mutant.module}: {mutant.right!r}")
    wrong: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(source.replace(mutant.right, mutant.wrong), module.__file__, "exec"), wrong)
    changed: list[tuple[types.FunctionType, types.CodeType]] = []
    for function, other in _functions(vars(module), wrong):
        if function.__code__ != other.__code__:
            changed.append((function, function.__code__))
            function.__code__ = other.__code__
    assert changed, f"{mutant.name}: nothing is different"
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def _functions(
    right: dict[str, Any] | types.MappingProxyType[str, Any], wrong: dict[str, Any] | types.MappingProxyType[str, Any]
) -> Iterator[tuple[types.FunctionType, types.FunctionType]]:
    name = right.get("__name__", right.get("__module__"))
    for key, value in tuple(right.items()):
        other = wrong.get(key)
        if isinstance(value, staticmethod):
            value, other = value.__func__, getattr(other, "__func__", None)
        if isinstance(value, functools.cached_property):
            value, other = value.func, getattr(other, "func", None)
        if isinstance(value, types.FunctionType) and isinstance(other, types.FunctionType):
            yield value, other
        elif isinstance(value, type) and isinstance(other, type) and value.__module__ == name:
            yield from _functions(vars(value), vars(other))
