"""A type checker must refuse each marked line and accept the others."""

from sightline.attention.planner import Planner
from sightline.core.batch import Batch
from sightline.models.contract import Model
from sightline.runner.runner import Runner


def forward(runner: Runner, model: Model, planner: Planner, batch: Batch) -> None:
    planned = planner.plan(batch)
    runner.forward(planned)
    runner.forward(planner.ensure(batch))
    runner.forward(batch)  # refused: unplanned
    model.forward(batch)  # refused: unplanned
    runner.forward(planned.batch.pad(4, 4))  # refused: padding loses the plan
    runner.forward(planned.batch.take([0]))  # refused: taking rows loses the plan
    runner.forward(planned.batch.split(1)[0])  # refused: splitting loses the plan
    runner.forward(planned.batch.idle())  # refused: turning idle loses the plan
    planned.batch = batch  # refused: frozen
    planned.plan = planned.plan  # refused: frozen
    batch.tokens = batch.positions  # refused: frozen
