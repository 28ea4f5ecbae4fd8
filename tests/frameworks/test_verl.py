"""The backend in verl's own forward and engine: log-probs, entropies, gradients; off by default."""

import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("verl", reason="`make test-with FRAMEWORK=verl` has it")
from transformers import Qwen2ForCausalLM
from verl.models.transformers import monkey_patch
from verl.utils.kernel import linear_cross_entropy as kernel

from grpo_kernels import Execution
from grpo_kernels.integrations import patching
from grpo_kernels.integrations import verl as ours
from tests.frameworks.verl_jobs import model_of
from tests.helpers.batches import relative_error
from tests.helpers.model_families import family_model
from tests.helpers.ranks import RankFailed, Ranks
from tests.helpers.tiny_models import V


@pytest.fixture(autouse=True)
def own_forward():
    """The patch changes the class of the model."""
    forward = Qwen2ForCausalLM.forward
    yield
    Qwen2ForCausalLM.forward = forward


def forward_of(model, backend, ids, **options):
    Qwen2ForCausalLM.forward = type(model).forward
    monkey_patch.patch_forward_with_backends(model, backend is not None, backend)
    return model(input_ids=ids, use_cache=False, return_dict=True, **options)


@pytest.mark.parametrize("packed", (False, True), ids=("padded", "packed"))
def test_the_numbers_of_verls_torch_backend(packed):
    """With padding removed verl passes labels that are shifted over the packed sequence."""
    g = torch.Generator().manual_seed(1)
    ids, options = torch.randint(V, (3, 17), generator=g), {"temperature": 0.7}
    if packed:
        ids = ids.view(1, -1)
        options["shift_labels"] = ids.roll(-1, 1)
        options["position_ids"] = torch.arange(17).repeat(3)[None]
    weights, results = torch.randn(2, *ids.shape, generator=g), []
    for backend in ("torch", "grpo_kernels"):
        model = model_of(tied=packed)
        out = forward_of(model, backend, ids, **options)
        assert out.log_probs.shape == out.entropy.shape == ids.shape
        ((out.log_probs * weights[0]).sum() + (out.entropy.float() * weights[1]).sum()).backward()
        grads = torch.cat([p.grad.flatten().double() for p in model.parameters()])
        results.append((out.log_probs.detach(), out.entropy.detach(), grads))
    for theirs, actual in zip(*results, strict=True):
        assert relative_error(actual, theirs) < 1e-5


def engine_of(model, monkeypatch):
    """The FSDP engine of verl around a model in this process, without ranks."""
    from verl.workers.engine.fsdp import transformer_impl

    for name in ("get_device_id", "get_device_name"):
        monkeypatch.setattr(transformer_impl, name, lambda: "cpu")
    engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    engine.module, engine.use_ulysses_sp, engine.pad_to_length = model, False, None
    engine._autocast_dtype, engine.get_data_parallel_group = torch.float32, lambda: None
    return engine


def micro_batch(entropy):
    from verl.utils import tensordict_utils as tu

    rows = [torch.randint(V, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 9, 3)]
    columns = {"input_ids": rows, "position_ids": [torch.arange(len(row)) for row in rows]}
    options = {
        "temperature": 0.7, "use_fused_kernels": True, "calculate_entropy": entropy,
        "use_remove_padding": True,
    }  # fmt: skip
    nested = torch.nested.as_nested_tensor
    return tu.get_tensordict(
        {name: nested(column, layout=torch.jagged) for name, column in columns.items()}, options
    )


@pytest.mark.parametrize("entropy", (False, True), ids=("without", "with_entropy"))
def test_the_engine_has_entropies_where_it_asks_for_them(entropy, monkeypatch):
    outputs, calls, original = {}, [], ours.linear_logprobs
    monkeypatch.setattr(
        ours, "linear_logprobs", lambda *a, **k: calls.append(k["entropy"]) or original(*a, **k)
    )
    for backend in ("torch", "grpo_kernels"):
        model = model_of()
        engine = engine_of(model, monkeypatch)
        forward_of(model, backend, torch.zeros(1, 2, dtype=torch.long))
        calls.clear()
        _, output = engine.forward_step(micro_batch(entropy), None, forward_only=True)
        outputs[backend] = output["model_output"]
    assert calls == [entropy]
    theirs, actual = outputs["torch"], outputs["grpo_kernels"]
    assert theirs.keys() == actual.keys() and ("entropy" in actual) == entropy
    for name in actual:
        assert relative_error(actual[name].values(), theirs[name].values()) < 1e-5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield lambda *args, job="under_fsdp": ranks(f"tests.frameworks.verl_jobs:{job}", *args)
    ranks.close()


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("strategy", "kind", "dtype", "shape"), (
    ("fsdp", "head", F32, (2,)), ("fsdp", "tied", BF16, (2,)), ("fsdp2", "tied", F32, (2,)),
    ("fsdp2", "head", BF16, (2,)), ("fsdp2", "head", F32, (2, 1)), ("fsdp2", "head", F32, (1, 2)),
), ids=str)  # fmt: skip
def test_sharded_weights(strategy, kind, dtype, shape, ranks):
    """Ranks with different tokens agree with verl, and their gradients are averaged."""
    tolerance = 1e-5 if dtype == F32 else 0.25
    assert max(errors(ranks, "grpo_kernels", kind, strategy, dtype, shape)) < tolerance


