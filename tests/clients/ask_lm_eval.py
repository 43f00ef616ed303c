"""lm-eval's `local-completions` against its `hf` on the same weights."""

import json
import os
import subprocess
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
FOLDER = os.environ["MODEL_FOLDER"]
TOLERANCE = 1e-3


def evaluate(name: str, *arguments: str) -> tuple[dict[str, dict[str, object]], dict[str, list[list[object]]]]:
    """The results by task, and the answers to every request of every document."""
    output = Path.cwd() / name
    # In the folder of the tasks, whose files are named relative to it.
    command = ["lm_eval", "--include_path", str(TASKS), "--tasks", "sl_choices,sl_text,sl_words", "--log_samples"]
    command += ["--output_path", str(output), "--batch_size", "1", *arguments]
    subprocess.run(command, check=True, cwd=TASKS, stdout=subprocess.DEVNULL)
    results = json.loads(max(output.rglob("results_*.json")).read_text())["results"]
    samples = {}
    for task in results:
        lines = max(output.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
        samples[task] = [json.loads(line)["resps"] for line in lines]
    return results, samples


def numbers(value: object) -> list[float | str]:
    """Every number and text in nested lists, in order."""
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    try:
        return [float(value)]
    except (TypeError, ValueError):
        return [str(value)]


served = f"model={os.environ['MODEL']},base_url={os.environ['BASE_URL']}/completions,tokenizer={FOLDER}"
served += ",num_concurrent=1,max_retries=1,tokenized_requests=False"
ours, our_samples = evaluate("served", "--model", "local-completions", "--model_args", served)
theirs, their_samples = evaluate(
    "hf", "--model", "hf", "--model_args", f"pretrained={FOLDER},dtype=float32", "--device", "cpu"
)

largest = 0.0
for task, documents in our_samples.items():
    mine, reference = numbers(documents), numbers(their_samples[task])
    assert len(mine) == len(reference) > 0, (task, documents, their_samples[task])
    for left, right in zip(mine, reference, strict=True):
        if isinstance(left, float) and isinstance(right, float):
            largest = max(largest, abs(left - right))
        else:
            assert left == right, (task, left, right)
    for metric, value in ours[task].items():
        expected = theirs[task][metric]
        if isinstance(value, float):
            assert abs(value - expected) <= TOLERANCE * max(1.0, abs(expected)), (task, metric, value, expected)
            print(f"{task} {metric}: {value:.6g} and {expected:.6g}")
assert largest < TOLERANCE, largest
print(f"largest difference of a log probability: {largest:.2e}")
