"""What a step will take, for a policy that wants to know beforehand: the cost model's answer.

Why: a policy sees requests and no device. `core.slo` asks for the seconds of a step in three numbers; the cost model knows them for any
model on any device, a calibrated machine of one's own included, so one policy runs in simulation and on the real engine.

Invariant: of a step without prompts whose rows share nothing, this predicts exactly what the simulator charges.

Taught in notebook 10.
"""

from minserve.sim.cost_model import CostModel, Work, row_work


class CostStepTimes:
    """Step times by the cost model. Prompt tokens are taken as one chunk at the beginning of a prompt.

    >>> from minserve.sim.devices import DEVICES
    >>> from minserve.sim.shapes import SHAPES
    >>> times = CostStepTimes(CostModel(SHAPES["llama-2-13b"], DEVICES["a100-80gb"]))
    >>> [f"{1e3 * times.step_s(*step):.0f} ms" for step in ((1, 1_000, 0), (32, 32_000, 0), (32, 32_000, 512))]
    ['17 ms', '33 ms', '86 ms']
    """

    def __init__(self, cost: CostModel):
        self.cost = cost

    def step_s(self, num_decodes: int, num_context_tokens: int, num_prompt_tokens: int) -> float:
        window = self.cost.shape.window
        seen = min(num_context_tokens, num_decodes * window) if window is not None else num_context_tokens
        context = num_context_tokens
        work = Work(num_decodes, num_decodes, num_decodes, context, context, seen, seen)
        if num_prompt_tokens:
            work += row_work(0, num_prompt_tokens, window=window)
        return self.cost.of(work).seconds
