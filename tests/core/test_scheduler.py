"""The rule of scheduling, seen from its own methods. What it does to whole runs is in the test_cases files and test_independence.py."""

from typing import Any

import pytest

from minserve.core.batch import StepResult
from minserve.core.block_manager import BlockManager, Share
from minserve.core.request import FinishReason, InvalidRequest, Request, RequestStatus, RequestTooLong, SamplingParams, TokenLogprob
from minserve.core.scheduler import Scheduler, SchedulerConfig


def make_scheduler(num_blocks: int = 16, block_size: int = 4, **config: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**config), BlockManager(num_blocks, block_size))


def make_request(name: str, num_tokens: int = 6, max_total_tokens: int = 10, order: int = 0, **fields: Any) -> Request:
    params = SamplingParams(min_tokens=fields.pop("min_tokens", 0))
    return Request(name, tuple(range(num_tokens)), params, max_total_tokens, order=order, **fields)


def answer(scheduler: Scheduler, token_id: int = 7, **fields: Any) -> Any:
    """Plan a step and give every row that samples the same token."""
    batch = scheduler.schedule(0.0)
    output = scheduler.update(batch, StepResult({r.request.request_id: token_id for r in batch.rows if r.samples}, **fields))
    scheduler.check()
    return output


@pytest.mark.parametrize("name", ["token_budget", "max_running", "max_chunk_tokens"])
def test_a_limit_below_one_is_refused(name: str):
    fields: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        SchedulerConfig(**fields)


def test_a_watermark_below_zero_is_refused():
    with pytest.raises(ValueError, match="watermark_blocks must be at least 0, got -1"):
        SchedulerConfig(watermark_blocks=-1)


def test_a_group_is_queued_as_a_whole_or_not_at_all():
    scheduler = make_scheduler(num_blocks=4)
    with pytest.raises(RequestTooLong, match=r"request b: 17 prompt tokens .* need 5 blocks of 4, the whole pool has 4 \(16 tokens\)"):
        scheduler.add([make_request("a"), make_request("b", num_tokens=17)])
    assert scheduler.waiting == []
    scheduler.add([make_request("a")])
    with pytest.raises(InvalidRequest, match="request id 'a' is already in use"):
        scheduler.add([make_request("c"), make_request("a")])
    assert [r.request_id for r in scheduler.waiting] == ["a"]


def test_the_pool_caps_what_a_request_may_become():
    scheduler = make_scheduler(num_blocks=4)
    small, big = make_request("small", max_total_tokens=10), make_request("big", max_total_tokens=1_000)
    scheduler.add([small, big])
    assert (small.max_total_tokens, big.max_total_tokens) == (10, 17)  # 16 slots, and a last token that is never stored


def test_find_knows_a_request_and_its_samples():
    scheduler = make_scheduler()
    first = make_request("a")
    group = [first, make_request("a#1", order=1, parent=first), make_request("a#2", order=2, parent=first)]
    scheduler.add([*group, make_request("b", order=3)])
    assert scheduler.find("a") == group and scheduler.find("a#1") == group[1:2] and scheduler.find("nope") == []
    answer(scheduler)
    assert set(scheduler.find("a")) == set(group)  # running or waiting


def test_an_empty_engine_plans_an_empty_step():
    batch = make_scheduler().schedule(0.0)
    assert (batch.step, batch.rows, batch.num_tokens, batch.decisions) == (0, (), 0, ())


def test_steps_are_numbered():
    scheduler = make_scheduler()
    assert [scheduler.schedule(0.0).step for _ in range(3)] == [0, 1, 2]


def test_decodes_come_before_chunks_and_chunks_before_newcomers():
    scheduler = make_scheduler(num_blocks=64, token_budget=10)
    scheduler.add([make_request("long", num_tokens=30, max_total_tokens=40)])
    answer(scheduler)
    scheduler.add([make_request("short", num_tokens=3, max_total_tokens=9, order=1, priority=-1)])
    batch = scheduler.schedule(0.0)
    assert [(r.request.request_id, r.start, r.num_tokens, r.samples) for r in batch.rows] == [("long", 10, 10, False)]
    scheduler.update(batch, StepResult({}))
    batch = scheduler.schedule(0.0)  # the long prompt has 10 left: nothing remains for the newcomer
    scheduler.update(batch, StepResult({"long": 7}))
    batch = scheduler.schedule(0.0)
    assert [(r.request.request_id, r.num_tokens) for r in batch.rows] == [("long", 1), ("short", 3)]


