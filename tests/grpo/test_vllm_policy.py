"""Rollouts from vLLM: what a named stand-in for the server shows, and a training with the real one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gradeflow import params
from gradeflow.adapter import BaseIdentity, vllm
from gradeflow.errors import AGAIN, AdapterError, ProviderError, SettingsError, SetupError
from gradeflow.grpo import loop, trainer, vllm_policy
from gradeflow.grpo.policy import Completion
from gradeflow.grpo.vllm_policy import VllmPolicy
from gradeflow.types import Rollout
from support import courses, tiny
from support.courses import Grader, Small
from support.vllm_server import VllmServer

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and TRL

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the tiny base."""
    folder = tmp_path_factory.mktemp("base")
    tiny.settings(folder)
    return folder


class Connected:
    """A course, its policy at a stand-in for the server, and what is asked of both."""

    def __init__(self, small: Small, server: VllmServer, policy: VllmPolicy) -> None:
        self.model: Any = small.course.model
        self.background = small.course.background
        self.server = server
        self.policy = policy

    def move(self, by: float = 0.05) -> None:
        """An update, of a kind."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "lora_B" in name:
                    weight.add_(by)

    def write(self, version: int, temperature: float = 0.7) -> Completion:
        return self.background.run(self.policy.complete(PROMPT, 3, temperature, version))


@contextmanager
def connected(folder: Path, run: Path, *, patience: float = 5.0, **breaks: Any) -> Iterator[Connected]:
    with VllmServer(folder / "tiny-base", **breaks) as server:
        changes = {
            "train__staleness": 1,
            "train__rollouts__patience_s": patience,
            "train__rollouts__url": f"{server.url}/v1",
        }
        with (
            courses.course(folder, Grader(lambda _: [0.0, 1.0]), run=str(run), **changes) as small,
            loop.policy_of(small.course, small.settings.train) as policy,
        ):
            assert isinstance(policy, VllmPolicy)
            yield Connected(small, server, policy)


def test_each_version_is_written_with_its_own_adapter_and_older_ones_go(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path) as found:
        assert not found.server.adapters
        for version in range(5):
            found.policy.serve(version)
            found.policy.serve(version)
            written = found.write(version)
            expected = log_probs_by_hand(found.model, PROMPT, written.ids, 0.7)
            torch.testing.assert_close(torch.tensor(written.log_probs), expected, rtol=1e-4, atol=1e-4)
            assert found.server.asked[-1]["model"].startswith(f"policy-{version}-")
            found.move()
        loaded = found.server.loads[1:]  # after the one that was tried at the start
        assert [name.split("-")[1] for name in loaded] == ["0", "1", "2", "3", "4"]
        assert list(found.server.adapters) == loaded[-3:]
        assert found.server.most == 3
        folder = Path(found.server.adapters[loaded[-1]]).parent
        assert sorted(path.name for path in folder.iterdir()) == sorted(loaded[-3:])
    assert not found.server.adapters
    assert not folder.exists()


def test_where_nothing_has_changed_nothing_is_loaded(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path) as found:
        found.policy.serve(0)
        found.policy.serve(1)
        assert found.write(0) == found.write(1)
        assert len(found.server.loads) == 2


def test_an_adapter_that_adds_nothing_is_the_base(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path) as found:
        with torch.no_grad():
            for name, weight in found.model.named_parameters():
                if "lora_B" in name:
                    weight.zero_()
        found.policy.serve(0)
        found.write(0)
        assert found.server.asked[-1]["model"] == "base"
        found.move()
        found.policy.serve(1)
        found.write(1)
        assert found.server.asked[-1]["model"].startswith("policy-1-")


def test_a_request_waits_for_its_version(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path) as found:
        early = found.background.start(found.policy.complete(PROMPT, 3, 0.7, 1))
        found.policy.serve(0)
        found.move()
        assert not early.done()
        found.policy.serve(1)
        assert early.result(10) == found.write(1) != found.write(0)


def test_a_busy_server_is_asked_again(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path) as found:
        found.policy.serve(0)
        found.server.busy = 2
        assert found.write(0).ids
        assert found.server.busy == 0


def test_a_server_that_was_started_again_gets_the_adapter_again(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path) as found:
        found.policy.serve(0)
        before = found.write(0)
        found.server.forgets = 1
        assert found.write(0) == before
        assert found.server.loads[1] == found.server.loads[2]


def test_a_server_that_never_has_what_it_has_loaded_is_told_of(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path) as found:
        found.policy.serve(0)
        found.server.forgets = 1000
        with pytest.raises(ProviderError, match=r"does not exist|more than one server"):
            found.write(0)


def test_a_run_whose_server_stays_busy_ends_to_be_gone_on_with(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path, patience=0.3) as found:
        found.policy.serve(0)
        found.server.busy = 1000
        with pytest.raises(ProviderError, match=r"busy .*the same command goes on from the last") as stopped:
            found.write(0)
        assert stopped.value.status == AGAIN


def test_a_run_whose_server_is_gone_ends_to_be_gone_on_with(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path, patience=0.3) as found:
        found.policy.serve(0)
        found.policy._client.url = "http://127.0.0.1:9/v1"  # where nobody listens
        with pytest.raises(ProviderError, match="the same command goes on from the last checkpoint") as stopped:
            found.write(0)
        assert (stopped.value.status, stopped.value.cause) == (AGAIN, "unreachable")


def test_adapters_that_an_interrupted_run_has_left_are_unloaded(base: Path, tmp_path: Path) -> None:
    with connected(base, tmp_path) as found:
        left = found.policy._folder / "policy-7-abc"
        found.server.adapters |= {"policy-7-abc": str(left), "another": "/elsewhere"}
        found.policy.connect()
        assert set(found.server.adapters) == {"another"}


def test_an_adapter_that_binds_to_nothing_is_refused(base: Path, tmp_path: Path) -> None:
    said = r"in vLLM, as policy-0-.* by 0 instead of .*not all modules are bound"
    with connected(base, tmp_path, binds=False) as found, pytest.raises(AdapterError, match=said):
        found.policy.serve(0)


def test_a_server_with_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    with VllmServer(base / "tiny-base") as server:
        torch.nn.init.normal_(server.model.model.embed_tokens.weight, std=0.5)
        changes = {"train__rollouts__url": f"{server.url}/v1"}
        with (
            courses.course(base, Grader(lambda _: []), run=str(tmp_path), **changes) as small,
            pytest.raises(SettingsError, match=r"base at http.* is not this base, or is quantized"),
            loop.policy_of(small.course, small.settings.train),
        ):
            raise AssertionError


@pytest.mark.parametrize(
    ("breaks", "error", "said"),
    [
        ({"processed": False}, SettingsError, "--logprobs-mode processed_logprobs"),
        ({"sees": False}, SetupError, "train.rollouts.folder names one that both see"),
    ],
)
def test_a_server_that_cannot_serve_a_training_is_found_at_the_start(
    breaks: dict[str, Any], error: type[Exception], said: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said), connected(base, tmp_path, **breaks):
        raise AssertionError


def test_the_loss_weighs_by_what_vllm_told(base: Path, tmp_path: Path) -> None:
    """The stand-in computes as the trainer does, so the two agree; where it is made to differ, the ratio follows."""
    scores = Grader(lambda _: [0.0, 1.0, 1.0, 0.0])
    steps = {"train__max_steps": 2, "train__prompts_per_step": 2, "train__learning_rate": 0.02}
    found = []
    with VllmServer(base / "tiny-base") as server:
        for skew in (0.0, 0.5):
            server.skew = skew
            changes = {**steps, "train__rollouts__url": f"{server.url}/v1"}
            with (
                courses.course(base, scores, run=str(tmp_path / str(skew)), **changes) as small,
                loop.policy_of(small.course, small.settings.train) as policy,
            ):
                found.append([update["logs"] for update in trained(small, policy)])
    plain, skewed = found
    assert all(logs["log_prob_gap"] < 1e-4 and logs["clip_ratio/region_mean"] == 0 for logs in plain)
    assert all(logs["log_prob_gap"] == pytest.approx(0.5, abs=1e-3) for logs in skewed)
    assert all(logs["clip_ratio/region_mean"] > 0 for logs in skewed)


def ready(**changes: object) -> None:
    overrides = {name.replace("__", "."): str(value) for name, value in changes.items()}
    asyncio.run(loop.require_ready(params.load(tiny.ROOT / "params.yaml", overrides).train))


def test_of_the_trainers_own_model_nothing_is_asked() -> None:
    ready(train__top_p=0.9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__top_p": 0.9}, r"train\.top_p is 0\.9 and train\.top_k 0"),
        ({"train__top_k": 50}, r"train\.top_p is 1 and train\.top_k 50"),
        ({"train__lora__target_modules": "[q_proj, lm_head]"}, "does not take LoRA on lm_head"),
        ({"train__lora__rank": 512}, "vllm is not there"),
    ],
)
def test_what_vllm_cannot_do_is_found_before_it_starts(
    changes: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SettingsError, SetupError), match=said):
        ready(**changes, train__rollouts__url="vllm")


def test_a_running_server_must_load_adapters_and_have_room(base: Path) -> None:
    with VllmServer(base / "tiny-base") as server:
        url = f"{server.url}/v1"
        ready(train__rollouts__url=url)
        server.room = 600
        with pytest.raises(SettingsError, match=r"608 tokens; base at .* has 600\. Start it with --max-model-len 608"):
            ready(train__rollouts__url=url)
        server.room, server.updates = 608, False
        with pytest.raises(SettingsError, match="LORA_UPDATING=1 and --enable-lora --max-lora-rank 8 --max-loras 2"):
            ready(train__rollouts__url=url)


def test_vllm_is_started_with_room_for_all_adapters_that_may_be_asked_for() -> None:
    changes = {"train.staleness": "3", "train.lora.rank": "12", "train.dtype": "bfloat16"}
    settings = params.load(tiny.ROOT / "params.yaml", changes).train
    hub = BaseIdentity("Qwen/Qwen2.5-7B-Instruct", "a09a", "d")
    assert vllm_policy.command_of(Path("bin/vllm"), hub.name, hub, settings, 8000) == [
        *("bin/vllm", "serve", hub.name, "--served-model-name", hub.name),
        *("--revision", "a09a", "--tokenizer-revision", "a09a"),
        *("--host", "127.0.0.1", "--port", "8000", "--dtype", "bfloat16", "--max-model-len", "608"),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--enable-lora", "--max-lora-rank", "16", "--max-loras", "5", "--max-cpu-loras", "5"),
        *("--gpu-memory-utilization", "0.4"),
    ]


@pytest.mark.slow
@pytest.mark.skipif(not vllm.program().is_file(), reason="there is no vLLM; `make vllm` installs it")
def test_twenty_adapters_through_vllm(tmp_path: Path) -> None:
    """Log-probabilities are the trainer's with the weights that wrote; both bases stay; what pays is learnt."""
    steps = {
        "train__max_steps": 20,
        "train__prompts_per_step": 4,
        "train__group_size": 8,
        "train__micro_batch": 32,
        "train__max_completion_tokens": 32,
        "train__learning_rate": 0.01,
        "train__warmup_steps": 0,
        "train__staleness": 1,
        "train__temperature": 0.8,
        "train__temperature_end": 1.2,
        "train__temperature_steps": 20,
        "train__rollouts__url": "vllm",
    }
    tiny.settings(tmp_path, taught=True)
    with courses.course(tmp_path, Customs(), **steps) as small:
        course, settings = small.course, small.settings
        before = frozen(course.model)
        with loop.policy_of(course, settings.train) as policy:
            assert isinstance(policy, VllmPolicy)
            base = course.background.run(policy._client.read(policy._base.name, policy._probes))
            updates = trained(small, policy)
            cards = course.background.run(policy._client.cards())
            again = course.background.run(policy._client.read(policy._base.name, policy._probes))
        assert again == pytest.approx(base, abs=1e-5)
        assert all(torch.equal(each, before[name]) for name, each in frozen(course.model).items())
        loaded = [card.name.split("-")[1] for card in cards if card.parent]
        assert loaded == ["16", "17", "18"]  # what the last update learns from was written before
        batches = [update["batch"].rollouts for update in updates]
        assert {one.version for batch in batches for one in batch} >= set(range(19))
        gaps = [
            (torch.tensor(one.turns[0].log_probs) - by_hand(course.model, updates[one.version]["weights"], one)).abs()
            for batch in batches
            for one in batch
        ]
        scores = [sum(one.sample.score or 0 for one in batch) / len(batch) for batch in batches]
        assert max(float(gap.max()) for gap in gaps) < 1e-3
        assert updates[0]["logs"]["log_prob_gap"] < 1e-4
        assert sum(scores[-5:]) > sum(scores[:5]) + 1


