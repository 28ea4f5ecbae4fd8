"""Arguments of `run_fused`: fields of the head, those of an objective; and their comparison."""

from dataclasses import replace

import torch

import grpo_kernels
from grpo_kernels import reference
from grpo_kernels.head import products
from tests.helpers.batches import OBJECTIVES, assert_matches, config, run_fused

BACKENDS = ("torch", "triton")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 2.5e-3}
CHUNK = 4 * 1003 * 5  # five rows at a time: several chunks, the last one short

# id: (config, arguments); what belongs to the head. The objective's own are in OBJECTIVES.
OPTIONS = {
    "on_policy": ({}, {}),
    "old_logps": ({}, {"old_logps": True}),
    "kl_old_delta": ({"beta": 0.04, "delta": 1.4}, {"old_logps": True, "ref_logps": True}),
    "entropy": ({"entropy_coef": 0.05}, {"old_logps": True}),
    "temperature": ({}, {"old_logps": True, "head": {"temperature": 0.7}}),
    "temperature_per_token": ({}, {"old_logps": True, "head": {"temperature": True}}),
    "bias": ({}, {"old_logps": True, "head": {"bias": True}}),
    "logit_scale": ({}, {"head": {"logit_scale": 0.37}}),
    "softcap": ({}, {"head": {"softcap": 5.0}}),
    "everything": (
        {"beta": 0.04, "delta": 1.6, "epsilon_high": 0.3, "entropy_coef": 0.02},
        {"old_logps": True, "ref_logps": True,
         "head": {"bias": True, "softcap": 6.0, "logit_scale": 1.3, "temperature": True}},
    ),
}  # fmt: skip


def watch_products(monkeypatch, product):
    """Lets `product(a, b)` make every GEMM of logits and of the gradients of states."""

    def addmm(out, a, b, *, beta):
        ab = product(a, b)
        out.copy_(out * beta + ab if beta else ab)

    monkeypatch.setattr(products, "addmm", addmm)


def objective_options(name):
    config_options, tensors = OBJECTIVES[name]
    arguments = {"config": config(**config_options), **dict.fromkeys(tensors, True)}
    return {"head": {"bias": True}, **arguments}


def expect_equal(batch, options, *, tolerance=2e-5, **kwargs):
    expected = run_fused(batch, exact=True, **options, **kwargs)
    actual = run_fused(batch, exact=False, **options, **kwargs)
    # The reference has no metrics of a support.
    metrics = {k: v for k, v in actual.metrics.items() if not k.startswith("support/")}
    rounding = {"rounded_to": batch.hidden.dtype, "scale": options.get("scale", 1.0)}
    compared = replace(actual, metrics=metrics)
    assert_matches(compared, expected, tolerance, logps=1e-4, **rounding)
    return actual


def exact_and_actual(function, *tensors, **how):
    """Gradients of `function(package, *leaves)`, of the reference in float64 and of the library.

    The library's `function` also gets `how` it is computed.
    """
    gradients = []
    for package, dtype in ((reference, torch.float64), (grpo_kernels, torch.float32)):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in tensors]
        function(package, *leaves, **({} if package is reference else how)).backward()
        gradients.append([x.grad for x in leaves])
    return gradients
