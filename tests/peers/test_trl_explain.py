"""Pages that explain steps of TRL's trainer."""

import pytest
import torch
from trl import GRPOTrainer

from grpo_kernels.explain import logs
from grpo_kernels.explain.exports import read
from grpo_kernels.explain.rules import verdicts
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trl_runs import (
    STEPS,
    TWICE,
    arguments_of,
    decided_model,
    noise,
    prompts,
    trained,
)

trl = pytest.importorskip("grpo_kernels.integrations.trl")


class Explained(trl.FusedGRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        from grpo_kernels.integrations.trl.explain import ExplainCallback

        self.add_callback(ExplainCallback(self, every=1))


def weights_of_vllm(inputs):
    """TRL's, of which one is 0 and padding's are 1."""
    ids = inputs["completion_ids"]
    weights = (ids % 7 + 1) / 5 * (ids % 11 > 0)
    return {"importance_sampling_ratio": weights.masked_fill(inputs["completion_mask"] == 0, 1.0)}


CASES = {
    "dapo": {},
    "grpo with a KL": {"loss_type": "grpo", "beta": 0.04, "delta": 1.5},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "bnpo", "beta": 0.04},
    "top entropy": {"top_entropy_quantile": 0.6, "gradient_accumulation_steps": 1},
    "entropy bonus": {"entropy_coef": 0.1, "loss_type": "dr_grpo"},
    "exact KL": {"exact_kl": True, "beta": 0.1},
    "vespo": {"loss_type": "vespo"},
    # Inside of VESPO's weight, beside the advantage of the others.
    **{
        f"{name}, sampler's correction": {"loss_type": name, "injected": weights_of_vllm}
        for name in ("vespo", "grpo")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_page_adds_up_to_the_loss_of_the_step(case, tmp_path, capsys):
    options = {**TWICE, "learning_rate": 0.5, **CASES[case]}
    losses, _, weights = trained(Explained, tmp_path, **options)
    parts, steps = options["gradient_accumulation_steps"], len(losses)
    for step, start in enumerate(range(0, steps, parts), 1):
        path = tmp_path / f"explanations/step-{step:06d}.jsonl"
        explanation = read(path)
        expected = sum(losses[start : start + parts])
        assert explanation.loss == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert len(explanation.sequences) == 4 * parts
        page = path.with_suffix(".html").read_text()
        assert f"<h1>Step {step} of {tmp_path.name}</h1>" in page and 'href="../report' not in page
    said = capsys.readouterr().out
    assert "step 1 explained: " in said and "warning: step" not in said
    second = read(tmp_path / "explanations/step-000002.jsonl")  # on the samples of the first
    assert second.columns["log_ratio"].abs().max() > 0.01
    # A group is of one prompt, and each token has its text.
    for group in explanation.groups:
        assert len({explanation.sequences[i]["prompt"] for i in group["sequences"]}) == 1
    texts = ["".join(row) for row in explanation.texts]
    assert any(texts) and len(texts) == len(explanation.sequences)
    _, _, plain = trained(trl.FusedGRPOTrainer, tmp_path / "plain", **options)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, plain[name], rtol=0, atol=0)


class Jumping(Explained):
    """A trainer whose first step comes after seven calm ones."""

    def log(self, logs, *args, **kwargs):
        if "grad_norm" in logs and self.state.global_step == 1:
            self.callback_handler.callbacks[-1].steps.every = 0
            calm = [{"step": i, "grad_norm": 1e-9} for i in range(7)]
            self.callback_handler.callbacks[-1].steps.open(calm)
        super().log(logs, *args, **kwargs)


def test_a_spike_is_a_warning(tmp_path, capsys):
    trained(Jumping, tmp_path, **TWICE)
    assert "warning: step 1 explained (grad_norm is " in capsys.readouterr().out


def test_another_trainer_is_refused():
    from grpo_kernels.integrations.trl.explain import ExplainCallback

    with pytest.raises(ValueError, match=r"trainer: expected a FusedGRPOTrainer.*; got object"):
        ExplainCallback(object())


def test_what_trl_logs_and_prints_is_read(tmp_path, capsys):
    """The same rows from its file and from its lines, and the signs that they have."""
    options = {"save_strategy": "steps", "save_steps": STEPS, "learning_rate": 1e-4}
    model, tokenizer = decided_model("llama"), make_tokenizer()
    trainer = GRPOTrainer(
        model=model, reward_funcs=noise, args=arguments_of(tmp_path, **options),
        train_dataset=prompts(), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    (printed := tmp_path / "run.log").write_text(capsys.readouterr().out)
    rows, *_ = logs.read(tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0].keys() >= {
        "loss", "grad_norm", "learning_rate", "reward", "reward_std", "groups_equal", "entropy",
        "completion_length", "truncated", "clip_ratio/region_mean",
    }  # fmt: skip
    lines, *_ = logs.read(printed)
    assert [row.keys() for row in lines] == [row.keys() for row in rows]
    assert [row["reward"] for row in lines] == pytest.approx([row["reward"] for row in rows], 1e-3)
    found = [x.rule.name for x in verdicts(rows)]
    assert found == ["truncated", "loss_zero", "kl_absent", "clip_zero"]