class Customs(Grader):
    """A stand-in that pays for one of the operators."""

    def __init__(self) -> None:
        super().__init__(lambda _: [])

    def score(self, text: str, example: Any) -> float:
        return float("custom(" in text)


def frozen(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters() if "lora" not in name}


def by_hand(model: Any, weights: Any, rollout: Rollout) -> torch.Tensor:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in weights:
                weight.copy_(weights[name])
    (turn,) = rollout.turns
    return log_probs_by_hand(model, turn.prompt_ids, turn.completion_ids, rollout.temperature)


def log_probs_by_hand(model: Any, prompt: Any, completion: Any, temperature: float) -> torch.Tensor:
    model.eval()
    ids = torch.tensor([*prompt, *completion])
    with torch.no_grad():
        shares = (model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return shares.gather(1, ids[len(prompt) :, None])[:, 0]


def trained(small: Small, policy: Any) -> list[dict[str, Any]]:
    """The course's updates: the adapter's weights from before each, its batch, and what was logged."""
    from transformers import TrainerCallback

    course, settings = small.course, small.settings
    rollouts = loop.rollouts_of(course, settings.train, policy)
    made = trainer.make(course.model, course.tokenizer, rollouts, settings.train, course.folder, dict, lambda _: None)
    found: list[dict[str, Any]] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            lora = {name: each.detach().clone() for name, each in course.model.named_parameters() if "lora" in name}
            found.append({"weights": lora})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            found[-1].update({"logs": logs, "batch": made.batch} if "loss" in logs else {})

    made.add_callback(Look())
    made.train()
    return found
