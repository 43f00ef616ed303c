"""A step that an engine would run, planned by its own planner: rows, pages, slots, parts, padding.

The scheduler's policy cuts the rows into steps, and the planner plans each with pools that have one layer a group. On
this machine's CPU the chosen backends plan. For another device torch's stand in for them, under their capability rows:
which rows each backend serves, and padding, are then those of the device; how its kernels cut the rows is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sightline.attention.backends import registry
from sightline.attention.bindings import GroupBinding, PartBackend
from sightline.attention.capability import Work
from sightline.attention.contract import StepLimits
from sightline.attention.groups import LayerGroup, Loan
from sightline.attention.latent.phases import cheapest_way
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.shared.tiles import row_spans
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Workspace
from sightline.cache.store import CacheStore
from sightline.core.batch import Batch, RowWork, StepWork
from sightline.core.config import PADDING_PAGES, LayerKernels
from sightline.core.device import DeviceKind, detect_device
from sightline.core.errors import ConfigError
from sightline.core.resolution import ResolvedConfig
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.torch_operations import TorchOperations
from sightline.runner.backend_choice import GroupSelection
from sightline.runner.build import Blueprint, make_store, select_backends
from sightline.runner.coordinators import make_coordinator
from sightline.runner.graphs import Graphs
from sightline.runner.networks import Shared, bind_group, step_limits
from sightline.scheduler.decision import Inquiry, RunningSequence, SchedulerState
from sightline.scheduler.policy import decide
from sightline.scheduler.tally import Tally

_SCRATCH = 1 << 34
"""Room for the leases of stand-ins. Their memory is never touched."""
_MOST_ELEMENTS = 1 << 62
"""Keys that fit at once, where the room for them is not known."""


@dataclass(frozen=True)
class RowLength:
    """A row as it is asked about."""

    context_len: int
    query_len: int

    def __str__(self) -> str:
        return f"{self.context_len}+{self.query_len}"


@dataclass(frozen=True)
class PlannedRow:
    """A row of a planned step."""

    asked: int
    """Its number among the rows that were asked about."""
    context_len: int
    query_len: int
    first_token: int
    """Where its new tokens begin in the step."""
    pages: tuple[int, ...]
    """Of the first pool of a group, if there are pages."""


@dataclass(frozen=True)
class PlannedPart:
    """The tokens of a group that one backend serves."""

    backend: str
    planned_by: str
    """What planned it: the backend itself, or what stands in for it."""
    first_token: int
    num_tokens: int


@dataclass(frozen=True)
class PlannedGroup:
    """What the plan of a group says."""

    name: str
    policy: str
    is_sparse: bool
    parts: tuple[PlannedPart, ...]
    ways: tuple[str, ...]
    """Latent attention: the way with the fewest multiplications for each row, if its keys fit at once."""
    buffers: Mapping[str, tuple[int, ...]]
    """The shapes of the plan buffers, if the chosen backends filled them: one for each tile, split or mask."""


@dataclass(frozen=True)
class PlannedStep:
    """A step of an engine."""

    rows: tuple[PlannedRow, ...]
    num_tokens: int
    num_padding: int
    """Tokens that belong to no row, so that the step has the size of a captured one."""
    bucket: str | None
    """The captured step that is replayed; None if the step is eager."""
    groups: tuple[PlannedGroup, ...]


def parse_rows(text: str) -> tuple[RowLength, ...]:
    """Reads rows such as 8192+512,0+2048: tokens in the cache, and new ones. Raises `ConfigError` for anything else."""
    rows = []
    for part in text.split(","):
        context, plus, new = part.strip().partition("+")
        is_number = all(each.strip().isdecimal() and len(each) < 12 for each in (context, new))
        if not plus or not is_number or not int(new):
            raise ConfigError(
                f"expected rows as context+new tokens, such as 8192+512,0+2048, got {part.strip()[:40]!r}; write at "
                "least one new token for each"
            )
        rows.append(RowLength(int(context), int(new)))
    return tuple(rows)


def plan_steps(
    blueprint: Blueprint, selections: Sequence[GroupSelection], rows: Sequence[RowLength]
) -> tuple[PlannedStep, ...]:
    """Plans the steps in which the rows are computed, one behind the other. Raises `ConfigError` for rows that the
    engine could not hold."""
    config = blueprint.config
    _check_fits(config, rows)
    computed = [row.context_len for row in rows]
    steps = []
    for counts in _schedule(config, rows):
        lengths = {index: RowLength(computed[index], count) for index, count in counts.items()}
        steps.append(_plan(blueprint, selections, lengths))
        for index, count in counts.items():
            computed[index] += count
    return tuple(steps)


def _check_fits(config: ResolvedConfig, rows: Sequence[RowLength]) -> None:
    if not config.num_pages:
        raise ConfigError("expected an engine with a cache for --rows, got one that computes whole texts; leave it out")
    longest = max(row.context_len + row.query_len for row in rows)
    pages = sum(-(-(row.context_len + row.query_len) // config.page_size) for row in rows)
    for name, got, most in (
        ("rows", len(rows), config.max_rows),
        ("tokens of a row", longest, config.max_model_len),
        ("pages", pages, config.num_pages - PADDING_PAGES),
    ):
        if got > most:
            raise ConfigError(
                f"expected at most {most:,} {name}, as the engine has, got {got:,} in --rows; ask for fewer"
            )


def _schedule(config: ResolvedConfig, rows: Sequence[RowLength]) -> Iterator[Mapping[int, int]]:
    """Yields the new tokens of each row in each step, as the policy decides. Rows that are done leave."""
    pending, computed = {index: row.query_len for index, row in enumerate(rows)}, [row.context_len for row in rows]
    while pending:
        running = tuple(
            RunningSequence(
                priority=0,
                arrival=index,
                caller="",
                num_pending=count,
                num_pages=-(-(computed[index] + count) // config.page_size),
                num_lacking=0,
                num_steps=0,
                scores_prompt=False,
                context_len=computed[index],
            )
            for index, count in pending.items()
        )
        decision = decide(
            SchedulerState(
                running=running,
                held={"": len(running)},
                shares={"": 0},
                urgencies={},
                tally=Tally(config.num_pages - PADDING_PAGES),
                num_free_rows=config.max_rows - len(running),
                page_size=config.page_size,
                max_step_tokens=config.max_step_tokens,
                max_scored_tokens=config.max_step_tokens,
                waiting=None,
                findings={},
                holdings={},
            )
        )
        assert not isinstance(decision, Inquiry), "rows that have their pages need no other facts"
        yield decision.rows
        for index, count in decision.rows.items():
            computed[index] += count
            pending[index] -= count
        pending = {index: count for index, count in pending.items() if count}


def _plan(blueprint: Blueprint, selections: Sequence[GroupSelection], lengths: Mapping[int, RowLength]) -> PlannedStep:
    stage = _Stage(blueprint, selections, lengths.values())
    store, work = stage.store, []
    for row in lengths.values():
        table_row = store.open_row()
        store.grow_row(table_row, row.context_len + row.query_len)
        store.fill_row(table_row, row.context_len)
        work.append(RowWork(table_row, [0] * row.query_len, row.context_len, 1))
    batch = stage.graphs.assemble(StepWork.of(work))
    planned = stage.planner.plan(batch)
    bucket = next((each.shape for each in stage.graphs.buckets if each is batch.memory), None)
    offsets = batch.query_offsets_host()
    num_new = sum(row.query_len for row in lengths.values())
    rows = [
        PlannedRow(asked, row.context_len, row.query_len, offsets[index], _pages(store, work[index], row))
        for index, (asked, row) in enumerate(lengths.items())
    ]
    return PlannedStep(
        tuple(rows),
        num_new,
        batch.num_tokens - num_new,
        None if bucket is None else str(bucket),
        tuple(stage.describe(planned)),
    )


def _pages(store: CacheStore, work: RowWork, row: RowLength) -> tuple[int, ...]:
    """The pages of a row in the first pool; none if no group has pages."""
    if not store.main.pools:
        return ()
    count = store.pages_for(row.context_len + row.query_len)
    return tuple(store.pages_at(work.table_row, index)[0] for index in range(count))


class _Stage:
    """A planner with the groups of an engine, on this machine's CPU, and the captured sizes of the engine."""

    def __init__(
        self,
        blueprint: Blueprint,
        selections: Sequence[GroupSelection],
        rows: Collection[RowLength],
    ) -> None:
        config, device = blueprint.config, detect_device("cpu")
        self._selections = selections
        self._is_real = config.device.is_here and config.device.kind is DeviceKind.CPU
        pages = sum(-(-(row.context_len + row.query_len) // config.page_size) for row in rows)
        config = replace(
            config,
            device=device,
            num_pages=PADDING_PAGES + pages,
            layer_kernels=config.layer_kernels if self._is_real else LayerKernels.TORCH,
            hot_buffer_size=0,
            paranoid=False,
        )
        groups = [_one_layer(group) for group in blueprint.groups]
        self._planned_by = selections if self._is_real else _stand_ins(config, groups, blueprint)
        self.store = make_store(config, groups)
        workspace = Workspace(device.torch_device, _SCRATCH)
        shared = Shared(config, self.store, workspace, TorchOperations(), inline_launcher())
        limits = step_limits(config)
        self.bindings = tuple(
            _bind(shared, limits, *each) for each in zip(groups, selections, self._planned_by, strict=True)
        )
        main = self.store.main
        self.planner = Planner(self.bindings, limits, main.lengths, workspace)
        self.graphs = Graphs(config.graph_sizes, self.store, main, self.planner, self.bindings)
        workspace.seal()

    def describe(self, planned: PlannedBatch) -> Iterator[PlannedGroup]:
        """Yields what the plan of each group says."""
        contents = planned.plan.certificate.buffers.contents()
        records = list(planned.plan.certificate.parts)
        for number, (binding, plan) in enumerate(zip(self.bindings, planned.plan.groups, strict=True)):
            name, spec = binding.group.name, binding.group.spec
            own = [record for record in records if record.group == number]
            parts = [
                self._part(number, binding, record.place, part.tokens)
                for record, part in zip(own, plan.parts, strict=True)
            ]
            is_dense = isinstance(spec, LatentSpec) and not plan.is_sparse
            yield PlannedGroup(
                name,
                plan.policy.value,
                plan.is_sparse,
                tuple(parts),
                tuple(_ways(planned.batch, spec)) if is_dense and isinstance(spec, LatentSpec) else (),
                {each: tuple(found.shape) for each, found in contents.items() if each.startswith(f"{name}[")}
                if self._is_real
                else {},
            )

    def _part(self, group: int, binding: GroupBinding, place: int, tokens: slice) -> PlannedPart:
        works = [work for work, part in binding.serving.items() if part is binding.parts[place]]
        chosen, planner = self._selections[group], self._planned_by[group]
        work = works[0]
        return PlannedPart(
            chosen[work].candidate.name,
            planner.get(work, planner[Work.PREFILL]).candidate.name,
            tokens.start,
            tokens.stop - tokens.start,
        )


def _bind(
    shared: Shared, limits: StepLimits, group: LayerGroup, chosen: GroupSelection, planned_by: GroupSelection
) -> GroupBinding:
    """A binding whose backends are those that plan, one for each chosen one, under the chosen capability rows."""
    coordinator = make_coordinator(shared.config, group, shared.store.cache(group.owner), limits)
    serving = dict[Work, PartBackend]()
    for candidate in {id(each.candidate): each.candidate for each in chosen.values()}.values():
        works = [work for work, each in chosen.items() if each.candidate is candidate]
        planning = planned_by.get(works[0], planned_by[Work.PREFILL])
        # Two chosen backends may have one stand-in, whose leases have one name: each gets a workspace of its own.
        own = replace(shared, workspace=Workspace(shared.config.device.torch_device, _SCRATCH))
        built = bind_group(own, limits, group, {works[0]: planning}, coordinator).serving[works[0]]
        part = PartBackend(built.backend, chosen[works[0]].capability)
        serving |= dict.fromkeys(works, part)
    return GroupBinding(group, shared.store.cache(group.owner), serving)


def _stand_ins(
    config: ResolvedConfig, groups: Sequence[LayerGroup], blueprint: Blueprint
) -> tuple[GroupSelection, ...]:
    """Torch's backends, which are installed wherever Sightline is, in place of those of another device."""
    candidates = [each for each in registry.BUILT_IN if all(row.package is None for row in each.rows())]
    plain = replace(
        config,
        attention_backend=None,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        require_proof=False,
    )
    return select_backends(plain, groups, candidates, blueprint.usage)


def _one_layer(group: LayerGroup) -> LayerGroup:
    """The group with its first layer alone: a plan is the same for all."""
    loan = None if group.loan is None else Loan(group.loan.lender, (0,))
    return replace(group, layers=group.layers[:1], loan=loan)


def _ways(batch: Batch, spec: LatentSpec) -> Iterator[str]:
    for span in row_spans(batch, None):
        yield cheapest_way(spec, span, _MOST_ELEMENTS).value
