"""Refusals of `integrations/`: heads of transformers' models, Liger, TRL, vLLM and verl."""

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import peft
import pytest
import torch
import transformers
from accelerate import cpu_offload
from trl import GRPOTrainer

from grpo_kernels import GRPOLossConfig
from grpo_kernels.integrations import verl
from grpo_kernels.integrations import vllm as extension
from grpo_kernels.integrations.generation import SupportRecorder, refuse_processors
from grpo_kernels.integrations.hf_head import check_logits
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss, patch_liger
from grpo_kernels.integrations.transformers import (
    Objective,
    _load_balancing_loss,
    attach_fused_head,
    detach_fused_head,
)
from grpo_kernels.integrations.trl import FusedGRPOTrainer, exact_kl, patch_trl
from grpo_kernels.integrations.trl.explain import ExplainCallback
from grpo_kernels.integrations.trl.replay import _check_source, _mask_supports
from grpo_kernels.integrations.trl.state import Options
from grpo_kernels.integrations.trl.trainer import _constructor_patches
from grpo_kernels.loss.losses import Clip
from tests.helpers.model_families import LORAS, family_model, with_lora
from tests.helpers.quantised import Quantised
from tests.helpers.tiny_models import V, make_model, make_tokenizer
from tests.helpers.trl_runs import arguments_of, decided_model, noise, prompts, trained
from tests.peers.test_transformers import batch_of
from tests.refusals import Row, table
from tests.refusals.core import own

# Heads of transformers' models: at attachment


def lora_model(**options: Any) -> Any:
    return with_lora(family_model("qwen2"), **options)


def attached(model: Callable[[], Any], **options: Any) -> None:
    attach_fused_head(model(), **options)


def adalora() -> Any:
    config = peft.AdaLoraConfig(target_modules=["lm_head"], total_step=10, task_type="CAUSAL_LM")
    return peft.get_peft_model(family_model("qwen2"), config)


def without_body() -> Any:
    model = family_model("qwen2")
    model.base_model_prefix = ""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    model.get_input_embeddings, model.get_output_embeddings = lambda: inputs, lambda: outputs
    del model.model
    return model


def quantised() -> Any:
    model = family_model("qwen2")
    weight = Quantised(model.lm_head.weight.detach())
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def with_logits(change: Callable, dtype: torch.dtype = torch.float32) -> Any:
    """A model of small logits, which are changed."""
    model = family_model("qwen2").to(dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.05)
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = forward
    return model


def wrapped() -> None:
    model = with_head(make_model("llama"))
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    detach_fused_head(model)


def with_head(model: Any = None) -> Any:
    model = make_model("llama") if model is None else model
    attach_fused_head(model)
    return model


T5 = {"vocab_size": V, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
PROMPTS = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
LLAMA = partial(make_model, "llama")
SCALED = "model: expected logits ... scaled and capped as the config says; those of Qwen2"
AT_ATTACHMENT = [
    *table(attached,
        ("model: has a fused head already, with", {"model": with_head, "keyword": "other"}),
        ("model: expected a decoder-only model; got T5", {
            "model": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))}),
        ("model: expected adapters inside the layers ..., which puts virtual tokens before",
         {"model": lambda: peft.get_peft_model(make_model("llama"), PROMPTS)}),
        ("model: expected no adapter ... no variant such as DoRA",
         {"model": partial(lora_model, target_modules=["lm_head"], use_dora=True)}),
        ("model: ...no variant such as DoRA); got ...adalora.layer.SVDLinear", {"model": adalora}),
        ("model: expected a causal ... layers are in one module ...; got", {"model": without_body}),
        ("model: ...got Linear with a Quantised: exclude the output layer", {"model": quantised}),
        *((SCALED, {"model": partial(with_logits, change, dtype)})
          for dtype in (torch.float32, torch.bfloat16)
          for change in (torch.sinh, lambda x: 0.96 * x, lambda x: x.clamp(-50.0, 50.0),
                         lambda x: 30.0 * (x / 30.0).tanh(), lambda x: x - 9.0 * (x > 60.0),
                         lambda x: x[..., :-1])),
        ("model: expected a model of transformers", {"model": lambda: torch.nn.Linear(2, 2)}),
        ("execution: expected an Execution; got 'torch'", {"model": LLAMA, "execution": "torch"}),
    ),
    *table(lambda: check_logits(cpu_offload(family_model("qwen2"))),
        ("model: expected the output layer's weight in memory", {})),
    *table(detach_fused_head,
        ("model: has no fused head to detach", {"model": make_model("llama")})),
    *table(wrapped, ("model: its forward was wrapped after attach_fused_head", {})),
]  # fmt: skip


