"""Tells the cases of every check that can be shared out: of the whole, and of each of its shares. A script."""

from __future__ import annotations

import json

from sightline.attention.backends import registry
from sightline.core.device import detect_device
from sightline.testing.checks import CHECKS
from sightline.testing.rows import RowToTry, list_rows
from sightline.testing.samples import Samples
from sightline.testing.trial import Check, Effort, Progress, Share, Trial


class _Told(Progress):
    """Keeps what was tried, in order."""

    def __init__(self) -> None:
        self.cases: list[str] = []
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "case" and value:
            self.cases.append(str(value))


def _tried(check: Check, row: RowToTry, share: Share) -> list[str]:
    progress = _Told()
    check.run(Trial(row.subject, Effort.QUICK, Samples(), progress=progress, share=share))
    return progress.cases


def main() -> None:
    rows = list_rows([registry.find("torch", registry.BUILT_IN)], detect_device("cpu"))
    row = next(row for row in rows if isinstance(row, RowToTry) and row.label == "float32")
    told = {
        check.name: {
            str(count): [_tried(check, row, Share(number, count)) for number in range(count)]
            for count in (1, check.num_shares)
        }
        for check in CHECKS
        if check.num_shares > 1
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
