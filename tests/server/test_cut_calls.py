"""A call that is not whole is told as such behind whole ones, and before text that follows it."""

from __future__ import annotations

from sightline.core.conversation import AnswerEvent, EventKind
from support.faces import ARGUMENTS, CALL, CALL_REST, TEXT, named_events, run
from support.local_front_end import Script, local_front_end

CUT = (AnswerEvent(EventKind.CALL, call=1, call_id="call_2", name="look"), AnswerEvent(ARGUMENTS, '{"at"', 1))
SCRIPT = Script([[*CALL, *CALL_REST], CUT, [AnswerEvent(TEXT, "nope")]], "stop")


def test_only_a_whole_call_is_completed_in_a_response() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            front_end.engine.script = SCRIPT
            answers = [
                await front_end.ask("/v1/responses", {"input": "Hi", "stream": stream}).answer()
                for stream in (False, True)
            ]
            for told in (answers[0].value, named_events(answers[1].body)[-1]["response"]):
                assert told["status"] == "completed"
                assert [item["status"] for item in told["output"]] == ["completed", "incomplete", "completed"]

    run(work)


def test_only_a_whole_call_has_an_input_in_a_message() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            front_end.engine.script = SCRIPT
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
            answer = (await front_end.ask("/v1/messages", body).answer()).value
            assert [block.get("input") for block in answer["content"]] == [{"at": 1}, {}, None]
            assert answer["stop_reason"] == "end_turn"

    run(work)
