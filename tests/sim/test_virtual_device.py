"""A device with a size: what does not fit is refused with its numbers, and each trouble has a cure that makes another one worse."""

import math

import pytest

from minserve.core.metrics import Summary
from minserve.core.request import FinishReason
from minserve.sim.cost_model import CostModel
from minserve.sim.devices import DEVICES
from minserve.sim.shapes import SHAPES
from minserve.sim.simulator import simulate
from minserve.sim.virtual_device import MemoryRunner, Neighbour, OutOfDeviceMemory, VirtualDevice, start_engine
from minserve.sim.workload import Lengths, make_workload

THIRTEEN = SHAPES["llama-2-13b"]
CARD_80, CARD_40 = CostModel(THIRTEEN, DEVICES["a100-80gb"]), CostModel(THIRTEEN, DEVICES["a100-40gb"])
LOAD = make_workload(40, Lengths.constant(1500), Lengths.exponential(60, 200), seed=0)


def serve(cost: CostModel, **settings: object) -> tuple[Summary, int, MemoryRunner]:
    """The run's summary, how many requests ended with an error, and the runner."""
    engine = start_engine(cost, **settings)  # pyright: ignore[reportArgumentType]
    trace = simulate(engine, LOAD)
    runner = engine.runner
    assert isinstance(runner, MemoryRunner)
    reasons = [record.finish_reason for record in trace.requests.values()]
    return trace.summary(), reasons.count(FinishReason.ERROR), runner


def test_a_device_refuses_what_does_not_fit_and_says_who_holds_the_rest() -> None:
    device = VirtualDevice(80e9)
    device.take("weights", 26e9)
    device.take("KV pool", 43e9)
    with pytest.raises(OutOfDeviceMemory, match=r"activations needs 11.50 GB, 11.00 of 80 GB are free .*weights 26.0, KV pool 43.0"):
        device.take("activations", 11.5e9)
    assert device.held == {"weights": 26e9, "KV pool": 43e9} and device.free_bytes == 11e9
    device.give_back("KV pool")
    device.give_back("nobody")
    assert device.used_bytes == 26e9


def test_the_start_fails_with_too_small_a_fraction_and_a_greater_one_cures_it() -> None:
    for fraction in (0.6, 0.5):  # the opposite move, and further
        with pytest.raises(OutOfDeviceMemory, match=f"{fraction:.0%} of the memory, less 26.0 GB of weights"):
            start_engine(CARD_40, memory_fraction=fraction)
    summary, num_failed, _ = serve(CARD_40, memory_fraction=0.9)
    assert summary.num_finished == 40 and num_failed == 0


def test_a_step_fails_with_too_great_a_fraction_and_a_smaller_one_cures_it() -> None:
    failed = {fraction: serve(CARD_80, memory_fraction=fraction, reserve_bytes=0.0, token_budget=16384)[1] for fraction in (0.9, 0.98, 1.0)}
    assert failed[0.9] == 0 < failed[0.98] <= failed[1.0]
    _, num_failed, runner = serve(CARD_80, memory_fraction=0.98, reserve_bytes=0.0, token_budget=1024)  # or: smaller steps
    assert num_failed == 0 and runner.num_failed_steps == 0
    # An engine that tries its largest step at the start needs no luck.
    _, num_failed, runner = serve(CARD_80, memory_fraction=1.0, token_budget=16384)
    assert num_failed == 0 and 70e9 < runner.peak_bytes <= 80e9


def test_a_failed_step_ends_its_requests_with_the_numbers_and_loses_no_block() -> None:
    engine = start_engine(CARD_80, memory_fraction=0.99, reserve_bytes=0.0, token_budget=16384)
    requests = [request for _, arguments in LOAD.arrivals() for request in engine.add(**arguments)]
    engine.step()
    failed = [request for request in requests if request.error]
    assert failed and all(f"of {80} GB are free" in str(request.error) for request in failed)
    engine.run()
    engine.scheduler.check()
    assert all(request.is_finished for request in requests) and engine.scheduler.blocks.num_used_blocks == 0


def test_on_a_shared_card_the_fraction_must_leave_the_neighbour_his_share() -> None:
    neighbours = (Neighbour("notebook", 30e9),)
    for fraction in (0.9, 0.95):
        with pytest.raises(OutOfDeviceMemory, match=r"KV pool needs .*held in GB: notebook 30.0"):
            start_engine(CARD_80, neighbours=neighbours, memory_fraction=fraction)
    for cure in ({"memory_fraction": 0.6}, {"of_free_memory": True}):
        summary, num_failed, _ = serve(CARD_80, neighbours=neighbours, **cure)
        assert summary.num_finished == 40 and num_failed == 0


def test_a_neighbour_who_comes_later_takes_what_the_activations_needed() -> None:
    guest = Neighbour("guest", math.inf, start_s=0.5, end_s=2.0)
    _, num_failed, runner = serve(CARD_80, neighbours=(guest,))
    assert num_failed > 0 and runner.num_failed_steps > 0
    _, num_failed, runner = serve(CARD_80, neighbours=(Neighbour("guest", 4e9, 0.5, 2.0),))  # fits beside the fraction
    assert num_failed == 0 and runner.num_failed_steps == 0
    assert "guest" not in runner.device.held  # gone again
