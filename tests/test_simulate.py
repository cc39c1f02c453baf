"""`minserve simulate`: words that become the right parts, a table, a JSON that can be read back, errors with numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minserve import cli
from minserve.core.controllers import ShrinkWhenQueued
from minserve.core.policies import FirstComeFirstServed, LengthBuckets, SizeCap, StaticBatches, TimeoutBatches
from minserve.core.policy_names import POLICY_NAMES
from minserve.core.slo import SloAdmission
from minserve.sim.runner import PaddedRunner, SimulatedRunner
from minserve.sim.workload import TRACES, ClosedLoop, MultiTurn
from minserve.simulate import Settings, make_cost, make_engine, make_load, parse_lengths

FEW = ["--num-requests", "30", "--output", "uniform:5:50"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def result_of(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, Any]:
    run(capsys, *arguments, "--json", str(path))
    return json.loads(path.read_text(encoding="utf-8"))


# --- the command -------------------------------------------------------------------------------------


def test_the_table_and_the_json_tell_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    out = run(capsys, *FEW, "--rate", "4", "--json", str(path), "--slo-ttft-ms", "500")
    result = json.loads(path.read_text(encoding="utf-8"))
    summary, requests = result["summary"], result["requests"]
    assert f"| {summary['num_output_tokens']:,} " in out and "30 of 30 finished" in out
    assert f"{summary['output_tokens_per_s']:,.0f} output" in out
    assert f"{result['share_within_slo']:.1%} of the requests are within the limits" in out
    assert result["settings"]["model"] == "llama-2-13b" and result["settings"]["rate"] == 4.0 and result["num_blocks"] == 3278
    assert len(requests) == 30 and sum(r["num_output_tokens"] for r in requests) == summary["num_output_tokens"]
    within = sum(r["ttft_s"] <= 0.5 for r in requests) / 30
    assert result["share_within_slo"] == pytest.approx(within)
    assert all(r["ttft_s"] == pytest.approx(r["token_times_s"][0] - r["arrival_s"]) for r in requests)


def test_the_same_seed_gives_the_same_run_and_another_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    one, two = (result_of(capsys, path, *FEW, "--seed", "7") for _ in range(2))
    assert one == two
    assert one["summary"] != result_of(capsys, path, *FEW, "--seed", "8")["summary"]


def test_without_torch(tmp_path: Path):
    code = (
        "import sys, minserve.cli\n"
        "assert minserve.cli.main(['simulate', '--num-requests', '3', '--output', '5']) == 0\n"
        "assert not {'torch', 'matplotlib'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "3 of 3 finished" in done.stdout


def test_policies_by_their_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    rates = {
        policy: result_of(capsys, path, *FEW, "--policy", policy, "--batch-size", "8")["summary"]["output_tokens_per_s"]
        for policy in ("padded", "static", "continuous")
    }
    assert list(rates.values()) == sorted(rates.values()) and rates["continuous"] > 1.5 * rates["padded"]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_by_its_bare_name(capsys: pytest.CaptureFixture[str], name: str):
    limits = ["--slo-ttft-ms", "2000", "--slo-tpot-ms", "100"]
    assert "12 of 12 finished, in " in run(capsys, "--num-requests", "12", "--output", "6", "--rate", "20", "--policy", name, *limits)


def test_who_is_sent_away_is_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, load = tmp_path / "out.json", [*FEW, "--slo-ttft-ms", "600"]
    out = run(capsys, *load, "--policy", "slo:tpot_ms=60", "--json", str(path))
    result = json.loads(path.read_text(encoding="utf-8"))
    shed = [record["request_id"] for record in result["requests"] if record["finish_reason"] == "shed"]
    assert 5 < len(shed) < 30 and result["summary"]["num_shed"] == len(shed)
    assert f"{30 - len(shed)} of 30 finished, {len(shed)} sent away, in " in out
    assert f"{len(shed)} requests were sent away: {shed[-1]} is sent away: its first token" in out
    assert result["share_within_slo"] > 1.5 * result_of(capsys, path, *load)["share_within_slo"]  # all 30 at once: most are late


def test_slots_cost_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, load = tmp_path / "out.json", ["--num-requests", "60", "--prompt", "512", "--output", "uniform:50:200"]
    slots = result_of(capsys, path, *load, "--pool", "slots", "--slot-tokens", "2048")
    paged = result_of(capsys, path, *load)
    assert (slots["num_blocks"], slots["block_size"]) == (25, 2048)
    assert paged["summary"]["output_tokens_per_s"] > 1.2 * slots["summary"]["output_tokens_per_s"]


def test_pools_of_devices_beside_as_many_that_do_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    options = ["--model", "llama-3.1-8b", "--rate", "8", "--num-requests", "80", "--slo-tpot-ms", "16", "--disaggregate", "1:1"]
    out = run(capsys, *options, "--link-gb-s", "25", "--json", str(path))
    result = json.loads(path.read_text(encoding="utf-8"))
    mixed, pools = result["2 mixed"], result["1:1"]
    assert "| 2 mixed " in out and "| 1:1 " in out and "link: 25 GB/s for 0.13 MB per prompt token" in out
    assert pools["summary"]["itl_p99_s"] < mixed["summary"]["itl_p99_s"] / 5
    assert pools["share_within_slo"] > mixed["share_within_slo"]
    assert pools["summary"]["num_output_tokens"] == mixed["summary"]["num_output_tokens"]
    assert len(pools["transfers"]) == 80 and not mixed["transfers"] and 0 < pools["link_busy_share"] < 0.1
    slow = result_of(capsys, path, *options, "--link-gb-s", "0.5")["1:1"]
    assert slow["share_within_slo"] < mixed["share_within_slo"]


def test_a_timeline_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    out = run(capsys, *FEW, "--figure", str(tmp_path / "t.png"))
    assert "timeline: " in out and (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_who_is_too_long_is_counted(capsys: pytest.CaptureFixture[str]):
    out = run(capsys, "--num-requests", "30", "--lengths", "azure-code", "--output", "5")
    assert "requests were refused: they are longer than the model or its pool allows" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "a1000"], "no device 'a1000': give a file that `minserve calibrate` wrote, or one of a100-80gb"),
        (["--model", "llama-9"], "no model 'llama-9': give a config.json, or one of smollm2-135m"),
        (["--model", "llama-3.1-70b"], "llama-3.1-70b does not fit: 90% of 1 x 80 GB, less 141.1 GB of bf16 weights"),
        (["--policy", "magic"], "no policy 'magic'. Known: continuous, static, timeout"),
        (["--policy", "cap:size=8"], "policy 'cap' has no key 'size'"),
        (["--policy", "slo"], "policy 'slo' needs ttft_ms and tpot_ms"),
        (["--pool", "swimming"], "pool 'swimming' is not known; known: paged, slots"),
        (["--arrivals", "never"], "arrivals 'never' is not known; known: all-at-once, poisson, gamma, closed"),
        (["--arrivals", "gamma"], "gamma arrivals need a --rate in requests per second"),
        (["--rate", "-1"], "requests arrive at a rate above 0 per second, got -1.0"),
        (["--lengths", "chat"], "lengths 'chat' is not known; known: azure-chat, azure-code, mooncake"),
        (["--prompt", "uniform:5"], "lengths 'uniform:5' are not understood; the forms are 512, uniform:LOW:HIGH"),
        (["--output", "many"], "lengths 'many' are not understood"),
        (["--prompt", "5000"], "all 200 requests were refused"),
        (["--weights", "int3"], "weight format 'int3' is not known; examples: int8, int4"),
        (["--tensor-parallel", "3"], "40 query heads cannot be shared evenly by 3 devices"),
        (["--slots", "64", "--pool", "slots", "--slot-tokens", "2048"], "64 slots of 2,048 tokens do not fit beside the weights, 25 do"),
        (["--disaggregate", "two"], "--disaggregate takes two counts, as in 1:1"),
        (["--disaggregate", "0:1"], "a pool has at least 1 device, got 0"),
        (["--disaggregate", "1:1", "--policy", "static"], "pools of devices run continuous batches in paged memory"),
        (["--disaggregate", "1:1", "--arrivals", "closed"], "a ClosedLoop waits for answers"),
        (["--disaggregate", "1:1", "--figure", "x.png"], "--figure draws the timeline of one engine"),
        (["--num-requests", "0"], "--num-requests must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--trace", "no-such-file.jsonl"], "[Errno 2] No such file"),
    ],
)
def test_errors_are_one_line_with_the_numbers(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["simulate", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"minserve: {words}") and error.count("\n") == 1


# --- words become parts ------------------------------------------------------------------------------


def engine_for(**fields: Any):
    settings = Settings(**fields)
    return make_engine(settings, make_cost(settings))


def test_every_policy_word_has_its_policy():
    words = ("continuous", "static", "timeout", "padded")
    made = {word: engine_for(policy=word, batch_size=6, wait_ms=40.0) for word in words}
    policies = {word: engine.scheduler.policy for word, engine in made.items()}
    assert type(policies["continuous"]) is FirstComeFirstServed
    assert type(policies["static"]) is type(policies["padded"]) is StaticBatches
    assert isinstance(policies["timeout"], TimeoutBatches) and policies["timeout"].wait_s == 0.04
    assert all(policy.size == 6 for policy in policies.values() if isinstance(policy, StaticBatches))
    assert all(engine.scheduler.config.max_running == 6 for engine in made.values())
    runner = made["padded"].runner
    assert isinstance(runner, PaddedRunner) and runner.num_rows == 6
    assert type(made["static"].runner) is SimulatedRunner
    assert made["padded"].scheduler.config.token_budget == 6 * 4096


def test_a_policys_own_words_go_before_the_options():
    def policy(words: str, **fields: Any) -> Any:
        return engine_for(policy=words, **fields).scheduler.policy

    timeout = policy("timeout:wait_ms=10", batch_size=6, wait_ms=40.0)
    assert (timeout.size, timeout.wait_s) == (6, 0.01)
    static = engine_for(policy="static:size=64")
    assert isinstance(static.scheduler.policy, StaticBatches) and static.scheduler.policy.size == 64
    assert static.scheduler.config.max_running == 256 and engine_for(policy="static").scheduler.config.max_running == 32
    buckets = policy("buckets:edges=100/200", batch_size=7)
    assert isinstance(buckets, LengthBuckets) and (buckets.edges, buckets.size, buckets.wait_s) == ((100, 200), 7, 0.05)
    assert type(policy("cap:most=9")) is SizeCap and policy("cap:most=9").most == 9
    assert isinstance(policy("shrink"), ShrinkWhenQueued)
    slo = policy("slo:ttft_ms=700", slo_ttft_ms=450.0, slo_tpot_ms=40.0)
    assert isinstance(slo, SloAdmission) and (slo.ttft_s, slo.tpot_s) == (0.7, 0.04)


def test_slots_as_many_as_fit_or_as_asked_for():
    assert engine_for(pool="slots", slot_tokens=2048, policy="static").scheduler.blocks.num_blocks == 25
    engine = engine_for(pool="slots", slot_tokens=2048, batch_size=10, policy="static")
    assert (engine.scheduler.blocks.num_blocks, engine.scheduler.config.max_running, engine.limits.max_model_len) == (10, 10, 2048)
    assert isinstance(engine.scheduler.policy, StaticBatches) and engine.scheduler.policy.size == 10


def test_engine_settings_arrive():
    engine = engine_for(token_budget=512, block_size=32, memory_fraction=0.8, prefix_caching=False, kv="int8", weights="int4")
    blocks = engine.scheduler.blocks
    assert (engine.scheduler.config.token_budget, blocks.block_size, blocks.prefix_caching) == (512, 32, False)
    assert blocks.num_blocks == make_cost(Settings(kv="int8", weights="int4")).pool_blocks(32, 0.8)
    as_others = engine_for(block_size=32, memory_fraction=0.8, kv="int8", weights="int4", head_bits=16)
    assert as_others.scheduler.blocks.num_blocks == make_cost(Settings(kv="int8", weights="int4", head_bits=16)).pool_blocks(32, 0.8)
    assert as_others.scheduler.blocks.num_blocks < blocks.num_blocks


def test_whole_answers_are_reserved_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    load = ["--num-requests", "20", "--prompt", "2000", "--output", "1500"]  # 26 prompts fit, 14 with their answers
    grow = result_of(capsys, tmp_path / "out.json", *load)["summary"]
    kept = result_of(capsys, tmp_path / "out.json", *load, "--reserve-whole-answers")["summary"]
    assert grow["num_preemptions"] > 0 == kept["num_preemptions"]
    assert kept["num_finished"] == 20 and kept["ttft_p99_s"] > grow["ttft_p99_s"]


def test_loads_by_their_words(tmp_path: Path):
    load = make_load(Settings(num_requests=9))
    assert [time_s for time_s, _ in load.arrivals()] == [0.0] * 9
    assert [time_s for time_s, _ in make_load(Settings(num_requests=2, rate=4.0, arrivals="gamma", cv=0.0)).arrivals()] == [0.25, 0.5]
    poisson = make_load(Settings(num_requests=9, rate=4.0))
    assert poisson.arrivals() == make_load(Settings(num_requests=9, rate=4.0, arrivals="poisson")).arrivals()
    assert isinstance(make_load(Settings(arrivals="closed", clients=3)), ClosedLoop)
    chats = make_load(Settings(num_requests=10, turns=4))
    assert isinstance(chats, MultiTurn) and (len(chats.arrivals()), len(chats)) == (3, 12)
    shared = make_load(Settings(num_requests=2, shared_tokens=20)).arrivals()
    assert shared[0][1]["prompt_ids"][:20] == shared[1][1]["prompt_ids"][:20]
    (tmp_path / "t.jsonl").write_text('{"num_prompt_tokens": 3, "num_output_tokens": 4}\n' * 3, encoding="utf-8")
    assert len(make_load(Settings(trace=str(tmp_path / "t.jsonl"), num_requests=2))) == 2


def test_lengths_in_words():
    assert parse_lengths("512").words == parse_lengths("constant:512").words == "512 tokens"
    assert (parse_lengths("lognormal:700:1:8:4000").percentile(50), parse_lengths("uniform:10:20").percentile(0)) == (700, 10)
    assert set(TRACES) == {"azure-chat", "azure-code", "mooncake"}
