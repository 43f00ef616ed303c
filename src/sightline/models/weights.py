"""Loading of weights from a checkpoint. Every name and shape is checked, and no tensor may be left over.

Owns the choice between dense weights in the compute dtype and weights that stay quantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.distributed.collectives import NO_LINKS, Links
from sightline.kernels.packed_weights import WeightForm
from sightline.layers.embedding import DenseEmbedding, Embedding
from sightline.layers.linear import Linear, Projection
from sightline.layers.moe import ExpertCompute
from sightline.models.finite import find_not_finite
from sightline.models.kept_weights import KeptWeights
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo

DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that older checkpoints store although the config determines them."""
_COMPARED_ROWS = 1024


class WeightReader:
    """Loads weights and keeps track of which were used."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
        on_progress: Callable[[int, int], None],
        *,
        kept: KeptWeights | None = None,
        expert_compute: ExpertCompute = ExpertCompute.ONE_BY_ONE,
        make_linear: Callable[[Tensor, Tensor | None], Linear] = Linear,
        skip_check: bool = False,
        loaded_elsewhere: Sequence[str] = (),
        links: Links = NO_LINKS,
    ) -> None:
        """`kept` makes layers of weights that stay quantised; if None, all are dequantised.

        `make_linear` makes projections with dense weights, from weight and bias.

        `skip_check` loads weights with NaN and infinities like any others.

        `loaded_elsewhere` are beginnings of names. Another reader loads their tensors, for another network.

        `links` join the results of layers of which each rank has a part.
        """
        self.links = links
        self.device = device
        self.expert_compute = expert_compute
        self.make_linear = make_linear
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._ledger = ledger
        self._on_progress = on_progress
        self._kept = kept
        self._skip_check = skip_check
        self._loaded_elsewhere = frozenset(loaded_elsewhere)
        self._taken: set[str] = set()
        self._dequantised: dict[str, list[str]] = {}
        """By reason: weights that should have stayed quantised and could not."""
        self._num_kept = 0

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in `dtype` or the compute dtype. Raises if it is missing, has another shape or is not finite."""
        info = self._claim(name, shape)
        if len(shape) > 2:
            self._note("expected one matrix per projection, got experts stored as one tensor", {name: info})
        dtype = dtype or self._dtype
        # The scales of a quantised tensor are much less to look at. Only fp16 cannot hold what they decode to.
        scales = None if self._skip_check or dtype is torch.float16 else self._checkpoint.load_scales(name)
        stored = self._checkpoint.load(name)
        used = stored.to(device=self.device, dtype=dtype)
        self._check(name, used if scales is None else scales, stored)
        return used

    def form_of(self, names: Iterable[str]) -> WeightForm:
        """The form in which all of the tensors can be kept."""
        forms = {info.packed if (info := self._checkpoint.tensors.get(name)) else WeightForm.PLAIN for name in names}
        return forms.pop() if len(forms) == 1 else WeightForm.PLAIN

    def take_packed(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The codes and scales of a tensor that decodes to `shape`. Raises as `take` does."""
        form = self._claim(name, shape).packed
        codes, scales = (part.to(self.device) for part in self._checkpoint.load_packed(name))
        if form is WeightForm.MXFP4:
            # The largest number that a block can hold.
            largest = (scales.int() << 23).view(torch.float32) * 6.0
            self._check(name, largest, largest)
        else:
            self._check(name, codes, codes)
            self._check(name, scales, scales)
        return codes, scales

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised memory in the compute dtype, for weights that are joined as they are read."""
        return torch.empty(shape, dtype=self._dtype, device=self.device)

    def matrix(self, name: str, shape: tuple[int, int], use: str) -> Tensor:
        """A dense matrix. If it should have stayed quantised, the ledger names the `use` that prevents it."""
        self._note(
            f"expected a projection as it is stored, got one that is used as {use}", {name: self._claim(name, shape)}
        )
        return self.take(name, shape)

    def projection(
        self, sizes: Mapping[str, int], in_features: int, *, bias: bool, dtype: torch.dtype | None = None
    ) -> Projection:
        """Joins stored projections of the same input into one whose outputs are side by side.

        `sizes` maps the name of each stored projection (`name`.weight, and `name`.bias if `bias`) to its output size.
        """
        biases = [self.take(f"{name}.bias", (size,), dtype) for name, size in sizes.items()] if bias else []
        joined_bias = _joined(biases) if biases else None
        shapes = {f"{name}.weight": (size, in_features) for name, size in sizes.items()}
        kept = self._keeping(shapes)
        if kept is None:
            weight = _joined([self.take(name, shape, dtype) for name, shape in shapes.items()])
            return self.make_linear(weight, joined_bias)
        self._check_scales(*shapes)
        return kept.projection(self._checkpoint, list(shapes), joined_bias)

    def embedding(self, name: str, num_tokens: int, hidden_size: int) -> Embedding:
        """The embedding stored as `name`.weight."""
        weight = f"{name}.weight"
        info = self._claim(weight, (num_tokens, hidden_size))
        if self._kept is not None:
            refusal = self._kept.rule.embedding_refusal(info)
            if refusal is None:
                self._num_kept += 1
                self._check_scales(weight)
                return self._kept.embedding(self._checkpoint, weight)
            self._note(refusal, {weight: info})
        return DenseEmbedding(self.take(weight, info.shape))

    def tied_embedding(self, name: str, num_tokens: int, hidden_size: int) -> tuple[Embedding, Projection]:
        """The embedding stored as `name`.weight, and the output projection with the same weights."""
        shape = (num_tokens, hidden_size)
        kept = self._keeping({f"{name}.weight": shape})
        if kept is None:
            weight = self.take(f"{name}.weight", shape)
            return DenseEmbedding(weight), self.make_linear(weight, None)
        self._check_scales(f"{name}.weight")
        return kept.tied(self._checkpoint, f"{name}.weight")

    def check_copy(self, name: str, original: str, because: str, remedy: str) -> None:
        """Raises if the tensor `name` is stored and has other values than `original`. `remedy` says what to do then.

        The copy is read once from the mapped file and takes no memory of its own.
        """
        info, other = self._checkpoint.tensors.get(name), self._checkpoint.tensors.get(original)
        if info is None or other is None:
            return
        if info.shape != other.shape or not _are_equal(self._checkpoint.load(name), self._checkpoint.load(original)):
            raise CheckpointError(
                f"expected {name} in {self._checkpoint.location} to be {original} again ({because}), got other values; "
                f"{remedy}"
            )
        self._claim(name, info.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in file order."""
        return tuple(self._checkpoint.tensors)

    def number(self, name: str) -> float:
        """The value of a tensor with one element, of any shape."""
        shape = self._checkpoint.tensors[name].shape
        if math.prod(shape) != 1:
            raise CheckpointError(
                f"expected {name} in {self._checkpoint.location} to be one number, got shape {shape}; use another "
                "checkpoint"
            )
        self._claim(name, shape)
        return float(self._checkpoint.load(name))

    def leave(self, prefix: str, what: str, why: str) -> None:
        """Skips the tensors whose names begin with `prefix`, which this network does not use.

        Notes it if there are any, unless they are loaded elsewhere.
        """
        left = [name for name in self._checkpoint.tensors if name.startswith(prefix)]
        if prefix in self._loaded_elsewhere:
            self._taken.update(left)
        else:
            self._leave(left, what, f"{len(left)} tensors {prefix}* are not loaded: {why}")

    def leave_tensors(self, names: Sequence[str], what: str, why: str) -> None:
        """Skips tensors that no forward uses, and notes it if there are any."""
        if names:
            self._leave(names, what, f"{len(names)} tensors such as {names[0]} are not loaded: {why}")

    def degrade(self, what: str, outcome: str, remedy: str) -> None:
        """Records a degradation in the ledger."""
        self._ledger.degrade(what, outcome, remedy)

    def _leave(self, names: Sequence[str], what: str, fact: str) -> None:
        self._taken.update(names)
        self._on_progress(len(self._taken), len(self._checkpoint.tensors))
        if names:
            self._ledger.note(what, fact)

    def finish(self, ignorable: Iterable[str] = (), within: Sequence[str] = ("",)) -> None:
        """Raises if the checkpoint has tensors that the model did not use: they would change the result.

        `within` are the beginnings of the names that belong to the model, if another one is stored beside it. Then
        records the weights that could not stay quantised.
        """
        own = tuple(within)
        left = {
            name for name in self._checkpoint.tensors if name.startswith(own) and not name.endswith(DERIVED_SUFFIXES)
        }
        left -= self._taken | set(ignorable)
        if left:
            names = ", ".join(sorted(left)[:5])
            raise CheckpointError(
                f"expected no tensor beyond the model's own in {self._checkpoint.location}, got {len(left)} "
                f"that it would ignore: {names}"
            )
        if self._skip_check:
            self._ledger.note(
                "skip_weight_check",
                "weights are not checked for NaN and infinities; a row whose logits are not finite still fails",
            )
        for reason, names_of in self._dequantised.items():
            self._ledger.degrade(
                "--quantization keep",
                f"{len(names_of)} weights are dequantised, {names_of[0]} among them: {reason}",
                "use another file, or leave the flag out if memory allows",
            )
        if self._kept is not None and not self._num_kept and not self._dequantised:
            self._ledger.degrade(
                "--quantization keep",
                "changes nothing: no weight of the file is quantised",
                f"use a file in {self._kept.rule.types}, or leave the flag out",
            )

    def _check_scales(self, *names: str) -> None:
        """Raises if a scale or minimum of weights that stay quantised is not finite."""
        for name in names:
            scales = self._checkpoint.load_scales(name)
            assert scales is not None, f"{name} stays quantised and has no scales"
            self._check(name, scales, scales)

    def _check(self, name: str, used: Tensor, stored: Tensor) -> None:
        """Raises if not all numbers of a weight are finite, in the file or as they are `used`: then fp16 overflows."""
        found = None if self._skip_check else find_not_finite(used)
        if found is None:
            return
        where = f"{name} in {self._checkpoint.file_of(name)}"
        stored_so = find_not_finite(stored)
        if stored_so is None:
            raise CheckpointError(
                f"expected {where} to fit in {used.dtype}, got values that become infinite: {found}. Choose another "
                "dtype."
            )
        raise CheckpointError(
            f"expected finite numbers for {where}, got NaN or infinities: {stored_so}. The file is damaged: get it "
            "again, or set skip_weight_check to load it as it is."
        )

    def _claim(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"expected tensor {name} in {self._checkpoint.location}, got none; the file is incomplete"
            )
        if info.shape != shape:
            raise CheckpointError(
                f"expected {name} of shape {shape}, as the config says, got {info.shape} in "
                f"{self._checkpoint.location}; config and weights do not belong together"
            )
        self._taken.add(name)
        self._on_progress(len(self._taken), len(self._checkpoint.tensors))
        return info

    def _keeping(self, shapes: Mapping[str, tuple[int, int]]) -> KeptWeights | None:
        """What makes a projection of joined weights that stay quantised; None if they are dequantised.

        If they should have stayed quantised, the reason is noted.
        """
        infos = {name: self._claim(name, shape) for name, shape in shapes.items()}
        if self._kept is None:
            return None
        refusal = self._kept.rule.projection_refusal(list(infos.values()))
        if refusal is not None:
            self._note(refusal, infos)
            return None
        self._num_kept += len(infos)
        return self._kept

    def _note(self, reason: str, infos: Mapping[str, TensorInfo]) -> None:
        """Remembers why quantised weights are dequantised."""
        quantised = [name for name, info in infos.items() if info.is_quantised]
        if self._kept is not None and quantised:
            self._dequantised.setdefault(reason, []).extend(quantised)


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """True if two matrices hold the same numbers, in any dtypes. Compares by blocks of rows to save memory."""
    return all(
        torch.equal(left[first : first + _COMPARED_ROWS].float(), right[first : first + _COMPARED_ROWS].float())
        for first in range(0, left.shape[0], _COMPARED_ROWS)
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