# At a call

INPUTS, LABELS = batch_of()
ONES = torch.ones(3)
SEQUENCES = Objective(ONES, config=GRPOLossConfig(loss_type="grpo"))


@cache
def llama() -> Any:
    return with_head(make_model("llama"))


def head_call(request: Any = True, model: Callable[[], Any] = llama, **kwargs: Any) -> None:
    model()(**{**INPUTS, "labels": LABELS, "fused_head": request, **kwargs})


def objective(**options: Any) -> None:
    head_call(Objective(**{"advantages": ONES, **options}))


def double(layer: Any, *tensors: Any) -> None:
    return None


def hooked(where: str, kind: str, lora: str | None = None) -> None:
    model = with_head(lora_model(**LORAS[lora]) if lora else family_model("qwen2"))
    layer = model.get_output_embeddings().get_submodule(where)
    getattr(layer, f"register_{kind}")(double)
    head_call(model=lambda: model)


def named_adapters(lora: str) -> None:
    model = with_head(lora_model(**LORAS[lora]).eval())
    head_call(model=lambda: model, adapter_names=["default", "__base__", "default"])


def packed(positions: Any) -> dict[str, Any]:
    """Positions of rows with two sequences; all of their labels count."""
    return {"position_ids": positions, "labels": INPUTS["input_ids"], "request": SEQUENCES}


TWO_ROWS, ROW = torch.cat([torch.arange(7), torch.arange(4)])[None], torch.arange(11)
HOOK = "model: ...double on the output layer does not work ...: move it to the model's body"
ONE_ROW = " does not work with loss_type='grpo' and these options, which need one sequence per row"
AT_A_CALL = [
    *table(head_call,
        ("labels: expected token ids ... got neither", {"labels": None}),
        ("labels: expected shape [3, 11]", {"labels": LABELS[:, :-1]}),
        ("labels: expected a tensor with values; got one on", {"labels": LABELS.to("meta")}),
        ("logits_to_keep: expected at most 10", {"logits_to_keep": 11}),
        ("logits_to_keep: expected an int >= 0", {"logits_to_keep": -1}),
        ("use_cache does not work with a fused head, which scores full", {"use_cache": True}),
        ("inputs_embeds does not work with a fused head",
         {"input_ids": None, "inputs_embeds": torch.ones(3, 11, 32)}),
        ("output_hidden_states=True does not work with a fused", {"output_hidden_states": True}),
        ("num_items_in_batch=... with the 'grpo' aggregation, which divides by the number of seq",
         {"num_items_in_batch": torch.tensor(9), "request": SEQUENCES}),
        (f"cu_seq_lens_q{ONE_ROW}",
         {"cu_seq_lens_q": torch.tensor([0, 4, 11]), "request": SEQUENCES}),
        (f"seq_idx{ONE_ROW}", {"seq_idx": torch.zeros(3, 11).int(), "request": SEQUENCES}),
        (f"position_ids{ONE_ROW}", packed(TWO_ROWS)),
        (f"position_ids{ONE_ROW}", packed(torch.stack([ROW, ROW % 9, ROW]))),
        ("fused_head: expected True or an Objective; got 1.0", {"request": 1.0}),
        ("'beta' is not an argument of LlamaForCausalLM", {"beta": ONES}),
    ),
    *table(objective,
        ("mask: expected shape [3, 10]; got [10]", {"mask": torch.ones(10)}),
        ("targets: expected ids in", {"ce_weights": torch.ones(3, 10)}),
        ("old_logps: no effect without advantages", {"advantages": None, "old_logps": ONES}),
        ("states=True does not work with advantages, mask or support", {"states": True}),
        ("config: expected a GRPOLossConfig; got dict", {"config": {"beta": 0.1}}),
        ("execution: expected an Execution; got {}", {"execution": {}}),
        ("states: expected a bool; got 1", {"states": 1}),
    ),
    *table(lambda: Objective(ONES).explain(),
        ("objective: has no loss yet: pass it to the model", {})),
    *table(hooked, *((HOOK, {"where": "", "kind": kind}) for kind in (
        "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook",
        "backward_hook",
    ))),
    *table(hooked, *(
        (HOOK, {"where": where, "kind": "forward_hook", "lora": lora}) for lora, where in (
            ("head", ""), ("head", "base_layer"), ("head", "lora_B.default"),
            ("head_copied", "modules_to_save.default"))
    )),
    *table(named_adapters, *(
        ("model: ...on the output layer ... PEFT's adapter_names", {"lora": lora})
        for lora in ("head", "head_copied")
    )),
    *table(lambda: head_call(model=lambda: cpu_offload(with_head(family_model("qwen2")))),
           ("model: expected the output layer's weight in memory", {})),
    *table(partial(_load_balancing_loss, outputs=None, attention_mask=None),
        ("output_router_logits: expected a config with one of num_experts", {"config": object()})),
]  # fmt: skip


