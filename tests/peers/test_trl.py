"""Options of TRL's trainer beside ours: its losses, gradient norms, metrics and weights.

A run of TRL's own trainer stands against runs of ours from the same seed: as TRL has the
completions, and with some left out or moved (`skip_untrained`, `sort_by_length`).
"""

import pytest
import torch

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig
from trl import GRPOTrainer

from grpo_kernels.explain.exports import read
from grpo_kernels.integrations.trl import FusedGRPOTrainer
from grpo_kernels.integrations.trl.explain import ExplainCallback
from grpo_kernels.loss.losses import Clip
from tests.helpers.trl_runs import (
    FOUR,
    assert_same_run,
    assert_same_training,
    assert_same_updates,
    run,
)

pytestmark = pytest.mark.usefixtures("real_memory", "own_precision")
TWICE = {"num_iterations": 2, **FOUR}
SEQUENCE = {"importance_sampling_level": "sequence"}
LORA = {"peft_config": LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM")}
# Adapters that begin somewhere.
MOVED_LORA = {"peft_config": LoraConfig(r=2, lora_alpha=8, init_lora_weights=False)}


class OfLogits(GRPOTrainer):
    """TRL's trainer, with the KL of all logits in the place of its estimate."""

    def _compute_loss(self, model, inputs):
        beta, self.beta = self.beta, 0.0
        loss, self.beta = super()._compute_loss(model, inputs), beta
        ids, masks = (
            torch.cat([inputs[f"{x}_{name}"] for x in ("prompt", "completion")], 1)
            for name in ("ids", "mask")
        )
        mask, T = inputs["completion_mask"], inputs["completion_ids"].shape[1]

        def log_p(any_model):
            logits = any_model(ids, attention_mask=masks).logits[:, -T - 1 : -1]
            return (logits / self.temperature).log_softmax(-1)

        if self.ref_model is not None:
            with torch.no_grad():
                t = log_p(self.ref_model)
        else:
            with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
                t = log_p(model)
        s = log_p(model)
        kl = (s.exp() * (s - t)).sum(-1) * mask
        sequence_kl = kl.sum(1) / mask.sum(1).clamp(min=1)
        return loss + beta * sequence_kl.mean() / self.current_gradient_accumulation_steps


def weights_of_vllm(batch):
    """Weights of a sampler's correction: some are 0, and padding's are 1."""
    ids = batch["completion_ids"]
    weights = (ids % 7 + 1) / 5 * (ids % 11 > 0)
    return {"importance_sampling_ratio": weights.masked_fill(batch["completion_mask"] == 0, 1.0)}


def weights_of_sequences(batch):
    weights = weights_of_vllm(batch)["importance_sampling_ratio"][:, :1]
    return {"importance_sampling_ratio": weights}


def with_holes(batch):
    """A mask with tokens in the middle that are not trained, nor attended to."""
    return {"completion_mask": batch["completion_mask"] * (batch["completion_ids"] % 4 > 0)}


def a_tool_s_words(batch):
    """Masks out a tool's tokens, and gives the other tokens an advantage each."""
    ids, rows = batch["completion_ids"], batch["advantages"][:, None]
    return {"tool_mask": (ids % 5 != 0).long(), "advantages": rows * (ids % 3 + 1)}


def pixels(inputs):
    """Pixels of one image per prompt, in four patches."""
    prompts, count = inputs["prompt_ids"].clone(), len(inputs["prompt_ids"])
    prompts[:, -4:] = 3
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return {"prompt_ids": prompts, "num_images": [1] * count, "pixel_values": images}


def one_token_counts(_):
    """All completions but one have been cut and are masked."""
    return {"num_items_in_batch": torch.tensor(1.0)}


# Ways of ours, and their options.
WAYS = {
    "plain": {},
    "skipped": {"skip_untrained": True},
    "sorted": {"sort_by_length": True},
}
# id: (ways, options of both trainers), of which `ours` are for ours and `trl` for TRL's alone.
CASES = {
    # Of all of these each token, or each sequence, has its own gradient.
    **{name: ("plain skipped", {"loss_type": name, **FOUR})
       for name in ("dapo", "bnpo", "sapo", "luspo")},
    "vespo": ("plain skipped", {"loss_type": "vespo", "mask_truncated_completions": True, **TWICE}),
    "cispo": ("plain skipped", {"loss_type": "cispo", "epsilon_high": 1.5, **TWICE}),
    "delta, temperature": ("plain sorted", {
        "delta": 1.1, "epsilon": 0.01, "epsilon_high": 0.02, "temperature": 0.7, **TWICE}),
    "sequence": ("plain skipped sorted", {"loss_type": "dr_grpo", **SEQUENCE, **TWICE}),
    "off_policy": ("plain skipped", {"off_policy_mask_threshold": 1e-3, **TWICE}),
    # What all tokens of a micro-batch take part in.
    "kl": ("plain sorted", {"beta": 0.1, "loss_type": "grpo", **TWICE}),
    "kl_uncorrected, truncated": ("plain sorted", {
        "beta": 0.1, "use_bias_correction_kl": False, "mask_truncated_completions": True, **TWICE}),
    "exact KL": ("plain sorted", {
        "beta": 2.0, "loss_type": "grpo", "ours": {"exact_kl": True}, "trl_class": OfLogits,
        **TWICE}),
    "exact KL, LoRA": ("plain", {
        "beta": 2.0, "loss_type": "grpo", "ours": {"exact_kl": True}, "trl_class": OfLogits,
        **MOVED_LORA, **TWICE}),
    # No threshold of these runs lies among tokens of equal context, which rounding would cut.
    "top_entropy": ("plain", {"top_entropy_quantile": 0.6, **TWICE}),
    "entropy bonus": ("plain", {"entropy_coef": 0.1, "loss_type": "grpo", **TWICE}),
    "adaptive entropy": ("plain", {
        "use_adaptive_entropy": True, "entropy_target": 3.0, "entropy_coef": 0.02, **TWICE}),
    # Their load-balancing loss and its gradient are TRL's.
    **{f"experts, {name}": ("plain", {"family": "qwen3_moe", "loss_type": name, **FOUR})
       for name in ("grpo", "vespo")},
    # Models.
    "float32_head, tied": ("plain", {"cast_lm_head_to_fp32": True, "family": "llama", **TWICE}),
    "checkpointed, softcap": ("plain", {"gradient_checkpointing": True, "family": "gemma2"}),
    "learned positions": ("skipped", {"family": "gpt2", "disable_dropout": True, **FOUR}),
    "lora": ("plain skipped", {"learning_rate": 0.5, **LORA, **FOUR}),
    "pixels": ("plain", {"injected": pixels, "family": "llava"}),
    # What comes with a batch.
    "tool": ("plain skipped", {"scored": a_tool_s_words, **TWICE}),
    "a mask with holes": ("skipped", {"scored": with_holes, **FOUR}),
    **{f"sampler's correction, {name}": ("plain skipped", {
        "scored": weights_of_vllm, "loss_type": name, **TWICE}) for name in ("grpo", "vespo")},
    "sampler's correction of sequences": ("plain", {
        "scored": weights_of_sequences, "beta": 0.1, **TWICE}),
    "completions of a token": ("skipped", {
        "completions": lambda prompts: [[40 + i] for i, _ in enumerate(prompts)],
        "loss_type": "grpo", **SEQUENCE, **TWICE}),
    "fewer tokens than steps, entropy bonus": ("plain", {
        "injected": one_token_counts, "steps_per_generation": 4, "entropy_coef": 0.1,
        "num_iterations": 2, "gradient_accumulation_steps": 2}),
    "truncated, padded to 8": ("skipped", {
        "mask_truncated_completions": True, "pad_to_multiple_of": 8, **FOUR}),
    # Steps and batches.
    "every completion counts": ("skipped", {"share": 0.0, **FOUR}),
    "several updates of a batch, twice": ("plain skipped", {
        "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
        "max_steps": 6}),
    "steps that begin within a batch": ("skipped", {
        "gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 5}),
    "a step that ends with the epoch": ("skipped", {"max_steps": 8, **FOUR}),
    "evaluation in groups of two": ("plain skipped", {
        "evaluate": True, "per_device_eval_batch_size": 4, "num_generations_eval": 2, **FOUR}),
    # Losses of one's own that are TRL's.
    "own dapo, a KL and a bonus": ("plain", {
        "beta": 0.1, "entropy_coef": 0.1, "ours": {"loss": Clip()}, **TWICE}),
    "own bnpo": ("plain skipped", {
        "ours": {"loss": Clip(aggregation="bnpo")}, "trl": {"loss_type": "bnpo"}, **TWICE}),
    # Takes two passes; TRL then logs ratios of tokens.
    "own sequence": ("plain", {
        "ours": {"loss": Clip(aggregation="grpo", ratio_level="sequence")},
        "trl": {"loss_type": "grpo", **SEQUENCE}, **TWICE}),
    # Options that a callback changes, where TRL reads them.
    **{f"{name} of the step": ("plain", {
        "loss_type": "grpo", "epsilon": 0.5, "changed": ("trainer", {name: value}), **TWICE})
       for name, value in {
           "importance_sampling_level": "sequence", "loss_type": "dr_grpo"}.items()},
    "delta of the step": ("plain", {
        "loss_type": "grpo", "epsilon": 0.5, "changed": ("args", {"delta": 1.001}), **TWICE}),
}  # fmt: skip


def with_changed(kind, owner, options):
    """A trainer class whose options are others when a loss is computed."""

    class Changed(kind):
        def _compute_loss(self, model, inputs):
            vars(self if owner == "trainer" else self.args).update(options)
            return super()._compute_loss(model, inputs)

    return Changed


class Explained(FusedGRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(ExplainCallback(self, every=1))


@pytest.mark.parametrize("case", CASES)
def test_the_same_run(case, tmp_path):
    ways, options = CASES[case]
    options = {**options}
    ours, trl = options.pop("ours", {}), options.pop("trl", {})
    trl_class, their_calls = options.pop("trl_class", GRPOTrainer), []
    our_classes = FusedGRPOTrainer, Explained
    if changed := options.pop("changed", None):
        trl_class = with_changed(trl_class, *changed)
        our_classes = [with_changed(kind, *changed) for kind in our_classes]
    theirs = run(trl_class, tmp_path / "theirs", calls=their_calls, **options, **trl)
    for way in ways.split():
        folder, calls = tmp_path / way, []
        # A page of each step, of text; a run without pages follows the same functions elsewhere.
        pages = way == "plain" and not {"family", "evaluate"} & options.keys()
        actual = run(our_classes[pages], folder, calls=calls, **options, **ours, **WAYS[way])
        if pages:
            assert_pages_add_up(folder, actual[0], options.get("gradient_accumulation_steps", 1))
        if way != "plain":
            assert_same_updates(actual, theirs, 1e-5 if trl_class is OfLogits else 1e-6)
            check_calls(case, options, way, calls, their_calls)
        elif trl_class is OfLogits or case == "own sequence":
            assert_same_training(actual, theirs, 1e-4)
        else:
            assert_same_run(actual, theirs)
        if not ours:  # whose own losses log less
            assert [row.keys() for row in actual[1]] == [row.keys() for row in theirs[1]]
    log = theirs[1]
    if case.startswith("delta"):  # else clipping was not looked at
        assert any(row.get("clip_ratio/region_mean", 0) > 0 for row in log)
    assert any("eval_loss" in row for row in log) == ("evaluate" in options)
    assert ("aux_loss" in log[0] and log[0]["aux_loss"] > 0) == case.startswith("experts")
    if trl_class is OfLogits:
        kls = [row["kl_exact"] for row in actual[1] if "kl" in row]
        assert len(kls) == 3 and min(kls[1:]) > 1e-4


def check_calls(case, options, way, calls, their_calls):
    """Checks how much of the batches went through the model."""
    rows, all_rows = (sum(shape[0] for shape in x) for x in (calls, their_calls))
    cells, all_cells = (sum(shape[0] * shape[1] for shape in x) for x in (calls, their_calls))
    assert rows <= all_rows and cells < all_cells and len(calls) <= len(their_calls)
    once = options.get("num_iterations", 1) == 1 and "steps_per_generation" not in options
    if way == "skipped" and once:
        # Otherwise old log-probs, of all completions, are computed while the model trains.
        share = options.get("share", 0.5)
        assert rows < (1 - share) * all_rows and cells < 0.8 * (1 - share) * all_cells
    if case == "every completion counts":  # the longest come first in each optimizer step
        size = len(calls) // 3  # calls of each of the three steps
        steps = [[shape[1] for shape in calls[i * size : (i + 1) * size]] for i in range(3)]
        assert all(widths == sorted(widths, reverse=True) for widths in steps), steps
        assert all(widths[0] > widths[-1] for widths in steps)
    pad_to = options.get("pad_to_multiple_of", 1)
    assert not any(shape[1] % pad_to for shape in calls if shape[0] > 1)


def assert_pages_add_up(folder, losses, parts):
    """Compares the explanation of each step with the sum of its micro-batches' losses."""
    for step, start in enumerate(range(0, len(losses), parts), 1):
        path = folder / f"explanations/step-{step:06d}.jsonl"
        explanation = read(path)
        expected = sum(losses[start : start + parts])
        assert explanation.loss == pytest.approx(expected, rel=1e-4, abs=2e-6)
        page = path.with_suffix(".html").read_text()
        assert f"<h1>Step {step} of {folder.name}</h1>" in page and 'href="../report' not in page
    # A group is of one prompt, and each token has its text.
    for group in explanation.groups:
        assert len({explanation.sequences[i]["prompt"] for i in group["sequences"]}) == 1
    texts = ["".join(row) for row in explanation.texts]
    assert any(texts) and len(texts) == len(explanation.sequences)
