"""From logits to the next token of each request, by that request's own rules and its own random numbers.

Why: requests with different settings share every step, so nothing may leak from one row into another: not a shared
draw, not a neighbour's NaN. The sampler keeps no state. The one random number that a token needs is a pure function of
(seed, sample index, place in the output), so a request gives the same tokens alone, in any row of any batch, and after
a preemption, and the n samples of one request differ.

The order of a row, each step skipped where its setting is off:

1. log probabilities for the report, from the logits as the model gave them (as vLLM's raw_logprobs)
2. repetition penalty (prompt and output, once per token id), presence and frequency penalty (output only), logit bias,
   then stop tokens forbidden until `min_tokens`. vLLM adds the bias and forbids before it penalises.
3. temperature 0: the largest logit, ties to the lowest id
4. temperature, top_k, top_p (of what top_k left, renormalised), min_p (relative to the best token). vLLM applies min_p
   before top_k and top_p; this order is that of transformers.
5. one draw by inverse CDF over the kept tokens in order of their ids

Penalties look at the whole history: there is no window. Rows are computed in float64.

Invariant: a token is an id that the tokenizer knows; each row has one, or one error; the best token is always kept.

Taught in notebook 02.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from minserve.core.request import Request, SamplingParams, TokenLogprob

NO_TOKEN = -1  # stands in `SampledTokens.token_ids` where the row has an error


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token id and one optional report per row of logits; `errors` maps a row to what went wrong with it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Chooses one token per row; ids from `num_tokens_known` on are padding of the vocabulary and never chosen."""

    def __init__(self, num_tokens_known: int) -> None:
        self.num_tokens_known = num_tokens_known

    @torch.inference_mode()
    def sample(self, logits: Tensor, requests: Sequence[Request]) -> SampledTokens:
        """Choose the next token of `requests[i]` from row i of `logits: [B, V]` (any float type, left unchanged).

        >>> request = Request(request_id="R0", prompt_ids=(1,), params=SamplingParams(), max_total_tokens=9)
        >>> Sampler(num_tokens_known=3).sample(torch.tensor([[0.0, 2.0, 1.0, 9.0]]), [request]).token_ids
        [1]
        """
        assert logits.dim() == 2 and len(logits) == len(requests), f"{tuple(logits.shape)} for {len(requests)} requests"
        logits = logits[:, : self.num_tokens_known]  # [B, V], V now at most the tokenizer's size
        # One pass serves three ends: the greedy tokens, their ties to the lowest id, and NaN, which max() hands on.
        largest, best_ids = logits.max(dim=-1)  # [B], [B]
        result = SampledTokens(best_ids.tolist(), [None] * len(requests))
        for row, (request, value) in enumerate(zip(requests, largest.tolist(), strict=True)):
            if problem := _problem(value):
                result.token_ids[row] = NO_TOKEN
                result.errors[row] = f"request {request.request_id}: {problem}"
            elif not _is_plain(request):
                self._sample_row(row, logits[row], request, result)
        return result

    def _sample_row(self, row: int, logits: Tensor, request: Request, result: SampledTokens) -> None:
        """Put the token of one row that is more than an argmax, or its error, into `result`. logits: [V]"""
        raw = logits.double()  # a copy, except from float64
        adjusted = adjust(raw, request)
        largest = adjusted.max().item()
        if not math.isfinite(largest):
            result.token_ids[row] = NO_TOKEN
            result.errors[row] = (
                f"request {request.request_id}: no token is left to choose after penalties, logit_bias and min_tokens "
                f"(largest of {len(adjusted)} logits is {largest})"
            )
            return
        token_id = int(adjusted.argmax()) if request.params.is_greedy else _draw_for(request, adjusted)
        result.token_ids[row] = token_id
        if request.params.logprobs is not None:
            result.logprobs[row] = report(raw, token_id, request.params.logprobs)


def _problem(largest: float) -> str | None:
    if math.isfinite(largest):
        return None
    if math.isnan(largest):
        return "logits hold NaN"
    return "logits hold infinity" if largest > 0 else "every logit is minus infinity"


def _is_plain(request: Request) -> bool:
    """True where the row's token is the argmax of its raw logits and nothing else is asked."""
    params = request.params
    return params.is_greedy and params.logprobs is None and not _is_adjusted(request)


def _is_adjusted(request: Request) -> bool:
    params = request.params
    has_penalty = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return has_penalty or bool(params.logit_bias) or _must_go_on(request)


def _must_go_on(request: Request) -> bool:
    return request.num_output_tokens < request.params.min_tokens


# -- step 2: what changes the logits themselves ---------------------------------------------------------------------


