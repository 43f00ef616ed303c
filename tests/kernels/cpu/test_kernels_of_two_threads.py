"""Two engines that are built and run by two threads at once.

Both asked for the kernels of the process at the same time. Each got objects of its own, of which one was dropped while
its address was in use: freed machine code ran, and logits were NaN. Only in a new process, where nothing is compiled.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.tiny_models import make_model

_SCRIPT = """
import sys, threading
from sightline import LLM, SamplingParams

found = [None, None]

def run(place):
    llm = LLM(sys.argv[1], dtype="float32", cache_tokens=512, max_num_seqs=4, skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 9, 31, 7]}, {"prompt_token_ids": [8] * 20}]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found[place] = [(output.error, tuple(output.outputs[0].token_ids)) for output in outputs]

threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert found[0] is not None and found[0] == found[1], found
assert all(error is None for error, _ in found[0]), found
"""


def test_both_answer_alike(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
