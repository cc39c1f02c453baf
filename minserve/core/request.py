"""What a caller asks for, and the one mutable record of how far it has come.

Why: every other part of the engine is a function of a few `Request` objects. There is no prefill phase and no
decode phase here: a request has `num_tokens` known tokens and `num_computed_tokens` of them have keys and
values in the cache; each step hands out tokens until the second number catches up with the first.

Invariant: 0 <= num_computed_tokens <= num_tokens, and the last token's keys and values are never needed
before another token follows, so a request that ends has stored at most num_tokens - 1 of them.

Taught in notebook 06.
"""

import difflib
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

MAX_SAMPLES = 128  # as OpenAI has it; each is a request of its own, so an unbounded n would fill the memory
MAX_LOGPROBS = 20  # best tokens reported per place: as vLLM and OpenAI have it


class InvalidRequest(ValueError):
    """The caller asked for something that cannot be served; the message names the field and the numbers."""


class RequestTooLong(InvalidRequest):
    """The request can never fit: it is longer than the model or the whole block pool allows."""


class RequestStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the model's limit or the pool's limit
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # the step failed, or the model produced NaN
    SHED = "shed"  # the policy sent it away unserved


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. The default is greedy: it is reproducible, and our oracle.

    `max_tokens` is a ceiling: the model's and the pool's limit may end a request earlier, with reason
    "length". `top_k` 0 or -1 and `top_p` 1.0 mean off; `top_p` 0 keeps the best token only. `logprobs` k
    reports the log probability of each chosen token and of the k best ones, taken from the unscaled softmax
    before truncation. `stop_token_ids` and the model's end tokens end the text and are not part of it, though
    they count as output.

    >>> SamplingParams(temperature=-1)
    Traceback (most recent call last):
    ...
    minserve.core.request.InvalidRequest: temperature must be a finite number >= 0, got -1
    """

    max_tokens: int | None = None  # None: as far as the model and the pool allow
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a fresh random seed for each request
    logprobs: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        # Lists become tuples, one stop string a tuple of one: the rest of the engine sees a single form.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        forms: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "stop": (stop, tuple),
            "stop_token_ids": (self.stop_token_ids, tuple),
            "logit_bias": (self.logit_bias, dict),
        }
        for name, (value, kind) in forms.items():
            try:
                object.__setattr__(self, name, kind(value))
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{name} cannot be {value!r}: {error}") from error
        self._check_counts()
        self._check_numbers()
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop must hold non-empty strings, got {text!r}")

    def _check_counts(self) -> None:
        for name, least in (("min_tokens", 0), ("top_k", -1), ("n", 1)):
            _require_int(name, getattr(self, name), least)
        for name, least in (("max_tokens", 1), ("logprobs", 0), ("seed", 0)):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), least)
        for token_id in (*self.stop_token_ids, *self.logit_bias):
            _require_int("a token id in stop_token_ids or logit_bias", token_id, 0)
        if self.n > MAX_SAMPLES:
            raise InvalidRequest(f"n must be at most {MAX_SAMPLES}, got {self.n}")
        if self.logprobs is not None and self.logprobs > MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be at most {MAX_LOGPROBS}, got {self.logprobs}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}")

    def _check_numbers(self) -> None:
        _require_number("temperature", self.temperature, 0.0, math.inf)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _require_number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0:
            raise InvalidRequest("repetition_penalty must be greater than 0, got 0")
        for token_id, bias in self.logit_bias.items():
            if bias != -math.inf:  # which bans the token
                _require_number(f"logit_bias of token {token_id}", bias, -math.inf, math.inf)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from plain data, where None means "not given". Raises InvalidRequest for an unknown field."""
        names = [f.name for f in fields(cls)]
        for name in values:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f", did you mean {close[0]!r}?" if close else f"; known fields: {', '.join(names)}"
                raise InvalidRequest(f"unknown sampling field {name!r}{hint}")
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _require_int(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequest(f"{name} must be an integer >= {least}, got {value!r}")


def _require_number(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_finite = is_number and abs(value) <= sys.float_info.max  # NaN fails every comparison
    if not is_finite or not low <= value <= high:
        bounds = f" >= {low:g}" if high == math.inf else f" from {low:g} to {high:g}"
        wanted = f"a finite number{bounds if low > -math.inf else ''}"
        raise InvalidRequest(f"{name} must be {wanted}, got {value!r}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one chosen token, and the best (token id, log probability) pairs at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False, slots=True)
class Request:
    """One stream of tokens on its way through the engine; all progress is in these fields and nowhere else.

    A caller's request with n > 1 becomes n of these: `sample_index` 0 computes the prompt, the others name it
    as `parent` and fork its blocks. `max_total_tokens` bounds prompt + output (model limit, pool limit,
    max_tokens).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    stop_ids: frozenset[int] = frozenset()  # sampling one of these ends the request
    priority: int = 0  # lower runs first
    arrival_s: float = 0.0
    order: int = 0  # place in the line of arrivals, breaks ties of arrival_s
    salt: str = ""  # requests with different salts never share cached blocks
    sample_index: int = 0
    parent: "Request | None" = None
    seed: int = field(default_factory=lambda: secrets.randbits(63))

    token_ids: list[int] = field(init=False)  # prompt, then output
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache at first admission
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that still have to be computed before the next one can be chosen."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
