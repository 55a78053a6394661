"""Going back to the last healthy adapter, at a lower learning rate, when a policy has collapsed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeflow import params
from gradeflow.errors import CollapseError
from gradeflow.grpo.guard import REWARD, Guard
from gradeflow.grpo.rollouts import Batch, Rollouts

if TYPE_CHECKING:
    import torch

FILE = "guard.safetensors"
"""In a checkpoint: the adapters to go back to, and, as its metadata, what the guard has seen."""

Weights = dict[str, "torch.Tensor"]


class Rollback:
    """Keeps two earlier adapters of the model: the last that proved healthy, and a later one that is being proved."""

    def __init__(self, model: Any, rollouts: Rollouts, settings: params.Train) -> None:
        self._model = model
        self._rollouts = rollouts
        self._settings = settings
        self._guard = Guard(settings.guard, settings.staleness)
        self._healthy = self._candidate = self._weights() if settings.guard.enabled else {}
        self._healthy_step = self._candidate_step = 0
        self._count = 0
        self.began_anew = 0
        """The update after which the policy was the one again that the run began with; 0 where it never was."""

    def due(self, number: int, logs: Mapping[str, float], batch: Batch) -> bool:
        """Whether the policy has collapsed by update `number`, of which TRL said `logs`."""
        figures = batch.figures()
        last_epoch = number % self._settings.ppo_epochs == 0
        if not (self._settings.guard.enabled and last_epoch and REWARD in figures):
            return False
        names = {"entropy": "entropy", "kl": "kl", "clip_share": "clip_ratio/region_mean"}
        said = {figure: logs[name] for figure, name in names.items() if name in logs}
        verdict = self._guard.look({**figures, **said})
        if verdict == "healthy":
            self._healthy, self._healthy_step = self._candidate, self._candidate_step
            self._candidate, self._candidate_step = self._weights(), number
        return verdict == "collapsed"

    def go_back(self, number: int, optimizer: Any, schedule: Any) -> str:
        """Do so, and say why. What was on its way is thrown away, and the optimizer begins anew.

        Raises:
            CollapseError: it has happened too often.
        """
        import torch

        reason, most = self._guard.reason(), self._settings.guard.max_rollbacks
        if self._count == most:
            raise CollapseError(
                f"step {number}: the policy collapsed after {most} returns to a healthy adapter: {reason}. The best "
                "checkpoint so far is kept; lower train.learning_rate, or raise train.group_size or train.kl_coef"
            )
        self._count += 1
        with torch.no_grad():
            for name, weight in self._trained():
                weight.copy_(self._healthy[name])
        self._candidate, self._candidate_step = self._healthy, self._healthy_step
        self.began_anew = self.began_anew if self._healthy_step else number
        _begin_anew(optimizer, schedule, self._settings.guard.learning_rate_factor)
        self._rollouts.start_again()
        self._guard.went_back()
        factor = self._settings.guard.learning_rate_factor**self._count
        return f"{reason}. Back to the adapter of step {self._healthy_step}, at {factor:.3g} of the learning rate"

    def metrics(self) -> dict[str, float]:
        if not self._settings.guard.enabled:
            return {}
        means = {f"guard/{figure}": mean for figure, mean in self._guard.means().items()}
        return {"guard/rollbacks": float(self._count), **means}

    def save(self, checkpoint: Path) -> None:
        from safetensors.torch import save_file

        if not self._settings.guard.enabled:
            return
        kept = {"healthy": self._healthy, "candidate": self._candidate}
        tensors = {f"{which}.{name}": each.clone() for which, weights in kept.items() for name, each in weights.items()}
        state = {
            "guard": self._guard.state(),
            "healthy_step": self._healthy_step,
            "candidate_step": self._candidate_step,
            "count": self._count,
            "began_anew": self.began_anew,
        }
        save_file(tensors, checkpoint / FILE, {"state": json.dumps(state)})

    def restore(self, checkpoint: Path) -> None:
        from safetensors import safe_open

        if not self._settings.guard.enabled:
            return
        with safe_open(checkpoint / FILE, "pt") as file:
            state = json.loads(file.metadata()["state"])
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        self._healthy, self._candidate = (
            {name.removeprefix(which): weight for name, weight in found.items() if name.startswith(which)}
            for which in ("healthy.", "candidate.")
        )
        self._guard.restore(state["guard"])
        self._healthy_step, self._candidate_step = state["healthy_step"], state["candidate_step"]
        self._count, self.began_anew = state["count"], state["began_anew"]

    def _trained(self) -> "list[tuple[str, torch.Tensor]]":
        return [(name, weight) for name, weight in self._model.named_parameters() if weight.requires_grad]

    def _weights(self) -> Weights:
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self._trained()}


def _begin_anew(optimizer: Any, schedule: Any, factor: float) -> None:
    """Forget the moments, and lower the rates: of both, which is what checkpoints keep."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] *= factor
        group["initial_lr"] *= factor
    schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]  # noqa: SLF001 - what is logged next