def adjust(logits: Tensor, request: Request) -> Tensor:
    """Penalties, bias and forbidden stop tokens on one row `logits: [V]`, float64. Returns a new row where any applies.

    Repetition divides positive logits and multiplies negative ones (Keskar et al. 2019, "CTRL"); presence and frequency
    are OpenAI's. With penalty 2, prompt (0, 0, 0, 1) turns [2, -1, 0.5] into [1, -2, 0.5].
    """
    if not _is_adjusted(request):
        return logits
    row, params = logits.clone(), request.params
    if params.repetition_penalty != 1.0:
        seen = _ids_below(len(row), set(request.token_ids))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(request.output_ids)
        seen = _ids_below(len(row), counts)
        counted = torch.tensor([counts[token_id] for token_id in seen.tolist()], dtype=row.dtype, device=row.device)
        row[seen] -= params.presence_penalty + params.frequency_penalty * counted
    for token_id, bias in params.logit_bias.items():
        if token_id < len(row):
            row[token_id] += bias
    if _must_go_on(request):
        row[_ids_below(len(row), request.stop_ids)] = -math.inf
    return row


def _ids_below(num_tokens: int, token_ids: Iterable[int]) -> Tensor:
    """The ids that the vocabulary has, ascending. [C]"""
    return torch.tensor(sorted(token_id for token_id in token_ids if 0 <= token_id < num_tokens), dtype=torch.long)


# -- steps 4 and 5: which tokens stay, and the draw -----------------------------------------------------------------


def truncate(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn from `logits: [V]`: (ids [C] ascending, weights [C] relative to the best token's 1).

    The logits must be finite or -inf, the temperature above 0. Probabilities [0.4, 0.3, 0.2, 0.1] with top_k 2 and
    top_p 0.5 leave {0}: after top_k they are 0.571 and 0.429, and the first alone holds half.
    Source: nucleus sampling, Holtzman et al. 2020; min-p, Nguyen et al. 2024.
    """
    if 0 < params.top_k < len(logits):
        ids = best_tokens(logits, params.top_k).sort().values
        logits = logits[ids]
    else:
        ids = torch.arange(len(logits), device=logits.device)
    weights = torch.exp((logits - logits.max()) / params.temperature)  # never overflows: the exponent is at most 0
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = weights >= params.min_p
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def best_tokens(values: Tensor, num_best: int) -> Tensor:
    """Places of the `num_best` largest of `values: [V]`, largest first, ties by lower place. [min(num_best, V)]

    `torch.topk` alone leaves open which of several equal values it takes.
    """
    num_best = min(num_best, len(values))
    if num_best == 0:
        return torch.empty(0, dtype=torch.long, device=values.device)
    least = torch.topk(values, num_best).values[-1]
    candidates = (values >= least).nonzero().flatten()  # ascending; more than num_best only where `least` is tied
    return candidates[torch.sort(values[candidates], descending=True, stable=True).indices[:num_best]]


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Places, ascending, of the smallest set of best tokens that holds at least `top_p` of all weight. weights: [V]"""
    total = weights.sum()
    # V tokens below this line hold less than 1 - top_p together, so none of them is needed: a few hundred or thousand
    # of 49,152 are left to sort. The best token is never below it.
    candidates = (weights >= (1.0 - top_p) * total / len(weights)).nonzero().flatten()
    ordered, order = torch.sort(weights[candidates], descending=True, stable=True)
    # A token stays if those before it hold less than top_p: the best one always does.
    num_kept = int((ordered.cumsum(0) < top_p * total).sum()) + 1
    return candidates[order[:num_kept]].sort().values


def uniform(seed: int, sample_index: int, place: int) -> float:
    """The random number in [0, 1) for one output token: a counter-based generator, so that there is no state to lose."""
    digest = blake2b(f"{seed}:{sample_index}:{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(ids: Tensor, weights: Tensor, number: float) -> int:
    """The id at `number` of the way through the weights: inverse CDF. Never one whose weight is 0. Both [C]."""
    cumulative = weights.cumsum(0)
    # right=True: the first place whose sum passes the target; number < 1 keeps the target below the total.
    return int(ids[torch.searchsorted(cumulative, number * cumulative[-1], right=True)])


def _draw_for(request: Request, logits: Tensor) -> int:
    params = request.params
    seed = request.seed if params.seed is None else params.seed  # 0 is a seed like any other
    ids, weights = truncate(logits, params)
    return draw(ids, weights, uniform(seed, request.sample_index, request.num_output_tokens))


# -- step 1: the report ---------------------------------------------------------------------------------------------


def report(logits: Tensor, token_id: int, num_best: int) -> TokenLogprob:
    """Log probabilities of the chosen and the `num_best` best tokens under the plain softmax of `logits: [V]`.

    Temperature, penalties and truncation play no part, so values are finite; tokens the model itself rules out (-inf)
    are left out, which keeps the report strict JSON. Sorted best first, ties by lower id.
    """
    logprobs = logits.log_softmax(dim=-1)
    best = best_tokens(logits, num_best)
    pairs = zip(best.tolist(), logprobs[best].tolist(), strict=True)
    top = tuple((best_id, logprob) for best_id, logprob in pairs if logprob > -math.inf)
    return TokenLogprob(token_id, logprobs[token_id].item(), top)