def test_a_decode_comes_before_the_chunk_of_an_older_prompt():
    scheduler = make_scheduler(num_blocks=64, token_budget=4, max_chunk_tokens=3)
    scheduler.add([make_request("long", num_tokens=30, max_total_tokens=40)])
    scheduler.add([make_request("short", num_tokens=1, max_total_tokens=9, order=1)])
    answer(scheduler)
    scheduler.config = SchedulerConfig(token_budget=2)
    batch = scheduler.schedule(0.0)
    assert [(r.request.request_id, r.num_tokens) for r in batch.rows] == [("short", 1), ("long", 1)]


def test_the_first_ones_come_first_even_after_a_preemption():
    scheduler = make_scheduler(token_budget=3)
    requests = [make_request(name, num_tokens=1, max_total_tokens=9, order=i) for i, name in enumerate("abc")]
    scheduler.add(requests)
    answer(scheduler)
    scheduler.preempt(requests[0])
    answer(scheduler)  # two decodes leave one token, and "a" needs two
    answer(scheduler)
    assert [r.request_id for r in scheduler.running] == ["b", "c", "a"]
    scheduler.config = SchedulerConfig(token_budget=2)
    assert [r.request.request_id for r in scheduler.schedule(0.0).rows] == ["a", "b"]


def test_what_a_preempted_request_was_to_compute_is_given_to_those_behind():
    scheduler = make_scheduler(num_blocks=32, block_size=2, token_budget=7, max_chunk_tokens=3)
    first, second = (make_request(name, num_tokens=12, max_total_tokens=14, order=i, salt=name) for i, name in enumerate("ab"))
    young = make_request("young", num_tokens=1, max_total_tokens=14, order=2)
    scheduler.add([first, second, young])
    for _ in range(3):
        answer(scheduler)
    assert [r.num_computed_tokens for r in (first, second, young)] == [9, 9, 3]
    holder = make_request("holder", num_tokens=2 * scheduler.blocks.num_free_blocks)
    scheduler.blocks.start(holder, Share())
    scheduler.blocks.grow(holder, holder.num_tokens)
    scheduler.config = SchedulerConfig(token_budget=5, max_chunk_tokens=3)
    batch = scheduler.schedule(0.0)  # 1 for the young one, 3 for the first, who needs its block: 5 - 3 are left for the second
    assert batch.preempted_ids == ("young",)
    assert [(r.request.request_id, r.num_tokens) for r in batch.rows] == [("a", 3), ("b", 2)]


def test_with_whole_answers_reserved_nobody_starts_whose_answer_might_not_fit():
    scheduler = make_scheduler(num_blocks=8, reserve_whole_answers=True)
    requests = [make_request(name, num_tokens=5, max_total_tokens=14, order=i) for i, name in enumerate("abc")]  # 13 stored: 4 blocks
    for number, request in enumerate(requests):
        request.token_ids[:] = range(100 * number, 100 * number + 5)
    scheduler.add(requests)
    batch = scheduler.schedule(0.0)
    assert [row.request.request_id for row in batch.rows] == ["a", "b"]
    assert batch.decisions[-1] == ("c", "waits: needs 4 blocks for its whole answer, 0 free (4 more are promised)")
    assert scheduler.blocks.num_free_blocks == 4  # kept, not held: blocks are still given one by one


def test_without_the_reserve_the_same_three_start_and_one_is_preempted():
    numbers = {}
    for reserve in (False, True):
        scheduler = make_scheduler(num_blocks=8, reserve_whole_answers=reserve)
        requests = [make_request(name, num_tokens=5, max_total_tokens=14, order=i) for i, name in enumerate("abc")]
        for number, request in enumerate(requests):
            request.token_ids[:] = range(100 * number, 100 * number + 5)
        scheduler.add(requests)
        num_steps = 0
        while scheduler.waiting or scheduler.running:
            answer(scheduler)
            num_steps += 1
        numbers[reserve] = (num_steps, sum(r.num_preemptions for r in requests))
        assert all(r.num_tokens == 14 for r in requests)
    assert numbers == {False: (14, 1), True: (18, 0)}