def errors(ranks, backend, kind, strategy, *options):
    """Yields errors of log-probs, entropies and gradients against verl on unsharded weights."""
    for actual, theirs in zip(
        ranks(strategy, backend, kind, *options), ranks(None, "torch", kind), strict=True
    ):
        assert actual[2].keys() == theirs[2].keys()
        yield from (relative_error(a, b) for a, b in zip(actual[:2], theirs, strict=False))
        yield from (relative_error(actual[2][name], grad) for name, grad in theirs[2].items())


def test_activations_are_not_offloaded_where_verl_waits_for_a_call_of_the_head(ranks):
    ranks(True, job="offloaded")
    with pytest.raises(RankFailed, match=r"enable_activation_offload=True does not work"):
        ranks(False, job="offloaded")


def test_megatrons_call(tmp_path, capsys):
    """`linear_cross_entropy` by position, states `[S, 1, H]`, labels `[1, S]`, results flat."""
    from verl.workers.config.model import HFModelConfig

    config = model_of().config
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    hidden, weight = torch.randn(14, 1, 32), torch.randn(V, 32)
    labels = torch.randint(V, (1, 14))
    args = (hidden, weight, labels, 0.7, "none", None)
    options = {"path": str(tmp_path), "load_tokenizer": False, "use_fused_kernels": True}
    options["override_config"] = {"attn_implementation": "sdpa"}
    HFModelConfig(**options, fused_kernel_options={"impl_backend": "triton"})
    with pytest.raises((AssertionError, RuntimeError)):  # verl's own, which wants a GPU
        kernel.linear_cross_entropy(*args)
    HFModelConfig(**options, fused_kernel_options={"impl_backend": "grpo_kernels"})
    assert "Megatron" not in capsys.readouterr().out
    logps, entropy = kernel.linear_cross_entropy(*args)
    assert "Using grpo_kernels where Megatron has its fused head" in capsys.readouterr().out
    exact = (hidden[:, 0].double() @ weight.double().T / 0.7).log_softmax(-1)
    assert relative_error(logps, exact.gather(-1, labels[0][:, None])[:, 0]) < 1e-6
    assert relative_error(entropy, -(exact.exp() * exact).sum(-1)) < 1e-6
    options |= {"lora_rank": 4, "target_modules": ["q_proj", "lm_head"]}
    with pytest.raises(ValueError, match=r"target_modules=.* does not work with use_fused_kernels"):
        HFModelConfig(**options, fused_kernel_options={"impl_backend": "grpo_kernels"})
    HFModelConfig(**options, fused_kernel_options={"impl_backend": "torch"})


def test_what_is_refused(monkeypatch):
    """Heads that verl's forward leaves out, a second patch, and other versions."""
    with pytest.raises(ValueError, match="Gemma2ForCausalLM, whose head has a softcap"):
        monkey_patch.patch_forward_with_backends(family_model("gemma2"), True, "grpo_kernels")
    model = model_of()
    forward_of(model, "grpo_kernels", torch.zeros(1, 2, dtype=torch.long))
    model.lm_head.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(32, 2)})
    ours._check_engine(model_of(), None)
    with pytest.raises(ValueError, match="lora_adapter_path: an adapter on lm_head does not work"):
        ours._check_engine(torch.nn.Sequential(model), None)
    model._verl_fused_kernels_backend = "torch"
    ours._check_engine(torch.nn.Sequential(model), None)
    assert ours.patch_verl.active()
    with pytest.raises(RuntimeError, match=r"patch_verl: .* patched already"):
        ours.patch_verl()
    with pytest.raises(TypeError, match="execution"):
        ours.patch_verl(execution=Execution)
    for installed in ("0.8.1", "0.10.0"):
        monkeypatch.setattr(patching.metadata, "version", lambda _, got=installed: got)
        with pytest.raises(ImportError, match=rf"verl.*0\.9.*{re.escape(installed)}"):
            ours.patch_verl()


SCRIPT = """
import verl
from grpo_kernels.integrations.verl import patch_verl
from verl.models.transformers import monkey_patch as m
from verl.utils.experimental.torch_functional import FusedLinearForPPO as F
found = patch_verl.active(), m.patch_forward_with_backends.__module__, F.__module__
if not patch_verl.active():
    from tests.frameworks.verl_jobs import model_of
    model = model_of()
    with patch_verl():
        assert patch_verl.active()
        m.patch_forward_with_backends(model, True, "grpo_kernels")
        assert model._forward_hooks and model.base_model._forward_hooks
    assert not patch_verl.active() and m.patch_forward_with_backends.__module__ == m.__name__
    assert not model._forward_hooks and not model.base_model._forward_hooks
print(*found)
"""


def in_a_process(*flags, **env):
    run = subprocess.run(
        [sys.executable, *flags, "-c", SCRIPT], text=True, capture_output=True, timeout=300,
        env={**os.environ, **env},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("policy", ("auto", "none"))
def test_verl_finds_it_unless_it_is_told_not_to(policy):
    output, our_module = in_a_process(VERL_USE_EXTERNAL_PLUGINS=policy), ours.__name__
    theirs = "verl.models.transformers.monkey_patch verl.utils.experimental.torch_functional"
    assert output == (f"True {our_module} {our_module}" if policy == "auto" else f"False {theirs}")


def test_an_execution_of_ones_own(tmp_path):
    """A module that verl imports before the plug-ins."""
    (tmp_path / "mine.py").write_text(
        "from grpo_kernels import Execution\n"
        "from grpo_kernels.integrations.verl import patch_verl\n"
        "patch_verl(execution=Execution(batch_invariant=True))\n"
    )
    path = {"VERL_USE_EXTERNAL_MODULES": "mine", "PYTHONPATH": str(tmp_path)}
    assert "True grpo_kernels" in in_a_process("-W", "error::UserWarning:grpo_kernels", **path)
