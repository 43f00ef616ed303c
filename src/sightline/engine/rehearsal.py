"""Answers a request of every kind of sampling before anybody waits for one, and leaves nothing of them.

On a GPU the first use of an operation loads it, which takes tenths of a second. Does not know kernels: what a step of
each shape compiles was compiled when the runtime was built (`runner/warm_up.py`).
"""

from __future__ import annotations

from dataclasses import replace

from sightline.core.request import SamplingParams
from sightline.engine.engine import Engine
from sightline.engine.measuring import run_unseen
from sightline.runner.progress import BuildPhase, BuildStep, OnBuildStep, ignore

_PROMPT_LEN = 4
_DRAWN = SamplingParams(temperature=0.9, top_k=8, top_p=0.9, min_p=0.05)
_GREEDY = SamplingParams(temperature=0.0)
KINDS = {
    "greedy": _GREEDY,
    "drawn from all": SamplingParams(temperature=0.9),
    "drawn from some": _DRAWN,
    "greedy with penalties": replace(_GREEDY, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    "drawn with penalties": replace(_DRAWN, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    "with a bias": replace(_GREEDY, logit_bias={0: 1.0}),
    "with log probabilities": replace(_GREEDY, logprobs=2, prompt_logprobs=2),
}


def rehearse(engine: Engine, on_step: OnBuildStep = ignore) -> None:
    """Answers a request of each kind on an engine that has no work."""
    if engine.runtime.config.max_model_len < 2:
        return
    with engine.runtime.times.measured(BuildPhase.REQUESTS):
        for done, (what, params) in enumerate(KINDS.items()):
            on_step(BuildStep(BuildPhase.REQUESTS, what, done, len(KINDS)))
            run_unseen(engine, _PROMPT_LEN, replace(params, max_tokens=3, ignore_eos=True, seed=0))
    on_step(BuildStep(BuildPhase.REQUESTS, "", len(KINDS), len(KINDS)))
    engine.reset_counts()
