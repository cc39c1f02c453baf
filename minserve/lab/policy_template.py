"""Twenty lines of policy, to begin with: copy them, change them, and let the arena say what they are worth.

Taught in notebook 10.
"""

from minserve.core.policies import FirstComeFirstServed


class MyPolicy(FirstComeFirstServed):
    """Short prompts first, in classes of 512 tokens; small steps; whoever can no longer be served in time is told so."""

    def __init__(self, slo):
        self.slo = slo  # the trace's limits: ttft_s, tpot_s, latency_s; None where there is none

    def order(self, request):
        return (request.priority, request.num_prompt_tokens // 512, request.arrival_s, request.order)

    def candidates(self, now):
        has_room = now.pressure.num_free_blocks > 0.05 * now.pressure.num_blocks
        return now.waiting if has_room or not now.running else ()

    def token_budget(self, now):
        return min(now.token_budget, len(now.running) + (128 if (self.slo.tpot_s or 1) < 0.05 else 512))

    def shed(self, now):
        limit_s = self.slo.ttft_s or float("inf")
        late = [r for r in now.waiting if now.time_s - r.arrival_s > limit_s and not r.num_output_tokens]
        return [(r, f"waits longer than the {limit_s:g} s that it has") for r in late]
