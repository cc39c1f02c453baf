"""A snapshot is a true copy of queues and pool, and stays what it was."""

from minserve.core.request import SamplingParams
from minserve.core.snapshot import RequestState, Snapshot, take_snapshot
from tests.oracle import add_one, before_steps, make_engine, step_checked


def snapshot_of_two_who_share() -> tuple[Snapshot, Snapshot]:
    """Two requests with the same first block, a third that waits; during step 1 and after it."""
    engine = make_engine(7, 4, max_running=2, token_budget=9, watermark_blocks=1)
    add_one(engine, range(6), 3, request_id="a")
    add_one(engine, [*range(4), 9, 9, 9], 2, request_id="b")
    add_one(engine, range(50, 53), 2, request_id="c")
    step_checked(engine)
    seen: list[Snapshot] = []
    before_steps(engine, lambda batch: seen.append(take_snapshot(engine.scheduler, batch.copies)))
    step_checked(engine)
    return seen[0], take_snapshot(engine.scheduler)


def test_a_snapshot_has_the_queues_and_the_pool():
    during, _ = snapshot_of_two_who_share()
    assert during == Snapshot(
        num_blocks=7,
        block_size=4,
        token_budget=9,
        watermark_blocks=1,
        running=(RequestState("a", 6, 7, 6, (0, 1)), RequestState("b", 7, 8, 7, (0, 2))),
        waiting=(RequestState("c", 3, 3, 0, ()),),
        ref_counts=(2, 1, 1, 0, 0, 0, 0),
        free=(3, 4, 5, 6),
        idle=(),
        cached=(0, 2),
    )
    assert during.owners(0) == ("a", "b") and during.owners(2) == ("b",) and during.owners(6) == ()


def test_a_snapshot_is_a_copy():
    during, after = snapshot_of_two_who_share()
    assert [state.num_computed_tokens for state in during.running] == [6, 7]
    assert [state.request_id for state in after.running] == ["a"]  # b has ended, its full block stays known
    assert (after.ref_counts, after.idle, after.cached) == ((1, 1, 0, 0, 0, 0, 0), (2,), (0, 2))


def test_free_blocks_are_in_the_order_in_which_they_are_taken():
    engine = make_engine(6, 4, prefix_caching=False)
    add_one(engine, range(5), 1)
    add_one(engine, range(3), 9)
    step_checked(engine)
    before = take_snapshot(engine.scheduler)
    add_one(engine, range(9), 1, request_id="next")
    seen: list[Snapshot] = []
    before_steps(engine, lambda batch: seen.append(take_snapshot(engine.scheduler)))
    step_checked(engine)
    [table] = [state.block_ids for state in seen[0].running if state.request_id == "next"]
    assert table == before.free[:3] and seen[0].free == before.free[3:]


def test_copies_of_the_step_are_in_its_snapshot():
    engine = make_engine(8, 4)
    engine.add(list(range(6)), SamplingParams(max_tokens=3, n=2, temperature=1.0))
    seen: list[Snapshot] = []
    before_steps(engine, lambda batch: seen.append(take_snapshot(engine.scheduler, batch.copies)))
    step_checked(engine)
    step_checked(engine)
    assert seen[0].copies == () and len(seen[1].copies) == 1
    [(source, target)] = seen[1].copies
    assert seen[1].ref_counts[source] == seen[1].ref_counts[target] == 1
