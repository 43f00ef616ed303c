"""Sizes of the orders that the leading rank sends for tiny models.

    PYTHONPATH=src:tests python benchmarks/order_bytes.py

Counts what a step costs beside tensors; the sizes depend on rows and pages, not on the width of a model.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from support.hybrids import make_hybrid
from support.led_engines import QueueSender, answers, config_of, led_engine
from support.tiny_models import make_model


def main() -> None:
    """Prints the number of orders and their sizes, for a dense model and a hybrid."""
    sizes: list[int] = []
    send = QueueSender.send

    def counted(self: QueueSender, message: bytes) -> None:
        sizes.append(len(message))
        send(self, message)

    QueueSender.send = counted  # type: ignore[method-assign]
    for name, model in (("dense", make_model("llama")), ("hybrid", make_hybrid("qwen3_next"))):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            sizes.clear()
            with led_engine(Path(folder), config_of(tensor_parallel_size=2)) as engine:
                answers(engine)
        ordered = sorted(sizes)
        print(f"{name}: {len(ordered)} orders, {ordered[len(ordered) // 2]} bytes half-way, {ordered[-1]} at most")


if __name__ == "__main__":
    main()