# Generation


@cache
def flat_model() -> Any:
    model = make_model("qwen2").eval()
    model.generation_config.eos_token_id = None
    return model


def sampled(recorder: SupportRecorder) -> None:
    ids = torch.tensor([[3, 5, 7], [11, 13, 17], [19, 23, 29]])
    flat_model().generate(
        ids, max_new_tokens=6, attention_mask=torch.ones_like(ids), logits_processor=[recorder],
        **recorder.generate_options(),
    )  # fmt: skip


def recorded(lengths: list[int] | None = None) -> None:
    recorder = SupportRecorder(top_k=5)
    sampled(recorder)
    sampled(recorder) if lengths is None else recorder.supports(lengths)


def processed(of_the_model: dict[str, Any] | None = None, **options: Any) -> None:
    """Refuses options of a call, or of the model's configuration."""
    with pytest.MonkeyPatch.context() as patch:
        for name, x in (of_the_model or {}).items():
            patch.setattr(flat_model().generation_config, name, x)
        base = {"do_sample": True, "temperature": 0.5, "top_k": 9}
        refuse_processors(flat_model(), "x", **base, **options)


REPEATED = "repetition_penalty=3.0 does not work with x, which replays ...: leave repetition_"
OF_GENERATION = [
    *table(recorded,
        *(("lengths: expected 3 numbers up to 6", {"lengths": x}) for x in ([1, 1], [1, 1, 7])),
        ("input_ids: expected shape [3, 9], one token more", {}),
    ),
    *table(processed,
        ("top_h=0.3 does not work with x, which replays ...: leave top_h out", {"top_h": 0.3}),
        (REPEATED, {"repetition_penalty": 3.0}),
        (REPEATED, {"of_the_model": {"repetition_penalty": 3.0}}),
        ("generation by beam_sample does not work with x: pass", {"num_beams": 2}),
        ("generation by assisted_generation does not work with", {"prompt_lookup_num_tokens": 2}),
    ),
]  # fmt: skip

# Liger

STEP = {"use_ref_model": False}


def liger(options: dict[str, Any], **changes: Any) -> None:
    FusedLinearGRPOLoss(**options)(**{
        "_input": torch.randn(2, 5, 8), "lin_weight": torch.randn(11, 8),
        "selected_token_ids": torch.zeros(2, 5, dtype=torch.long),
        "attention_mask": torch.ones(2, 5), "advantages": torch.ones(2), **changes,
    })  # fmt: skip


