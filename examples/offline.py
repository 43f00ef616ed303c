"""Generates for several prompts in one batch, then answers a conversation."""

import argparse

from sightline import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1, 1, 2, 3, 5,", "Water boils at"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder, a .gguf file or a Hugging Face id; the default model without it")
    model = parser.parse_args().model

    llm = LLM(model)
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=16)):
        print(f"{output.prompt}{output.outputs[0].text}")

    question = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat(question, SamplingParams(max_tokens=32))
    print(f"{answer.outputs[0].text} ({answer.outputs[0].finish_reason})")


if __name__ == "__main__":
    main()
