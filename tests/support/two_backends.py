"""A bench whose groups are served by several backends, by kind of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sightline.attention.bindings import GroupBinding, PartBackend
from sightline.attention.capability import Work
from sightline.attention.contract import AttentionBackend, BackendContext, StepLimits
from sightline.attention.planner import Planner
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import Workspace
from sightline.kernels.cpu.program import inline_launcher
from sightline.testing.conformance.rig import AttentionRig, RigSetting
from support.attention_cases import subject_for

Serving = Mapping[Work, type[AttentionBackend[Any, Any]]]


def split_serving(prefill: type[AttentionBackend[Any, Any]], decode: type[AttentionBackend[Any, Any]]) -> Serving:
    """One for rows of many new tokens, one for rows of one."""
    return {work: prefill if work is Work.PREFILL else decode for work in Work}


class ServedBench(AttentionRig):
    """Shuffled pages, NaN in unused slots and poison in leases, unless the setting says otherwise."""

    def __init__(self, specs: Sequence[SoftmaxSpec], serving: Serving, **setting: object) -> None:
        self.serving = serving
        chosen = RigSetting(**setting)  # type: ignore[arg-type]
        self.bindings: list[GroupBinding] = []
        super().__init__(subject_for("torch", chosen.dtype), specs, chosen)

    def _make_planner(self, workspace: Workspace) -> Planner:
        setting = self.setting
        limits = StepLimits(
            setting.max_rows, setting.max_step_tokens, setting.max_seq_len, setting.lanes, setting.max_rollout
        )
        for group, cache in zip(self.groups, self.store.groups, strict=True):
            built = {
                kind: PartBackend(
                    kind(
                        BackendContext(
                            f"{group.name}.{place}",
                            group.spec,
                            cache,
                            workspace,
                            limits,
                            setting.dtype,
                            self.device,
                            inline_launcher(),
                            ResidentEntries(cache),
                        )
                    ),
                    next(row for row in kind.capabilities if setting.dtype in row.dtypes),
                )
                for place, kind in enumerate(dict.fromkeys(self.serving.values()))
            }
            serving = {work: built[kind] for work, kind in self.serving.items()}
            self.bindings.append(GroupBinding(group, cache, serving))
        planner = Planner(self.bindings, limits, self.store.lengths, workspace, paranoid=setting.paranoid)
        workspace.seal()
        return planner
