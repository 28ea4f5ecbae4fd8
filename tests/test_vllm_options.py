"""Options of vLLM: where they act, where they are refused, and what TRL's users are told."""

import pytest
import torch

from grpo_kernels.training import TrainingConfig, load_model, parse_config
from grpo_kernels.training.config import DEFAULTS
from grpo_kernels.training.loading import check_rollout
from grpo_kernels.training.ranks import make_accelerator

# A value other than the default of every option, and what it acts with.
SERVER = {"rollout": "vllm", "vllm_mode": "server"}
COLOCATE = {"rollout": "vllm", "vllm_mode": "colocate"}
OPTIONS = {
    "vllm_mode": ("server", COLOCATE),
    "vllm_dtype": ("bf16", COLOCATE),
    "vllm_max_model_length": (4096, COLOCATE),
    "vllm_gpu_memory_utilization": (0.5, COLOCATE),
    "vllm_enable_sleep_mode": (True, COLOCATE),
    "vllm_server_base_url": ("http://127.0.0.1:9000", SERVER),
    "vllm_server_timeout": (1.0, SERVER),
    "vllm_request_timeout": (1.0, SERVER),
    "vllm_sync_dir": ("/somewhere", SERVER),
}


def config_of(**options):
    return TrainingConfig(model="m", **options)


def test_all_options_are_here():
    assert set(OPTIONS) == {name for name in DEFAULTS if name.startswith("vllm_")}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_acts_with_vllm_alone(name):
    value, others = OPTIONS[name]
    assert getattr(config_of(**{**others, name: value}), name) == value
    with pytest.raises(ValueError) as error:
        config_of(rollout="generate", **{name: value})
    assert str(error.value) == (
        f"{name}: expected {DEFAULTS[name]!r} with rollout generate; got {value!r}"
    )


@pytest.mark.parametrize("name", [n for n, (_, o) in OPTIONS.items() if n != "vllm_mode"])
def test_an_option_acts_in_its_mode_alone(name):
    value, others = OPTIONS[name]
    in_both = {"vllm_dtype", "vllm_max_model_length"}
    other = "server" if others["vllm_mode"] == "colocate" else "colocate"
    if name in in_both:
        assert getattr(config_of(**{**others, "vllm_mode": other, name: value}), name) == value
        return
    with pytest.raises(ValueError, match=rf"{name}: expected .* with vllm_mode {other}.*; got"):
        config_of(**{**others, "vllm_mode": other, name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"vllm_mode": "ipc"}, "vllm_mode: expected one of colocate, server; got 'ipc'"),
        ({"vllm_dtype": "fp16"}, "vllm_dtype: expected one of auto, fp32, bf16; got 'fp16'"),
        ({"vllm_gpu_memory_utilization": 0.0}, r"expected a number in \(0, 1\]; got 0.0"),
        ({"vllm_gpu_memory_utilization": 1.5}, r"expected a number in \(0, 1\]; got 1.5"),
        ({**SERVER, "vllm_server_timeout": 0.0}, "vllm_server_timeout: expected a number > 0"),
        ({**SERVER, "vllm_request_timeout": -1.0}, "vllm_request_timeout: expected a number > 0"),
        ({"vllm_max_model_length": 767}, "vllm_max_model_length: expected at least .* = 768; got"),
        ({**SERVER, "vllm_max_model_length": 0}, "vllm_max_model_length: expected at least"),
    ),
)
def test_values_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(**{"rollout": "vllm", **options})
    assert config_of(rollout="vllm", vllm_max_model_length=768)


def test_types_are_checked():
    for name, value in (
        ("vllm_max_model_length", 4096.0), ("vllm_server_timeout", "10"),
        ("vllm_enable_sleep_mode", 1), ("vllm_server_base_url", 8000),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"{name}: expected"):
            config_of(**SERVER, **{name: value})


def test_the_url_is_one_of_a_server():
    for url in (
        "127.0.0.1:8000",
        "http://",
        "http://here:8000/v1",
        "ftp://here:1",
        "http://here/",
        "",
    ):
        with pytest.raises(ValueError, match="vllm_server_base_url: expected one like http://"):
            config_of(**SERVER, vllm_server_base_url=url)
    for url in ("http://here:8001", "http://here:8001/", "https://here:1"):
        assert config_of(**SERVER, vllm_server_base_url=url).vllm_server_base_url == url


def test_a_cpu_has_no_memory_to_share(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for options in ({"vllm_enable_sleep_mode": True}, {"vllm_gpu_memory_utilization": 0.5}):
        config = config_of(rollout="vllm", output=str(tmp_path), **options)
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}: expected .* on a CPU, .*; got"):
            check_rollout(config, make_accelerator(config))
        # Before it is found out that there is no such model.
        with pytest.raises(ValueError, match=f"{name}: expected .* on a CPU, .*; got"):
            load_model(config)


def test_a_vllm_that_is_not_installed_is_said_first(monkeypatch, tmp_path):
    monkeypatch.setattr("grpo_kernels.training.loading.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="rollout: vllm is not installed: pip install"):
        load_model(config_of(rollout="vllm", output=str(tmp_path)))


def test_vllms_log_probs_may_correct(monkeypatch):
    monkeypatch.setattr("grpo_kernels.training.loading.find_spec", lambda name: name)
    config = config_of(rollout="vllm", is_correction="token_truncate")
    check_rollout(config, make_accelerator(config))


def test_trls_names_that_are_ours():
    config = parse_config([
        "--model", "m", "--rollout", "vllm", "--vllm_mode", "server",
        "--vllm_server_base_url", "http://here:1", "--vllm_server_timeout", "3",
    ])  # fmt: skip
    assert config.vllm_server_base_url == "http://here:1" and config.vllm_server_timeout == 3.0


def test_a_revision_is_that_of_the_engine():
    from grpo_kernels.training.vllm_server import engine_options

    config = config_of(rollout="vllm", revision="v1")
    assert engine_options(config, 1, on_gpu=True)["revision"] == "v1"
    assert "revision" not in engine_options(config_of(rollout="vllm"), 1, on_gpu=True)
