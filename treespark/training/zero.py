# SPDX-License-Identifier: Apache-2.0
"""Updates by DeepSpeed: optimizer state, gradients and weights spread over the ranks (ZeRO 1-3).

DeepSpeed's own checkpoints are pickle files bound to a number of ranks. Ours hold whole tensors,
read and written through its accessors, so a run goes on with any number of ranks and any stage.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treespark import device as devices
from treespark.errors import UsageError
from treespark.training.updates import Tensors, adamw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from treespark.drafter.auto import AnyDrafter
    from treespark.recipe import OptimSection
    from treespark.training.ranks import Ranks

_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Trained(nn.Module):
    """The trained parts of a drafter as one module, so that DeepSpeed never sees the frozen ones.

    Embedding and head belong to the target; partitioning them would take its weights away.
    """

    def __init__(self, drafter: AnyDrafter) -> None:
        super().__init__()
        for name, child in drafter.named_children():
            if any(p.requires_grad for p in child.parameters()):
                self.add_module(name, child)

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()


class ZeroUpdates:
    """See treespark.training.updates.Updates.

    stage 1 spreads the optimizer state, 2 the gradients too, 3 the weights too. Raises UsageError
    where DeepSpeed is missing.
    """

    def __init__(
        self,
        drafter: AnyDrafter,
        optim: OptimSection,
        ranks: Ranks,
        num_micro_batches: int,
        *,
        stage: int,
        micro_batch: int,
    ) -> None:
        self.num_micro_batches, self._ranks, self._stage = num_micro_batches, ranks, stage
        self._deepspeed = _import_deepspeed(ranks.device)
        module = _Trained(drafter)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": num_micro_batches,
            "gradient_clipping": optim.grad_clip,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                # 2e8 elements a bucket fit beside 8B drafters on 64 GB cards.
                "reduce_bucket_size": 200_000_000,
                "allgather_bucket_size": 200_000_000,
                "overlap_comm": ranks.device.type != "cpu",
            },
        }
        if drafter.compute_dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        optimizer = adamw([p for p in module.parameters() if p.requires_grad], optim)
        self._engine, *_ = self._deepspeed.initialize(
            model=module, optimizer=optimizer, config=config
        )
        if stage == 3 and drafter.markov_head is not None:
            # The losses multiply by this weight outside its own module.
            weight = drafter.markov_head.markov_w2.weight
            self._deepspeed.zero.register_external_parameter(self._engine.module, weight)

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._engine.module.named_parameters() if p.requires_grad}

    def backward(self, loss: Callable[[], Tensor]) -> Tensor:
        """See Updates."""
        value = self._engine(loss)
        self._engine.backward(value)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # counts the micro-batch
        return value.detach()

    def step(self, rate: float) -> float:
        """See Updates."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()
        if self._engine.optimizer.overflow:
            return float("nan")
        return float(self._engine.get_global_grad_norm())

    def state(self) -> tuple[Tensors, Tensors]:
        """See Updates."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        weights: Tensors = {}
        optimizer: Tensors = {}
        step = torch.as_tensor(next(iter(self._base_states()))["step"])
        for name, parameter in self._parameters.items():
            whole = safe_get_full_fp32_param(parameter)
            moments = [safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS]
            if self._ranks.is_first:
                weights[name] = whole.detach().cpu().clone()
                for key, moment in zip(_MOMENTS, moments, strict=True):
                    optimizer[f"{key}/{name}"] = moment.detach().cpu().clone()
                optimizer[f"step/{name}"] = step.detach().cpu().clone()
        return weights, optimizer

    def restore(
        self, weights: Tensors, optimizer: Tensors, first_loss: Callable[[], Tensor]
    ) -> None:
        """See Updates.  DeepSpeed makes optimizer state in a first step, so one that moves nothing
        is taken before.
        """
        for _ in range(self.num_micro_batches):
            self.backward(lambda: first_loss() * 0.0)
        self.step(0.0)
        for name, parameter in self._parameters.items():
            states = {key: optimizer[f"{key}/{name}"] for key in _MOMENTS}
            if self._stage == 3:
                self._set_partition(parameter, weights[name], states)
            else:
                _set_whole(parameter, weights[name], states)
            step = optimizer[f"step/{name}"]
        for state in self._base_states():
            state["step"] = step.clone() if torch.is_tensor(state["step"]) else int(step)
        self._publish(weights)

    def _set_partition(self, parameter: nn.Parameter, weight: Tensor, states: Tensors) -> None:
        """Stage 3: write this rank's part; the accessor for whole tensors fails where the ranks'
        equal parts reach beyond the end.
        """
        from deepspeed import utils

        size = utils.safe_get_local_fp32_param(parameter).numel()

        def part(whole: Tensor) -> Tensor:
            room = size * self._ranks.world_size - whole.numel()
            return nn.functional.pad(whole.flatten(), (0, room)).split(size)[self._ranks.rank]

        utils.safe_set_local_fp32_param(parameter, part(weight))
        for key, whole in states.items():
            utils.safe_set_local_optimizer_state(parameter, part(whole), key)

    def _base_states(self) -> list[dict[str, Any]]:
        """State dicts of the AdamW inside DeepSpeed's optimizer, one per partition."""
        return list(self._engine.optimizer.optimizer.state.values())

    @torch.no_grad()
    def _publish(self, weights: Tensors) -> None:
        """Round the restored weights into the model, which the accessors leave alone."""
        for name, parameter in self._parameters.items():
            with self._gathered([parameter], writes=True):
                if self._stage < 3 or self._ranks.is_first:
                    parameter.copy_(weights[name])

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """See Updates."""
        return self._gathered(list(self._parameters.values()), writes=False)

    @contextlib.contextmanager
    def _gathered(self, parameters: list[nn.Parameter], *, writes: bool) -> Iterator[None]:
        if self._stage < 3:
            yield
            return
        rank = 0 if writes else None
        with self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=rank):
            yield


def _set_whole(parameter: nn.Parameter, weight: Tensor, states: Tensors) -> None:
    from deepspeed import utils

    utils.safe_set_full_fp32_param(parameter, weight)
    for key, whole in states.items():
        utils.safe_set_full_optimizer_state(parameter, whole, key)


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for this kind of device, without compiling anything."""
    devices.export_deepspeed_accelerator(device)
    try:
        import deepspeed
    except ImportError as error:
        raise UsageError(
            f"train.zero_stage: needs DeepSpeed (pip install 'treespark[train]'): {error}"
        ) from None
    # A collective library of its own for CPUs that would be compiled for minutes; gloo does it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(devices.dist_backend(device))
    return deepspeed
