"""Policies by name, for command lines and settings: `cap:most=8`, `timeout:size=16,wait_ms=50`.

Why: a policy is an object, and a shell can only say words. This is the one place where words become policies,
for the real engine, the benchmark and the simulator alike.

Invariant: a name alone gives a policy that works, unless it needs limits that only its user can choose.

Taught in notebook 10.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from minserve.core.controllers import GrowWhenQueued, ServeAtOnceWhenSlow, ShrinkWhenQueued, WaitWhenSlow
from minserve.core.feedback import FreeBlocksFeedback
from minserve.core.policies import (
    Ageing,
    FirstComeFirstServed,
    LengthBuckets,
    Policy,
    SizeCap,
    StaticBatches,
    TimeoutBatches,
)
from minserve.core.slo import SloAdmission, StepTimes


class _Entry(NamedTuple):
    make: Callable[..., Policy]
    defaults: str  # all keys and what they are if not given; ?: they must be given
    words: str


_ENTRIES: Mapping[str, _Entry] = {
    "continuous": _Entry(FirstComeFirstServed, "", "starts whoever comes as soon as there is room"),
    "static": _Entry(StaticBatches, "size=32", "the next batch starts when the one before has ended"),
    "timeout": _Entry(
        TimeoutBatches, "size=32,wait_ms=50.0", "static batches that wait until full, or that long"
    ),
    "buckets": _Entry(
        LengthBuckets, "edges=256/1024,size=32,wait_ms=50.0", "timeout batches of prompts of about one length"
    ),
    "cap": _Entry(SizeCap, "most=32", "continuous, at most so many at once"),
    "ageing": _Entry(Ageing, "seconds_per_level=10.0", "priorities, a level of which is worth that waiting"),
    "shrink": _Entry(ShrinkWhenQueued, "most=32,least=4", "runs fewer at once, the more wait"),
    "grow": _Entry(GrowWhenQueued, "least=8,most=64,per_queued=2", "runs more at once, the more wait"),
    "wait-when-slow": _Entry(
        WaitWhenSlow, "size=8,longest_wait_ms=1000.0", "waits for company, the longer the slower they come"
    ),
    "at-once-when-slow": _Entry(
        ServeAtOnceWhenSlow, "size=8,longest_wait_ms=1000.0", "waits for company only while they come fast"
    ),
    "free-blocks": _Entry(
        FreeBlocksFeedback, "low=0.1,high=0.2", "starts nobody while free blocks are scarce; smaller steps"
    ),
    "slo": _Entry(
        SloAdmission,
        "ttft_ms=?,tpot_ms=?,shed=yes,patience=0.0,margin=0.05",
        "keeps limits of TTFT and TPOT: holds back, and sends away whom it cannot serve in time",
    ),
}

POLICY_NAMES: Mapping[str, str] = {name: entry.words for name, entry in _ENTRIES.items()}


def needs_step_times(words: str) -> bool:
    """Whether `parse_policy` must be told what a step takes, to make this policy."""
    return words.partition(":")[0] == "slo"


def parse_policy(words: str, times: StepTimes | None = None) -> Policy:
    """The policy of "name" or "name:key=value,key=value". Raises ValueError, with the nearest name or key.

    >>> vars(parse_policy("timeout:size=8"))
    {'size': 8, '_batch': (), 'wait_s': 0.05}
    >>> parse_policy("cap:mots=8")
    Traceback (most recent call last):
    ...
    ValueError: policy 'cap' has no key 'mots', did you mean 'most'? Its keys: most=32
    """
    name, _, rest = words.partition(":")
    if name not in _ENTRIES:
        raise ValueError(f"no policy {name!r}{_nearest(name, _ENTRIES)} Known: {', '.join(_ENTRIES)}")
    make, defaults, _ = _ENTRIES[name]
    texts, given = _pairs(defaults), _pairs(rest)
    for key in given:
        if key not in texts:
            keys = f"Its keys: {defaults}" if defaults else "It has none."
            raise ValueError(f"policy {name!r} has no key {key!r}{_nearest(key, texts)} {keys}")
    missing = [key for key, text in texts.items() if text == "?" and key not in given]
    if missing:
        example = ",".join(f"{key}=500" for key in missing)
        raise ValueError(f"policy {name!r} needs {' and '.join(missing)}, as in {name}:{example}")
    arguments = dict(_argument(name, key, text, given.get(key, text)) for key, text in texts.items())
    if not needs_step_times(name):
        return make(**arguments)
    if times is None:
        raise ValueError(f"policy {name!r} predicts what a step takes, and no step times are given")
    return make(times, **arguments)


def _pairs(words: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in words.split(",") if words else ():
        key, is_pair, text = (part.strip() for part in pair.partition("="))
        if not is_pair or key in found:
            problem = "is given twice" if key in found else "is not key=value"
            raise ValueError(f"in the policy's settings {words!r}, {pair!r} {problem}")
        found[key] = text
    return found


def _argument(name: str, key: str, default: str, text: str) -> tuple[str, Any]:
    """The constructor's argument: a key in ms sets one in s; the kind of value is that of the default."""
    try:
        value = _read(default, text)
    except (ValueError, KeyError):
        kind = "a finite number" if default == "?" else f"something like {default}"
        raise ValueError(f"{key} of policy {name!r} must be {kind}, got {text!r}") from None
    return (f"{key[:-3]}_s", value / 1e3) if key.endswith("_ms") else (key, value)


def _read(default: str, text: str) -> Any:
    if "/" in default:
        return [int(part) for part in text.split("/")]
    if default in ("yes", "no"):
        return {"yes": True, "no": False}[text]
    if default.isdecimal():
        return int(text)
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else "."