TOKENS, RATIO = torch.zeros(2, 5), "vllm_is_ratio"
VESPO = {**STEP, "loss_type": "vespo"}
OF_LIGER = [
    *table(liger,
        ("loss_type: expected one of", {"options": {"loss_type": "gspo"}}),
        ("use_ref_model=True needs one reference: pass ref_per_token_logps, or", {"options": {}}),
        ("use_ref_model=False needs no", {"options": STEP, "ref_per_token_logps": TOKENS}),
        ("attention_mask: expected shape", {"options": STEP, "_input": torch.randn(10, 8)}),
        ("num_items_in_batch: expected a number >=", {"options": STEP, "num_items_in_batch": -3}),
        (f"{RATIO}: expected shape [2, 5], [2, 1] or [2]; got [2, 4]",
         {"options": STEP, RATIO: torch.ones(2, 4)}),
        ("old_per_token_logps: expected shape",
         {"options": VESPO, RATIO: torch.ones(2), "old_per_token_logps": torch.ones(2)}),
        ("_input: expected a tensor; got list", {"options": STEP, "_input": [1.0]}),
        ("advantages: expected a tensor; got NoneType",
         {"options": STEP, RATIO: torch.ones(2), "advantages": None}),
        ("ref_weight: expected a tensor; got", {"options": {}, "ref_input": torch.zeros(2, 5, 8)}),
        ("num_items_in_batch: expected a number", {"options": STEP, "num_items_in_batch": "x"}),
    ),
    *table(patch_liger,
        ("logits_dtype: expected 'fp32' or 'model'", {"logits_dtype": "bf16"})),
]  # fmt: skip

# TRL

EXACT, REPLAY, SKIP = {"exact_kl": True}, {"replay_support": True}, {"skip_untrained": True}
TOP_P = {"top_p": 0.8, **REPLAY}
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "top_k": 12, "temperature": 0.7, **REPLAY}


def run(kind: type = FusedGRPOTrainer, **options: Any) -> None:
    trained(kind, Path(), **options)


class OwnLoss(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        return model(inputs["prompt_ids"]).logits.sum() * 0


def left_out() -> None:
    """Trains with a loss that the trainer's own leaves out."""
    with patch_trl(loss=Clip()):
        run(OwnLoss)


def constructed(kind: type, model: Any = None, **options: Any) -> Any:
    tokenizer = make_tokenizer()
    model = decided_model("qwen2").float() if model is None else model
    return kind(model, noise, arguments_of("."), prompts(), processing_class=tokenizer, **options)


def shared() -> None:
    """Trains a model with a trainer that was made before another one of TRL's."""
    mine = constructed(FusedGRPOTrainer)
    constructed(GRPOTrainer, mine.model)
    mine.train()


def source(**options: Any) -> None:
    trainer = {
        "use_vllm": False, "vllm_mode": "colocate", "tools": [], "rollout_func": None,
        "environment_factories": None, "use_transformers_continuous_batching": False,
    }  # fmt: skip
    _check_source(SimpleNamespace(**trainer | options))


def too_few_sets() -> None:
    sets = SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=[[3, 4], [5]]))
    _mask_supports([sets], [[4, 5, 6]], rank=0)


def by_vllm(version: str, **options: Any) -> None:
    """Constructs a trainer that samples by a vLLM of this version, which is never called."""
    from trl.generation import vllm_generation

    class LLM:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
            self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))  # TRL writes ranks into it
        patch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        patch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        patch.setattr(vllm_generation, "LLM", LLM, raising=False)
        patch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
        run(**VLLM | options)


