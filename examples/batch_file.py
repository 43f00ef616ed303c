"""Answers every line of a JSONL file, {"id": ..., "prompt": ...}, and writes a JSONL file in the same order.

All prompts run in one batch, as many at a time as there is room for. One that cannot run fails alone: its line has an
"error" and no "text".
"""

import argparse
import json
from pathlib import Path

from sightline import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="a folder, a .gguf file or a Hugging Face id; the default model without it")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()

    requests = [json.loads(line) for line in given.input.read_text().splitlines() if line.strip()]
    llm = LLM(given.model)
    outputs = llm.generate([each["prompt"] for each in requests], SamplingParams(max_tokens=given.max_tokens))

    with given.output.open("w") as file:
        for request, output in zip(requests, outputs, strict=True):
            answer = {"text": output.outputs[0].text} if output.error is None else {"error": str(output.error)}
            file.write(json.dumps({"id": request["id"], **answer}) + "\n")
    print(f"{len(outputs)} answers in {given.output}")


if __name__ == "__main__":
    main()
