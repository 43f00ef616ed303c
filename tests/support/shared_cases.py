"""Tells the cases of the check that can be shared out: of the whole, and of each of its shares. A script."""

from __future__ import annotations

import json

from sightline.attention.backends import registry
from sightline.core.device import detect_device
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.checks.covering import covering_cases, told
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import CaseShare, Effort, Trial

_FEW = Samples(head_dims=(16, 64), group_sizes=(1, 4), page_sizes=(16, 1))


def _cases(row: RowToTry, share: CaseShare) -> list[str]:
    trial = Trial(row.subject, Effort.FULL, _FEW, share=share)
    return [told(case) for case in trial.share.of(covering_cases(trial))]


def main() -> None:
    rows = list_rows([registry.find("torch", registry.BUILT_IN)], detect_device("cpu"))
    row = next(row for row in rows if isinstance(row, RowToTry) and row.label == "float32")
    shares = {
        check.name: {
            str(count): [_cases(row, CaseShare(number, count)) for number in range(count)]
            for count in (1, check.num_shares)
        }
        for check in CHECKS
        if check.num_shares > 1
    }
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
