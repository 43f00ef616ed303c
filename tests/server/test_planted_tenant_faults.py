"""Faults by which one caller harms another, each of which an ordinary test finds and names.

The checks are the tests themselves, which find nothing where nothing is planted. docs/security.md lists the faults.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from server import test_desks, test_front_end, test_reading
from sightline.server.desks.pool import DeskLostError
from sightline.server.desks.protocol import FormName
from sightline.testing.simulator.simulation import Violation
from support import local_front_end, pause_bugs, tenant_faults
from support.tiny_models import make_model
from testing.simulator import test_planted_bugs, test_scripts

pytestmark = pytest.mark.prove
Check: TypeAlias = Callable[..., None]
PATIENCE = 15.0
"""Seconds until a request counts as unanswered. A desk must start within them."""
SCORED = next(script for script in test_scripts.SCRIPTS if script.stem == "a_scored_prompt_beside_rows_that_generate")

lengths = test_desks.test_lengths_are_checked_before_a_text_is_tokenised
costs = test_front_end.test_the_cost_of_a_request_is_limited_on_every_route_that_uses_the_engine
strictness = test_front_end.test_unknown_fields_are_refused_on_every_route_that_reads_a_body
scripted = partial(test_scripts.test_a_script_plays_to_its_end, SCORED)
turns = test_desks.test_callers_take_turns
keys = test_front_end.test_desks_and_places_are_shared_by_key_however_many_connections_one_has
leavers = test_desks.test_a_job_whose_client_is_gone_is_passed_over
lost_desk = partial(test_desks.test_a_desk_that_fails_is_replaced_and_its_job_answered, "die", DeskLostError)
lying_desk = partial(test_desks.test_a_desk_that_fails_is_replaced_and_its_job_answered, "lie", DeskLostError)
lost_engine = test_front_end.test_whoever_waits_is_told_when_the_engine_process_is_lost
own_results = test_desks.test_every_job_gets_its_own_result
own_tickets = test_front_end.test_every_request_is_answered_from_its_own_order_and_its_own_ticket
own_streams = test_front_end.test_streams_that_run_together_have_their_own_texts
token_texts = partial(test_desks.test_tokens_of_a_scored_prompt_have_the_texts_of_the_served_tokenizer, FormName.CHAT)
slow_reader = partial(
    test_reading.test_a_client_that_reads_nothing_stops_its_own_request_and_gets_all_of_it_when_it_reads,
    in_flight=False,
    n=1,
    limit=test_reading.REPORTS,
)
grown = test_reading.test_a_window_of_large_reports_is_full_soon_and_grows_with_what_is_read
resumed = test_reading.test_a_resumed_request_sends_only_what_is_left_of_its_window
handled = test_reading.test_a_report_that_its_reader_still_handles_is_not_read
unread = test_front_end.test_a_stream_that_nobody_reads_stops_at_its_window
admitted = test_front_end.test_jobs_that_wait_for_a_desk_are_as_many_as_are_admitted
refused = partial(test_front_end.test_a_refused_body_leaves_nothing_held, False)
departed = partial(test_front_end.test_a_client_that_leaves_in_any_phase_leaves_nothing_held, False)
read_stream = test_front_end.test_a_stream_that_is_read_gives_its_bytes_back
whole_beyond = partial(test_front_end.test_an_answer_for_which_there_is_no_room_ends_alone_and_leaves_nothing, False)
stream_beyond = partial(test_front_end.test_an_answer_for_which_there_is_no_room_ends_alone_and_leaves_nothing, True)
written_beyond = test_front_end.test_a_written_answer_for_which_there_is_no_room_is_refused


class Fault(NamedTuple):
    plant: Callable[[pytest.MonkeyPatch], None]
    check: Check
    finding: str
    """What the check says of it."""


FAULTS = {
    "length check skipped for texts that are cut": Fault(
        tenant_faults.skip_the_length_of_texts_that_are_cut, lengths, "any length is tokenised for embed"
    ),
    "length check skipped for texts without special tokens": Fault(
        tenant_faults.skip_the_length_of_texts_without_special_tokens, lengths, "any length is tokenised for tokenize"
    ),
    "length check skipped for conversations": Fault(
        tenant_faults.skip_the_length_of_conversations, lengths, "any length is tokenised for chat"
    ),
    "cost check skipped for conversations": Fault(
        tenant_faults.skip_the_cost_of_conversations, costs, "the cost of /v1/chat/completions is not limited"
    ),
    "cost check skipped for texts to embed": Fault(
        tenant_faults.skip_the_cost_of_texts_to_embed, costs, "the cost of /v1/embeddings is not limited"
    ),
    "unknown fields let in": Fault(tenant_faults.allow_unknown_fields_at_the_desk, strictness, "is let in"),
    "time budget ignored for scored prompts": Fault(
        test_planted_bugs.ignore_the_time_of_scored_prompts, scripted, "a step with rows that generate costs"
    ),
    "unbounded queue of jobs": Fault(tenant_faults.queue_jobs_without_a_place, admitted, "the queue has no bound"),
    "unbounded queue of reports": Fault(
        test_reading.let_the_queue_grow, slow_reader, "more reports wait than the window holds"
    ),
    "stream without a window": Fault(tenant_faults.give_streams_no_window, unread, "an answer runs on unread"),
    "unread count lost on resume": Fault(
        tenant_faults.forget_unread_reports_on_resume, resumed, "forgotten when a request is resumed"
    ),
    "window by reports alone": Fault(
        tenant_faults.let_a_window_hold_reports_of_any_size, grown, "large reports fill no window"
    ),
    "window that grows at once": Fault(
        tenant_faults.let_a_window_grow_at_once, grown, "a client that has read nothing has a large window"
    ),
    "report acknowledged before its event is sent": Fault(
        tenant_faults.acknowledge_reports_before_they_are_sent, handled, "acknowledged before its event is sent"
    ),
    "written answers not counted": Fault(
        tenant_faults.send_answers_without_counting_them, written_beyond, "an answer beyond the budget is sent"
    ),
    "reports not counted": Fault(tenant_faults.count_no_reports, whole_beyond, "an answer beyond the budget is sent"),
    "fairness by connection: turns": Fault(tenant_faults.take_turns_by_connection, turns, "callers do not take turns"),
    "fairness by connection: desks": Fault(
        tenant_faults.give_desks_by_connection, keys, "one key's connections have all desks"
    ),
    "fairness by connection: places": Fault(
        tenant_faults.give_places_by_connection, keys, "one key's connections hold"
    ),
    "one caller fills the room": Fault(
        tenant_faults.let_one_caller_fill_the_room, keys, "one key's connections hold 8"
    ),
    "turn kept by a client that left": Fault(
        tenant_faults.keep_the_turn_of_a_client_that_left, leavers, "the next job of a caller whose client left"
    ),
    "turn kept by a desk that was lost": Fault(
        tenant_faults.keep_the_turn_of_a_lost_desk, lost_desk, "a desk for caller b after another was replaced"
    ),
    "paused row never resumed": Fault(
        pause_bugs.never_resume_a_paused_row, slow_reader, "a request that was read is not resumed"
    ),
    "window never opened again": Fault(
        test_reading.never_resume, slow_reader, "a request that was read is not resumed"
    ),
    "slow reader pauses everybody": Fault(
        test_reading.pause_everybody, slow_reader, "the other one waits for a client that reads nothing"
    ),
    "page leak of a paused row": Fault(
        pause_bugs.leak_the_pages_of_a_paused_row, slow_reader, "of a paused request are left behind"
    ),
    "desk's answer given to another request": Fault(
        tenant_faults.give_a_result_to_the_next_job, own_results, "a job got another's result"
    ),
    "desk's result taken without comparing its number": Fault(
        tenant_faults.believe_any_number_of_a_result, lying_desk, "after its desk did 'lie'"
    ),
    "tickets of two requests swapped": Fault(
        tenant_faults.swap_the_tickets_of_two_requests, own_tickets, "another request's answer"
    ),
    "engine's report given to another request": Fault(
        tenant_faults.give_reports_to_the_request_before, own_streams, "another request's answer"
    ),
    "token texts of another tokenizer": Fault(
        tenant_faults.name_tokens_by_another_tokenizer, token_texts, "texts of another tokenizer"
    ),
    "killed desk's request unanswered": Fault(
        tenant_faults.leave_the_job_of_a_killed_desk_unanswered, lost_desk, "an answer to the job of a desk that fails"
    ),
    "killed engine's requests unanswered": Fault(
        tenant_faults.leave_the_requests_of_a_lost_engine_unanswered, lost_engine, "an answer to every request"
    ),
    "places and bytes kept after a refused body": Fault(
        tenant_faults.keep_the_places_of_refused_bodies, refused, "a refused body of /v1/chat/completions leaves"
    ),
    "bytes of a stream never given back": Fault(
        tenant_faults.keep_the_bytes_that_a_stream_has_sent, read_stream, "of a stream that is read are not given back"
    ),
    "bytes kept after an answer without room": Fault(
        tenant_faults.keep_the_bytes_of_an_answer_without_room, stream_beyond, "an answer without room leaves"
    ),
    "answer without room goes on in the engine": Fault(
        tenant_faults.go_on_with_an_answer_without_room, stream_beyond, "the engine still works on an answer"
    ),
    "answer of a client that left goes on in the engine": Fault(
        tenant_faults.go_on_for_a_client_that_left, departed, "a client that left leaves"
    ),
}
CHECKS = {fault.check: name for name, fault in FAULTS.items()}
"""With the last fault that each finds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


def run(check: Check, request: pytest.FixtureRequest) -> None:
    """Runs a test with its fixtures."""
    wanted = [name for name, each in signature(check).parameters.items() if each.default is Parameter.empty]
    fixtures: dict[str, Any] = {name: request.getfixturevalue(name) for name in wanted}
    check(**fixtures)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    monkeypatch.setattr(local_front_end, "PATIENCE", PATIENCE)
    fault.plant(monkeypatch)
    with pytest.raises((AssertionError, Violation)) as caught:
        run(fault.check, request)
    assert fault.finding in str(caught.value)


@pytest.mark.parametrize("check", CHECKS, ids=CHECKS.get)
def test_a_check_finds_nothing_where_nothing_is_planted(check: Check, request: pytest.FixtureRequest) -> None:
    run(check, request)


def test_the_page_on_security_names_the_check_of_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    section = page.split("## Planted faults")[1].split("## ")[0]
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", section))
    checks = {(check.func if isinstance(check, partial) else check).__name__ for check in CHECKS}
    assert {check for check in checks if not any(part in check for part in named)} == set()
    assert {part for part in named if not any(part in check for check in checks)} == set()
