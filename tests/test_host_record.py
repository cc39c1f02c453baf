"""The record of host times: what is made of its numbers, and how it is read. A small sample stands in tests/data."""

import json
from pathlib import Path

import pytest

from minserve.host_record import HOST_PARTS, PARTS, HostRecord, cost_table, describe_need, read_record, step_table, write_record

SAMPLE = Path(__file__).parent / "data" / "host_time.json"


@pytest.fixture(scope="module")
def record() -> HostRecord:
    return read_record(SAMPLE)


def test_it_is_read_as_it_is_written(record: HostRecord, tmp_path: Path) -> None:
    write_record(record, tmp_path / "again.json")
    assert read_record(tmp_path / "again.json") == record
    assert json.loads((tmp_path / "again.json").read_text(encoding="utf-8")) == json.loads(SAMPLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", ["[]", "{}", "not json", '{"steps": [{"ms": 1}], "loads": [], "costs": []}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.json: not a record of minserve bench --host"):
        read_record(path)


def test_shares_of_a_step(record: HostRecord) -> None:
    step = record.step(8)
    assert list(step.parts_ms) == list(PARTS) and step.step_ms == pytest.approx(sum(step.parts_ms.values())) == 50.0
    assert step.share("model") == pytest.approx(0.9) and step.share("policy", "schedule", "pool") == pytest.approx(0.004)
    assert step.share(*HOST_PARTS) == pytest.approx(0.08)
    assert record.step(8, "decode").step_ms == 40.0


def test_rates_and_what_a_call_would_have_to_cost(record: HostRecord) -> None:
    load = record.load(8)
    assert (load.step_s, load.calls_per_step, load.calls_per_s) == (0.05, 4.0, 80.0)
    # x us in each of 4 calls, on top of 50 ms, are 5 % of it all if 4 x = 0.05 (50 ms + 4 x)
    needed_us = load.call_us(0.05)
    assert 4e-6 * needed_us / (0.05 + 4e-6 * needed_us) == pytest.approx(0.05) and needed_us == pytest.approx(657.9, abs=0.1)
    assert load.call_us(0.05, calls_per_step=400) == pytest.approx(needed_us / 100)


def test_what_a_way_costs(record: HostRecord) -> None:
    pool, moved = record.cost(8, "pool"), record.cost(8, "moved when it grows")
    assert pool.us_per_call == 5.0 and record.share(pool) == pytest.approx(0.02 / 50)  # the pool's calls are in the step
    assert record.share(moved) == pytest.approx(1.0 / 51)  # those of another way come on top
    assert record.share(moved, written=True) == pytest.approx(5.0 / 55)  # 5.1 ms less the pool's 0.1
    assert record.share(pool, written=True) == 0.0


def test_in_words(record: HostRecord) -> None:
    lines = step_table(record.steps).splitlines()
    assert lines[0].split() == ["batch,", "steps", "8", "all", "8", "decode"] and lines[1].split()[-2:] == ["50.00", "40.00"]
    assert "model" in lines[6] and "90.00 %" in lines[6] and lines[-1].split()[-4:-2] == ["8.00", "%"]
    assert "9.09 %" in cost_table(record).splitlines()[2]
    words = describe_need(record, 8)
    assert "80 blocks a second taken or given back, 4.00 in a step of 50.0 ms. For 5 % or 15 % of it, a call would have to take " in words
    assert "658 or 2,206 us; the pool takes 5.00 us, 0.040 %" in words