class Undeclared(FusedGRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


class Behind(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) * 2


class InFront(FusedGRPOTrainer, Behind):
    pass


class Around(FusedGRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, **kwargs) + 1.0


class Rebuilt(FusedGRPOTrainer):
    def _prepare_inputs(self, batch: Any) -> Any:
        inputs = super()._prepare_inputs(batch)
        return {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}


class Changing(FusedGRPOTrainer):
    change: ClassVar[dict[str, Any]] = {"loss_type": "bnpo"}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        vars(self).update(self.change)
        return loss


class ChangingBeta(Changing):
    change: ClassVar[dict[str, Any]] = {"beta": 0.1}


SQUARED = own(lambda tokens: tokens.logps.square(), token_local=True)
SKIPS = "skip_untrained=True does not work with "
OF_TRL = [
    *table(run,
        ("peft_config: expected adapters inside the layers", {"peft_config": PROMPTS}),
        ("cast_lm_head_to_fp32=True does not work",
         {"peft_config": peft.LoraConfig(**LORAS["head"]), "cast_lm_head_to_fp32": True}),
        # Options of the loss are looked at first.
        ("exact_kl=True has no effect with beta=0.0", EXACT),
        ("exact_kl=True ...loss_type='vespo'", {**EXACT, "beta": 0.1, "loss_type": "vespo"}),
        ("exact_kl=True ...replay_support", {**EXACT, **REPLAY, "beta": 0.1, "top_k": 5}),
        ("delta=1.5 has no effect with your own loss", {"loss": Clip(), "delta": 1.5}),
        ("logits_dtype: expected 'fp32' or 'model'", {"logits_dtype": "bf16"}),
        # Of micro-batches that are dealt anew.
        (f"{SKIPS}beta > 0...set beta=0.0, or pass sort_by_length=True", {**SKIP, "beta": 0.1}),
        (f"{SKIPS}an entropy bonus...set entropy_coef", {**SKIP, "entropy_coef": 0.1}),
        (f"{SKIPS}...set top_entropy_quantile=1.0", {**SKIP, "top_entropy_quantile": 0.2}),
        (f"{SKIPS}...set router_aux_loss_coef=0.0", {**SKIP, "family": "qwen3_moe"}),
        (f"{SKIPS}num_images, ...pass a tokenizer",
         {**SKIP, "scored": lambda batch: {"num_images": [1] * 4}}),
        (f"{SKIPS}...declare token_local or needs_sequences",
         {**SKIP, "loss": lambda t: -t.advantages * t.logps}),
        (f"{SKIPS}...declare gradient_needs_advantage", {**SKIP, "loss": SQUARED}),
        ("sort_by_length=True does not work with", {"sort_by_length": True, "loss_type": "bnpo"}),
        *((f"{SKIPS}{what}", {**SKIP, "kind": kind, "num_iterations": 2}) for what, kind in (
            ("a trainer that makes micro-batches itself", Rebuilt),
            ("a loss_type that changes from bnpo, or to it", Changing),
            ("beta > 0", ChangingBeta),
        )),
        # Of supports.
        ("replay_support=True has no effect without truncation: set top_p < 1", REPLAY),
        ("repetition_penalty=1.1 does not ...: leave", {"repetition_penalty": 1.1, **TOP_P}),
        ("...continuous_batching=True", {"use_transformers_continuous_batching": True, **TOP_P}),
        ("temperature=0.5 in generation_", {**TOP_P, "generation_kwargs": {"temperature": 0.5}}),
        ("loss: expected a loss or a callable", {"loss": "dapo"}),
    ),
    *table(Options, ("skip_untrained: expected a bool; got 1", {"skip_untrained": 1})),
    *table(constructed, *(
        (f"{SKIPS}{name}, whose loss may ... = True on {name} if it", {"kind": kind, **SKIP})
        for kind, name in ((Undeclared, "Undeclared"), (Around, "Around"), (InFront, "Behind"))
    )),
    *table(left_out, ("loss: no effect on ...whose _compute_loss does not call", {})),
    *table(shared, ("model: its forward was replaced after this trainer", {})),
    *table(partial(_constructor_patches(Options())[0][2], None),
        ("outputs: expected log_probs, entropy; got 'logits'", {"outputs": ("logits",)})),
    *table(ExplainCallback,
        ("trainer: expected a FusedGRPOTrainer...; got object", {"trainer": object()})),
    *table(lambda **on: exact_kl.check(SimpleNamespace(beta=1, loss_type="", **on), True, False),
        ("exact_kl=True does not work with FSDP or DeepSpeed",
         {"is_fsdp_enabled": True, "is_deepspeed_enabled": False})),
    *table(source,
        ("vllm_mode='server' does not work with", {"use_vllm": True, "vllm_mode": "server"}),
        ("rollout_func=... does not work with replay_support=True", {"rollout_func": print}),
        ("tools=... does not work with replay_support=True", {"tools": [print]}),
        ("environment_factory=... does not", {"environment_factories": {None: print}}),
    ),
    *table(by_vllm,
        ("vllm 0.27.2 does not work with replay_support=True, ...: install", {"version": "0.27.2"}),
        ("top_k=0 does not work with", {"version": "0.28.0", "top_k": 0, **TOP_P}),
        ("vllm_importance_sampling_correction=True does", {"version": "0.28.0", "loss": Clip()}),
        ("repetition_penalty=1.1 does not ...:", {"version": "0.28.0", "repetition_penalty": 1.1}),
    ),
    *table(too_few_sets, ("sampling_mask: expected 3 kept sets ...; got 2", {})),
]  # fmt: skip

# Weights for vLLM

QUERY = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
PLAIN = "model: expected plain LoRA, which can be merged into the weights that vLLM gets; got "
TIED = "model: expected no adapter on a tied output layer or embedding, ..."


def sent(config: Any = None, family: str = "llama", change: Callable = lambda x: None) -> None:
    model = make_model(family)
    model = model if config is None else peft.get_peft_model(model, config)
    change(model)
    list(extension.names_and_weights(model))


def on_experts() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"],
                             target_parameters=["mlp.experts.gate_up_proj"])  # fmt: skip
    extension.check_can_be_sent(peft.get_peft_model(family_model("qwen3_moe"), config))