def test_a_prefix_hit_is_no_part_of_the_whole_answers_room():
    scheduler = make_scheduler(num_blocks=6, reserve_whole_answers=True)
    first, second = (make_request(name, num_tokens=9, max_total_tokens=17, order=i) for i, name in enumerate("ab"))
    scheduler.add([first])  # 16 stored: 4 blocks
    answer(scheduler)
    scheduler.add([second])  # 2 of its 4 are the first one's
    batch = scheduler.schedule(0.0)
    assert batch.decisions == (("b", "starts: 1 of 9 tokens, 8 cached"),)
    assert scheduler.blocks.num_used_blocks == 4


def test_an_answer_that_nothing_bounds_is_reserved_as_long_as_the_pool():
    scheduler = make_scheduler(num_blocks=4, reserve_whole_answers=True)
    endless = make_request("endless", num_tokens=6, max_total_tokens=1_000)
    scheduler.add([endless, make_request("next", num_tokens=1, max_total_tokens=2, order=1)])
    assert scheduler.schedule(0.0).decisions[-1] == (
        "next",
        "waits: needs 1 block for its whole answer, 0 free (2 more are promised)",
    )


def test_a_budget_smaller_than_the_decodes_serves_the_first_ones():
    scheduler = make_scheduler(token_budget=2)
    scheduler.add([make_request(name, num_tokens=1, max_total_tokens=4, order=i) for i, name in enumerate("abc")])
    outputs = [answer(scheduler) for _ in range(5)]
    assert [[r.request_id for r, _ in o.tokens] for o in outputs] == [["a", "b"], ["a", "b"], ["a", "b"], ["c"], ["c"]]


def test_update_appends_ends_and_frees():
    scheduler = make_scheduler()
    request = make_request("a", num_tokens=6, max_total_tokens=8, stop_ids=frozenset({9}))
    scheduler.add([request])
    output = answer(scheduler, 7)
    assert output.tokens == ((request, 7),) and output.finished == ()
    assert request.token_ids[6:] == [7] and request.num_computed_tokens == 6
    output = answer(scheduler, 7)
    assert output.finished == (request,) and request.finish_reason is FinishReason.LENGTH
    assert scheduler.running == [] and scheduler.blocks.num_used_blocks == 0


def test_log_probabilities_are_kept_beside_their_tokens():
    scheduler = make_scheduler()
    request = make_request("a")
    scheduler.add([request])
    answer(scheduler, 7, logprobs={"a": TokenLogprob(7, -0.5)})
    assert request.logprobs == [TokenLogprob(7, -0.5)] and request.output_ids == [7]


def test_a_stop_token_ends_the_request_unless_it_comes_too_early():
    scheduler = make_scheduler()
    request = make_request("a", max_total_tokens=20, stop_ids=frozenset({9}), min_tokens=2)
    scheduler.add([request])
    assert answer(scheduler, 9).finished == ()
    assert answer(scheduler, 9).finished == (request,)
    assert request.finish_reason is FinishReason.STOP and request.output_ids == [9, 9]


def test_the_last_token_that_also_stops_is_a_stop():
    scheduler = make_scheduler()
    request = make_request("a", num_tokens=6, max_total_tokens=7, stop_ids=frozenset({9}))
    scheduler.add([request])
    answer(scheduler, 9)
    assert request.finish_reason is FinishReason.STOP


def test_an_error_in_place_of_a_token_ends_only_its_own_request():
    scheduler = make_scheduler(token_budget=8)
    chunk, whole = make_request("chunk", num_tokens=12, max_total_tokens=14, order=1), make_request("whole", num_tokens=3)
    scheduler.add([whole, chunk])
    output = answer(scheduler, errors={"chunk": "NaN"})  # in the middle of its prompt
    assert output.finished == (chunk,) and output.tokens == ((whole, 7),)
    assert (chunk.finish_reason, chunk.error) == (FinishReason.ERROR, "NaN")


def test_a_step_that_fails_ends_those_in_it_and_nobody_else():
    scheduler = make_scheduler(max_running=1)
    inside, outside = make_request("inside"), make_request("outside", order=1)
    scheduler.add([inside, outside])
    batch = scheduler.schedule(0.0)
    output = scheduler.fail(batch, "RuntimeError: no")
    scheduler.check()
    assert output.finished == (inside,) and output.tokens == ()
    assert (inside.finish_reason, inside.error) == (FinishReason.ERROR, "RuntimeError: no")
    assert scheduler.waiting == [outside] and scheduler.blocks.num_free_blocks == 16 and scheduler.blocks.num_idle_blocks == 0
    answer(scheduler)
    assert outside.num_output_tokens == 1


