"""Prints an answer while it is generated. Ctrl-C ends the request and frees its memory."""

import argparse

from sightline import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--model", help="a folder, a .gguf file or a Hugging Face id; the default model without it")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()

    llm = LLM(given.model)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=given.max_tokens)
    for piece in llm.stream_chat([{"role": "user", "content": given.question}], params):
        print(piece.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