def as_bytes(model: Any) -> None:
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)


def zero3(model: Any) -> None:
    model.model.norm.weight.ds_id = 7  # as ZeRO-3 marks its parameters


def without_names(config: Any) -> None:
    """Sends weights that transformers cannot turn into those of a checkpoint."""

    def fails(base: Any, tensors: Any) -> None:
        raise RuntimeError("Cannot reverse the transform")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "checkpoint_weights", fails)
        sent(config)


OF_VLLM = [
    *table(sent,
        (f"{PLAIN}PROMPT_TUNING", {"config": PROMPTS}),
        (f"{PLAIN}...ia3", {"config": peft.IA3Config(**QUERY, feedforward_modules=[])}),
        (f"{PLAIN}...ora... in ...q_proj", {"config": peft.LoraConfig(**QUERY, use_dora=True)}),
        # It is added to the bias of a layer, which a query of Qwen2 has.
        (f"{PLAIN}lora_bias in ...q_proj",
         {"config": peft.LoraConfig(**QUERY, lora_bias=True), "family": "qwen2"}),
        (f"{PLAIN}a weight in torch.uint8",
         {"config": peft.LoraConfig(**QUERY), "family": "qwen2", "change": as_bytes}),
        ("model: expected unsharded weights; model.norm.weight is sharded: use", {"change": zero3}),
        *((f"{TIED}; got one on the {where}",
           {"config": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=[layer])})
          for where, layer in (("output layer", "lm_head"), ("embedding", "embed_tokens"))),
    ),
    *table(on_experts, (f"{PLAIN}...ParamWrapper in ", {})),
    *table(without_names,
        ("model: LlamaForCausalLM does not work with vLLM", {"config": peft.LoraConfig(**QUERY)})),
]  # fmt: skip

# verl, whose own functions call these


def targets_of(targets: Any) -> None:
    verl._check_targets_of_lora(SimpleNamespace(lora_rank=4, target_modules=targets))


def engine(**of_the_head: Any) -> None:
    model = family_model("qwen2")
    model._verl_fused_kernels_backend = verl.NAME
    for name, x in of_the_head.items():
        setattr(model.lm_head, name, x)
    verl._check_engine(torch.nn.Sequential(model), SimpleNamespace(enable_activation_offload=True))


OF_VERL = [
    *(Row(partial(lambda make: verl._check_head(make()), make),
          f"use_fused_kernels=True does not work with {name}, whose head has {what}", {})
      for make, name, what in (
          (partial(family_model, "gemma2"), "Gemma2ForCausalLM", "a softcap"),
          (partial(family_model, "phi"), "PhiForCausalLM", "a bias"),
          (partial(family_model, "cohere"), "CohereForCausalLM", "a scale of 0.3"),
          (partial(lora_model, **LORAS["head"]), "PeftModelForCausalLM", "an adapter"))),
    *table(targets_of,
        ("target_modules=['q_proj', 'lm_head'] does not work", {"targets": ["q_proj", "lm_head"]}),
        ("target_modules='lm_head' does not work", {"targets": "lm_head"})),
    *table(engine,
        ("lora_adapter_path: an adapter on lm_head does not work",
         {"lora_A": torch.nn.ModuleDict({"default": torch.nn.Linear(32, 2)})}),
        ("enable_activation_offload=True does not work with", {"unshard": print})),
    *table(partial(verl.linear_cross_entropy, torch.ones(2, 4), torch.ones(7, 4),
                   torch.zeros(2).long()),
        ("reduction: expected one of none, sum, mean; got 'max'", {"reduction": "max"})),
]  # fmt: skip
TABLE = [
    *AT_ATTACHMENT, *AT_A_CALL, *OF_GENERATION, *OF_LIGER, *OF_TRL, *OF_VLLM, *OF_VERL,
]  # fmt: skip
