"""Tries an attention backend of another package, then generates with it and compares the answer with the default's.

The package is tests/packages/rowwise, which `make setup` installs; docs/writing_a_backend.md explains it.
"""

import argparse
import subprocess
import sys

from sightline import LLM, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="rowwise", help="the name under which a package registers its backend")
    parser.add_argument("--model", help="a folder, a .gguf file or a Hugging Face id; the default model without it")
    given = parser.parse_args()

    # The quick kit finds most mistakes in seconds. Without --quick it is the proof that --require-proof asks for.
    kit = [sys.executable, "-m", "sightline", "conformance", "--backend", given.backend, "--quick"]
    subprocess.run(kit, check=True)

    answers = {}
    for backend in (given.backend, None):
        llm = LLM(given.model, attention_backend=backend)
        [output] = llm.generate(PROMPT, SamplingParams(max_tokens=8))
        answers[backend or "default"] = output.outputs[0].text
        llm.close()
    for backend, text in answers.items():
        print(f"{backend}: {PROMPT}{text}")
    if len(set(answers.values())) > 1:
        raise SystemExit("expected the same answer of both backends, got two")


if __name__ == "__main__":
    main()