def test_a_failed_step_does_not_end_again_what_had_ended_during_it():
    scheduler = make_scheduler()
    gone, stays = make_request("gone", num_tokens=3), make_request("stays", order=1)
    scheduler.add([gone, stays])
    batch = scheduler.schedule(0.0)
    scheduler.finish(gone, FinishReason.ABORT)
    assert scheduler.fail(batch, "no").finished == (stays,)
    assert gone.finish_reason is FinishReason.ABORT and gone.error is None


def test_finishing_twice_changes_nothing():
    scheduler = make_scheduler()
    waiting, running = make_request("waiting", order=1), make_request("running")
    scheduler.add([running])
    answer(scheduler)
    scheduler.add([waiting])
    for request in (waiting, running):
        scheduler.finish(request, FinishReason.ABORT)
        scheduler.finish(request, FinishReason.ERROR, "too late")
        assert request.status is RequestStatus.FINISHED
        assert (request.finish_reason, request.error) == (FinishReason.ABORT, None)
        scheduler.check()


def test_the_batch_counts_the_blocks_that_are_held_while_it_runs():
    scheduler = make_scheduler()
    scheduler.add([make_request("a", num_tokens=9, max_total_tokens=10)])
    batch = scheduler.schedule(0.0)
    assert (batch.num_used_blocks, batch.num_idle_blocks) == (3, 0)
    scheduler.update(batch, StepResult({"a": 7}))  # its only token: it ends
    assert scheduler.blocks.num_used_blocks == 0
    batch = scheduler.schedule(0.0)
    assert (batch.num_used_blocks, batch.num_idle_blocks) == (0, 2)


# --- check() itself: each law is broken once --------------------------------------------------------


def busy_scheduler() -> tuple[Scheduler, Request, Request]:
    """One runs, one waits."""
    scheduler = make_scheduler(max_running=1)
    running, waiting = make_request("running"), make_request("waiting", order=1)
    scheduler.add([running, waiting])
    answer(scheduler)
    return scheduler, running, waiting


def test_check_sees_a_request_in_both_queues():
    scheduler, running, _ = busy_scheduler()
    scheduler.waiting.append(running)
    with pytest.raises(AssertionError, match=r"in both queues: \['running'\]"):
        scheduler.check()


def test_check_sees_a_request_that_is_queued_twice():
    scheduler, _, waiting = busy_scheduler()
    scheduler.waiting.append(waiting)
    with pytest.raises(AssertionError, match="a request is queued twice"):
        scheduler.check()


def test_check_sees_a_line_out_of_order():
    scheduler, _, _ = busy_scheduler()
    scheduler.waiting.append(make_request("early", order=-1))
    with pytest.raises(AssertionError, match="the waiting line is out of order"):
        scheduler.check()


def test_check_sees_a_request_that_cannot_be_found():
    scheduler, _, _ = busy_scheduler()
    del scheduler._families["waiting"]
    with pytest.raises(AssertionError, match=r"queued: \['running', 'waiting'\], known: \['running'\]"):
        scheduler.check()


def test_check_sees_blocks_of_one_who_waits():
    scheduler, _, waiting = busy_scheduler()
    scheduler.blocks.start(waiting, scheduler.blocks.find_fork(scheduler.running[0], 5))
    with pytest.raises(AssertionError, match="waiting waits and holds 2 blocks"):
        scheduler.check()


def test_check_sees_blocks_for_tokens_that_were_never_computed():
    scheduler, running, _ = busy_scheduler()
    scheduler.blocks.grow(running, 9)
    with pytest.raises(AssertionError, match="running has computed 6 tokens and holds 3 blocks"):
        scheduler.check()


def test_check_sees_blocks_that_are_held_by_nobody_in_the_queues():
    scheduler, running, _ = busy_scheduler()
    scheduler.running.remove(running)
    with pytest.raises(AssertionError, match="nothing runs, yet 2 blocks are held"):
        scheduler.check()
