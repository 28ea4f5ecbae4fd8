"""Refusals of `training/`: options, data, rewards, runs that go on, and the commands."""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_kernels import Support
from grpo_kernels.loss.losses import Sapo
from grpo_kernels.training import (
    Completion,
    Trainer,
    TrainingConfig,
    evaluate,
    load_problems,
    loading,
    memory,
    parse_config,
)
from grpo_kernels.training import __main__ as train_command
from grpo_kernels.training.checks import check_host
from grpo_kernels.training.problems import answers, data, held_out, rewards
from grpo_kernels.training.problems.prompts import PromptEncoder, short_enough
from grpo_kernels.training.run import checkpoint, logs
from grpo_kernels.training.run.lock import FileLock
from grpo_kernels.training.run.metrics import Metric, Metrics
from grpo_kernels.training.sampling.completions import check_completion
from tests.helpers import trainer_runs
from tests.helpers.fake_vllm import install
from tests.helpers.tiny_models import make_model, make_tokenizer
from tests.refusals import Row, table

NAN = math.nan

# Options


def config_of(**options: Any) -> TrainingConfig:
    return trainer_runs.config_of("m", "runs", **options)


OF_OPTIONS = [
    *table(config_of,
        ("steps: expected int; got 1.5", {"steps": 1.5}),
        ("dtype: expected one of 'mixed', 'fp32', 'bf16'; got 'fp8'", {"dtype": "fp8"}),
        ("steps: expected at least 1; got 0", {"steps": 0}),
        ("num_generations: expected at least 2", {"num_generations": 1}),
        ("learning_rate: expected a number > 0", {"learning_rate": 0.0}),
        ("weight_decay: expected at least 0; got nan", {"weight_decay": NAN}),
        ("eval_max_completion_length: expected at least 1", {"eval_max_completion_length": 0}),
        ("save_every: expected at least -1; got -2", {"save_every": -2}),
        ("top_p: expected a number in (0, 1]; got 1.5", {"top_p": 1.5}),
        ("min_p: expected a number in [0, 1]", {"min_p": 1.5}),
        ("rewards: expected at least one", {"rewards": []}),
        ("reward_weights: expected a finite number for each of", {"reward_weights": [1.0, 2.0]}),
        ("output: expected a folder with a name; got 'runs/..'", {"output": "runs/.."}),
        ("seed: expected a number from 0 to 2^32 - 1; got 4294967296", {"seed": 2**32}),
        ("minibatches: expected a divisor of prompts_per_step = 4", {"minibatches": 3}),
        ("stop: expected strings that are not empty, ...; got ['a', '']", {"stop": ["a", ""]}),
        ("kl_estimator='k1' has no effect without beta", {"kl_estimator": "k1"}),
        ("kl_estimator='exact' needs the full", {"beta": 0.1, "kl_estimator": "exact", "top_k": 5}),
        # Before the advice to set beta, which leads nowhere.
        ("sync_ref_every=3 does not work with lora_rank", {"sync_ref_every": 3, "lora_rank": 2}),
        ("entropy_coef=0.1 does not work", {"top_entropy_quantile": 0.5, "entropy_coef": 0.1}),
        ("loss_type: expected module:function; got 'no_such:Loss'", {"loss_type": "no_such:Loss"}),
        ("loss_type: expected a subclass of Loss; got", {"loss_type": "builtins:dict"}),
        ("loss_type: expected a function; got json:__doc__", {"loss_type": "json:__doc__"}),
        ("loss_options: expected options of Clip (...; got tau", {"loss_options": {"tau": 1}}),
        ("loss_options={'a': 1} does not", {"loss_type": Sapo(), "loss_options": {"a": 1}}),
    ),
    *table(TrainingConfig, ("model: expected a hub name or a folder", {"model": ""})),
    *table(partial(memory.Forecast, model="m"),
        ("processes: expected at least 1; got 0", {"processes": 0}),
        ("gpu: expected none with cpu; got 'h100'", {"gpu": "h100", "cpu": True}),
    ),
    *table(partial(check_host, on_cpu=True),
        ("vllm_gpu_memory_utilization: expected ... on a CPU, ...; got 0.5",
         {"config": config_of(rollout="vllm", vllm_gpu_memory_utilization=0.5)})),
]  # fmt: skip

# Problems


def dataset(name: str, content: Any = None, **options: Any) -> None:
    """Loads a dataset of this name: a file with this content, or a folder of such."""
    files = content if name == "f" else {} if content is None else {name: content}
    for file, text in files.items():
        path = Path(name, file) if name == "f" else Path(file)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    load_problems(TrainingConfig(**{"model": "m", "eval_size": 0, "dataset": name, **options}))


def made(function: Callable) -> None:
    """Loads a dataset that a function makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mine", SimpleNamespace(made=function))
        dataset("mine:made")


@cache
def tokenizer() -> Any:
    """A tokenizer with a token that the model lacks, and a template that refuses messages."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.chat_template = "{{ raise_exception('no b here') }}"
    return tokenizer


def prompted(prompt: Any) -> None:
    PromptEncoder(tokenizer(), chat=False, vocabulary=257)({"prompt": prompt})


LINE = '{"question": "a", "answer": "b"}'
TEXT = "dataset: expected text or a whole number as "
OF_PROBLEMS = [
    *table(dataset,
        ("dataset: '' is no file or folder here, no module:function, and no name on", {"name": ""}),
        ("dataset: 'openai/gsm8k:main' is no ...dataset_config", {"name": "openai/gsm8k:main"}),
        *((f"dataset: expected a file or folder; {name} does not exist", {"name": name})
          for name in ("data/a/b", "./a", "no.such:thing/a.csv", "m:a.jsonl")),
        ("dataset: expected a file .jsonl, .json, .csv", {"name": "./a.jsonl.gz", "content": ""}),
        ("dataset: expected an object in row 2 of", {"name": "a.json", "content": f"[{LINE}, 3]"}),
        ("dataset: expected JSON in a.json; ", {"name": "a.json", "content": f"[{LINE}"}),
        ("dataset: a.csv is no table of", {"name": "a.csv", "content": "question,answer\na\n"}),
        ("dataset: expected rows of parquet in", {"name": "a.parquet", "content": "PAR1"}),
        ("dataset: expected JSON in line 3 of", {"name": "a.jsonl", "content": f"{LINE}\n\n{{"}),
        ("dataset: expected a column question ... got ['answer'] in line 1 of",
         {"name": "a.jsonl", "content": '{"question": null, "answer": "b"}'}),
        ("dataset: expected at least one problem to train on", {"name": "a.jsonl", "content": ""}),
        ("dataset: ...answer for the reward answer; got ... in line 2 of",
         {"name": "a.jsonl", "rewards": ["answer", "m:f"],
          "content": '{"prompt": "a", "rewards": "f"}\n{"prompt": "b", "rewards": ["answer"]}'}),
        (f"{TEXT}answer; got True: ...(line 1 of a.jsonl",
         {"name": "a.jsonl", "content": '{"prompt": "a", "answer": true}'}),
        ("dataset_config='main' has no effect with a.jsonl",
         {"name": "a.jsonl", "content": LINE, "dataset_config": "main"}),
        ("system_prompt stands before a question, ... the column prompt in line 1 of ",
         {"name": "a.jsonl", "content": '{"prompt": "a", "answer": "2"}', "system_prompt": "Be"}),
        ("dataset: expected a split train to", {"name": "f", "content": {"test.jsonl": LINE}}),
        ("dataset: expected a dataset in the folder", {"name": "f", "content": {"a.txt.gz": ""}}),
        ("...gsm8k...; a dataset on the hub is OWNER/NAME, its", {"name": "gsm8k:main"}),
        ("dataset: expected a function; got json:__doc__ = ", {"name": "json:__doc__"}),
    ),
    *table(made,
        ("dataset: mine:made: SystemExit: 0", {"function": lambda _: sys.exit(0)}),
        ("dataset: expected the problems to train on and those held", {"function": lambda _: []}),
        ("dataset: expected a dict; got 'a' in problem 0 to", {"function": lambda _: (["a"], [])}),
    ),
    *table(data.not_held_out,
        ("train: the prompts of all 1 problems are held out",
         {"train": [{"prompt": "a"}], "held_out": [{"prompt": " a"}], "say": print})),
    *table(prompted,
        ("prompt: the tokenizer makes '<tool>' token 257, and the model", {"prompt": "a <tool>"}),
        ("prompt: expected text, or messages with a", {"prompt": {"role": "user", "content": "a"}}),
        ("prompt: no chat template for ...: no b", {"prompt": [{"role": "b", "content": "a"}]}),
    ),
    *table(partial(short_enough, encode=lambda x: [*x["prompt"]], longest=3, say=print),
        ("max_prompt_length=3: ...is longer, or empty; the shortest has 0 tokens",
         {"problems": [{"prompt": ""}, {"prompt": "abcd"}]})),
    *table(partial(answers.same_answer, "8"), *(
        ("answer: expected text or a whole number; got ...: write it as text", {"right": x})
        for x in (8.5, True)
    )),
]  # fmt: skip

# Rewards, metrics and completions


def rewarded(function: Callable, problem: dict[str, Any]) -> None:
    functions = [rewards.RewardFunction("f", "f", function)]
    rewards.check_rewards(functions, [{"prompt": "a", **problem}], "train")


def scored(function: Callable) -> None:
    functions = [rewards.RewardFunction("it", "it", function)]
    rewards.reward_table(functions, [{"prompt": "p"}] * 3, ["a", "b", "c"])


def completed(**changes: Any) -> None:
    check_completion("one", replace(Completion([5, 6], True), **changes), 257, 6)


def kept(ids: Any, offsets: Any) -> dict[str, Support]:
    return {"support": Support(torch.tensor(ids, dtype=torch.int32), torch.tensor(offsets))}


IT = "reward function it: "
SUPPORT = "one.support.offsets: expected to start at 0, never to decrease, and to end at ..."
OF_FUNCTIONS = [
    *table(rewards.resolve_rewards,
        ("rewards: expected some of answer, ..., or module:function; got", {"names": ["breif"]}),
    ),
    *table(rewarded,
        *(("rewards: the column `rewards` of train[0] is ..., but the run has f: name",
           {"function": lambda completions: [1.0], "problem": {"rewards": names}})
          for names in (["f", "breif"], [], 3.5)),
        ("reward function f: nothing is passed for its parameters p, c. Passed are...answer",
         {"function": lambda p, c: c, "problem": {"answer": "1"}}),
        ("reward function f: its parameter metrics gets the step's metrics, and the problems have",
         {"function": lambda completions, metrics: [1.0], "problem": {"metrics": 3}}),
    ),
    *table(scored,
        (f"{IT}expected 3 values, one per completion; got 2",
         {"function": lambda completions: [1.0] * 2}),
        (f"{IT}expected finite numbers, ... got nan for 'b'",
         {"function": lambda completions: [1, NAN, 0]}),
        (f"{IT}TypeError: string indices ...prompts and completions are text here",
         {"function": lambda completions: [len(x[0]["content"]) for x in completions]}),
    ),
    *table(lambda name: Metrics().add(name, [1.0]),
        ("metrics: expected a name that the library does not use; got", {"name": "reward/a"})),
    *table(completed,
        ("one.token_ids: expected ints from 0 to 256; got True", {"token_ids": [True] * 2}),
        ("one.token_ids: expected at most max_completion_length = 6", {"token_ids": [5] * 7}),
        ("one.logps: expected 2 finite numbers, ...; got [nan], 2", {"logps": [-1.0, NAN]}),
        ("one.sampled: expected 2 bools, ...; got [True], 1", {"sampled": [True]}),
        ("one.sampled: expected 2 bools, ... at least one True", {"sampled": [False] * 2}),
        ("one.support.token_ids: expected a tensor; got list", {"support": Support([1], [0])}),
        (f"{SUPPORT} = 2; got 0 to 3", kept([5, 6], [0, 1, 3])),
        (SUPPORT, kept([5, 6], [0, 3, 2])),
    ),
    *table(lambda **options: Metrics().register(Metric(**options)),
        ("merge: expected one of mean, ... for a; got 'median'", {"name": "a", "merge": "median"}),
        ("metrics: expected a name that the library does not use; got", {"name": "reward"}),
        ("chart: expected a text for a; got 3", {"name": "a", "chart": 3})),
]  # fmt: skip

# A trainer, and a run that goes on

SUMS = [{"prompt": f"{i} + 1 = ", "answer": str(i + 1)} for i in range(4)]
ODD = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": 0.5}]


def trainer(
    model: Any = None, tokenizer: Any = None, problems: Any = (SUMS, ()), **options: Any
) -> Trainer:
    """Makes a trainer of a tiny model; `environment`: of the process."""
    environment = options.pop("environment", {})
    rollout = options.pop("rollout", None)
    model = make_model("llama") if model is None else model
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return Trainer(
            config_of(**options), model, tokenizer or make_tokenizer(), *problems,
            rewards={"noise": trainer_runs.noise}, rollout=rollout,
        )  # fmt: skip


def compiled() -> None:
    model = make_model("llama")
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    trainer(model)


def scaled() -> None:
    """Makes a trainer of a model whose logits are no linear layer's."""
    model = make_model("llama")
    model.register_forward_hook(lambda module, inputs, out: type(out)(logits=3 * out.logits))
    trainer(model)


def padded() -> None:
    """Makes a trainer with a tokenizer whose pad token the model does not know."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = None
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    trainer(tokenizer=tokenizer)


def sampled(*completions: Any) -> None:
    """Has a trainer's rollout return these."""
    trainer(rollout=lambda _: lambda *_: [*completions]).sampler(SUMS[:1], 2, 1.0)


def corrected() -> None:
    """Has a rollout return no log-probs in a step that corrects by them."""
    options = {"is_correction": "token_truncate", "rollout": lambda _: trainer_runs.FakeRollout()}
    made = trainer(**options)
    made.run.step = 1
    made.judged(SUMS[:1], made.sampler(SUMS[:1], made.config.num_generations, 1.0))


def goes_on() -> None:
    """Trains a step, and goes on with other problems."""
    options = {"steps": 1, "save_every": 1, "rollout": trainer_runs.same_for_any_ranks}
    trainer(**options).train()
    trainer(**options | {"steps": 2, "resume": True}, problems=(SUMS[::-1], ())).train()


def sent() -> None:
    """Has vLLM's stand-in take adapters on a tied head."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        from grpo_kernels.training.sampling.vllm_rollout import VLLMRollout

        config = config_of(rollout="vllm", lora_rank=2, lora_target=".*(q_proj|lm_head)")
        model = loading.set_trainable(make_model("llama"), config)
        VLLMRollout(config, model, make_tokenizer(), accelerate.Accelerator(cpu=True))


def swapped() -> None:
    swap_letters()
    trainer(beta=0.1, ref_model="odd")


def inferred() -> None:
    write_run("run")
    loading.load_for_inference("model", "run", config_of())


def referred() -> None:
    make_model("llama", vocab_size=300).save_pretrained("reference")
    make_tokenizer().save_pretrained("reference")
    trainer(beta=0.1, ref_model="reference")


def accelerated() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerate.Accelerator(dynamo_backend="eager", cpu=True)
        trainer()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def adapted() -> None:
    loading.set_trainable(make_model("llama"), config_of(lora_rank=2, lora_target="no_such"))


def divided() -> None:
    """Starts two processes, as accelerate has them, where there is a prompt for each of three."""
    from grpo_kernels.training.run import ranks

    several = SimpleNamespace(num_processes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "make_accelerator", lambda _: several)
        loading.start(config_of(prompts_per_step=3))


def resumed(state: dict[str, Any], **options: Any) -> None:
    checkpoint.check_options({"config": config_of(schedule="linear").as_json() | state},
                             config_of(schedule="linear", **options))  # fmt: skip


class Opens:
    def __reduce__(self) -> tuple:
        return open, ("made", "w")


def saved(content: Any) -> None:
    """Reads a checkpoint, of which no code runs."""
    torch.save(content, "step-1.pt")
    try:
        checkpoint.state_of(Path("step-1.pt"))
    finally:
        assert not Path("made").exists()


def earlier() -> None:
    Path("checkpoints/step-000003").mkdir(parents=True)
    Path("checkpoints/step-000003/state.json").write_text('{"step": 3}')
    checkpoint.latest(Path())


GOOD = Completion([5, 6], True)
OF_RUNS = [
    *table(trainer,
        ("WORLD_SIZE=2, but accelerate sees one process:", {"environment": {"WORLD_SIZE": "2"}}),
        *((f"ACCELERATE_USE_{kind} does not work with ...FusedGRPOTrainer",
           {"environment": {f"ACCELERATE_USE_{kind}": "true"}})
          for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")),
        ("ACCELERATE_FP8_BACKEND=TE does not", {"environment": {"ACCELERATE_FP8_BACKEND": "TE"}}),
        ("held_out: expected an answer", {"problems": (SUMS, [{"prompt": "a", "answer": None}])}),
        (f"{TEXT}answer; got 0.5: ...(held_out[1])", {"problems": (SUMS, ODD)}),
        (f"{TEXT}answer; got 0.5: ...(train[1])", {"rewards": ["answer"], "problems": (ODD, ())}),
    ),
    *table(compiled, ("model: expected one that was not passed to torch.compile", {})),
    *table(scaled, ("model: expected logits that are a linear layer", {})),
    *table(padded, ("tokenizer: expected a pad_token, or ... 257 tokens of the model", {})),
    *table(swapped,
        ("ref_model: odd has another tokenizer than the model, with 2 other tokens: token ", {})),
    *table(inferred, ("model: run is the folder of a run: pass run/model", {})),
    *table(sent, ("model: expected no adapter on a tied output layer", {})),
    *table(corrected,
        ("rollout: ValueError: is_correction='token_truncate' needs log-probs", {})),
    *table(goes_on,
        ("resume: problems or models differ from the checkpoint's: problems: was 4 + 0, sha", {})),
    *(Row(partial(sampled, *completions), f"rollout: {message}", {})
      for message, *completions in (
          ("expected 2 completions in one list, 2 of each of 1 prompts; got 1", GOOD),
          ("completions[1]: expected a Completion with a token; got Completion", GOOD,
           Completion([], True)),
          ("completions[1].token_ids: expected ints from 0 to 256; got 300", GOOD,
           Completion([300], True)))),
    *table(referred, ("ref_model: expected a vocabulary of 257, ...; got 300", {})),
    *table(accelerated,
        ("accelerator: an Accelerator was made with torch.compile", {})),
    *table(adapted, ("lora_target='no_such': Target modules", {})),
    *table(divided,
        ("prompts_per_step: expected a multiple of processes times minibatches, 2 * 1; got 3", {})),
    *table(resumed,
        ("resume: options differ from the checkpoint's: loss_type: was ...1.3...', is ...1.05",
         {"state": {"loss_type": repr(Sapo(temperature_neg=1.3))}, "loss_type": Sapo()}),
        ("steps: expected 2 as before, because schedule='linear'", {"state": {}, "steps": 4}),
    ),
    *table(saved,
        ("resume: expected a checkpoint of this library; got", {"content": {"state": Opens()}}),
        ("resume: expected a checkpoint with ...; got step-1.pt", {"content": {"state": json.dumps(
            dict.fromkeys(("step", "config", "processes", "micro_batch_size", "inputs"), "1")
        )}}),
    ),
    *table(earlier, ("output: ...step-000003 is a checkpoint of an earlier", {})),
]  # fmt: skip

# Commands


@cache
def tiny_folder() -> Path:
    """A folder with a tiny model."""
    folder = Path(tempfile.mkdtemp())
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


TRAINED = [held_out._digest({"prompt": "old"})]


def write_run(folder: str, **files: bool) -> None:
    """Writes a run's folder without a training."""
    Path(folder).mkdir()
    config = config_of(rewards=["answer", "format"], dataset="train.jsonl")
    logs.write_json(Path(folder, "config.json"), config.as_json())
    logs.write_json(Path(folder, logs.TRAINED_ON), {"is_correct": None, "prompts": TRAINED})
    if files.get("held_out", True):
        Path(folder, logs.HELD_OUT).write_text('{"prompt": "new", "answer": "1"}\n')
    if files.get("model", True):
        shutil.copytree(tiny_folder(), Path(folder, "model"))


def swap_letters() -> None:
    """Makes a model's folder whose tokenizer has two tokens in each other's place."""
    shutil.copytree(tiny_folder(), "odd")
    words = json.loads(Path("odd/tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path("odd/tokenizer.json").write_text(json.dumps(words))


def train(flags: str, state: dict[str, Any] | None = None) -> None:
    """The command, on a machine without some packages, before a model is loaded."""
    write_run("run")
    write_run("bare", model=False)
    swap_letters()
    Path("m").symlink_to(tiny_folder())
    Path("a.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 10)
    for name in ("empty", "adapters", "locked"):
        Path(name).mkdir()
    Path("adapters/adapter_config.json").touch()
    good = "--model=m --dataset=a.jsonl --output=t --eval_size=0 --rewards answer "
    with pytest.MonkeyPatch.context() as patch, FileLock("locked/.lock"):
        for name in ("vllm", "peft", "aim"):
            patch.setitem(sys.modules, name, None)
        patch.setattr(accelerate.tracking, "get_available_trackers", lambda: [])
        patch.setattr(loading, "_pretrained", lambda *_: pytest.fail("loads a model"))
        if state is not None:
            patch.setattr(checkpoint, "latest", lambda _: Path("run"))
            patch.setattr(checkpoint, "state_of", lambda _: state)
            patch.setattr(checkpoint, "MAY_CHANGE", state.pop("may_change", set()))
        try:
            train_command.main(good.split() + flags.split())
        finally:
            assert not Path("t").exists()


def evaluated(flags: str) -> None:
    """The command on a run without a training, and on folders that are none."""
    write_run("run")
    write_run("bare", held_out=False, model=False)
    Path("run.yaml").write_text("model: m")
    Path("empty").mkdir()
    Path("train.jsonl").write_text('{"prompt": "old", "answer": "1"}')
    Path("odd.jsonl").write_text('{"text": "a"}')
    Path("named.jsonl").write_text('{"prompt": "a", "answer": 1, "rewards": "x"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "load_for_inference", lambda *_: pytest.fail("loads a model"))
        evaluate.main(flags.split())


def forecast() -> None:
    write_run("run")
    memory.main(["--model", "run"])


def parsed(text: str, *flags: str) -> None:
    """Reads options from a file of YAML, and flags."""
    Path("run.yaml").write_text(text)
    parse_config(["run.yaml", *flags])


RUN = "RUN_FOLDER: "
ON_RUN = {"flags": "--output run --resume"}
OF_COMMANDS = [
    *table(train, *((message, {"flags": flags}) for message, flags in (
        ("rewards: expected some of answer, format, or module:function; got 'breif'\n"
         "(--traceback shows where this was raised)", "--rewards breif"),
        ("output: run has a run already. Pass resume", "--output run"),
        ("output: another process trains in locked: pass another", "--output locked"),
        ("resume: the run in run is finished", "--output run --resume"),
        ("model: ./nowhere does not exist", "--model ./nowhere"),
        ("model: empty has no model in it", "--model empty"),
        ("model: run is the folder of a run: pass run/model", "--model run"),
        ("model: bare is the folder of a run: it saved no model", "--model bare"),
        ("model: adapters is a folder of adapters, which training", "--model adapters"),
        ("lora_rank: adapters need peft: pip install peft", "--lora_rank 2"),
        ("rollout: vllm is not installed: pip install -e", "--rollout vllm"),
        ("ref_model: odd has another tokenizer than the model", "--beta=0.1 --ref_model odd"),
        ("ref_model: run is the folder of a run: pass run/model", "--beta=0.1 --ref_model run"),
        ("vllm_enable_sleep_mode: expected False on a", "--rollout vllm --vllm_enable_sleep_mode"),
        ("is_correction='token_mask' needs log-probs", "--is_correction token_mask"),
        ("trackers: expected some of ...tensorboard, ...; got nothing", "--trackers nothing"),
        ("trackers: aim is not installed: pip install aim", "--trackers aim"),
        ("chat: the tokenizer of m has no chat template", "--chat"),
    )),
        ("resume: options differ from the checkpoint's: ...steps: was 3, is 100",
         {**ON_RUN, "state": {"config": {"steps": 3}, "processes": 1}}),
        ("resume: expected as many processes as the checkpoint has, 2; got 1",
         {**ON_RUN, "state": {"config": {"steps": 3}, "processes": 2,
                              "may_change": {*TrainingConfig.__dataclass_fields__}}}),
    ),
    *table(evaluated, *((message, {"flags": flags}) for message, flags in (
        (f"{RUN}run.yaml is a file of options; ...: pass the output", "run.yaml"),
        (f"{RUN}nowhere does not exist: pass the output of a run", "nowhere"),
        ("model: run is the folder of a run: pass run/model", "run --model run"),
        ("--dataset a.jsonl: all other options are the run's", "run --dataset a.jsonl"),
        ("num_samples: expected at least 0; got -1", "run --num_samples -1"),
        ("output: empty exists already: pass", "run --output empty"),
        ("train.jsonl has no problem that the run does not train on", "run --problems train.jsonl"),
        ("problems: expected a file of problems; a.jsonl is none", "run --problems a.jsonl"),
        ("rewards: the column `rewards` of named.jsonl[0] is 'x'", "run --problems named.jsonl"),
        ("bare/held_out.jsonl does not exist: ...: pass --problems FILE", "bare --model run/model"),
        ("bare/model does not exist: pass --model", "bare --problems odd.jsonl"),
    ))),
    *(Row(partial(parsed, text, *flags), message, {}) for text, flags, message in (
        ("model: m", ["--step", "3"], "...--step does not exist: did you mean --steps"),
        ("model: m\nbeta: high", [], '..."beta"...Got value: high'),
        ("model: m\nsteps: 3\nbeta: 0.1\nsteps: 4", [], '...duplicate key "steps"...line 4'),
        ("steps", [], "...Unexpected config: steps"),
        # A switch that turns off is known.
        ("model: m", ["--kl_estimator=exact", "--beta=0.1", "--top_p=0.9"],
         "...--no_replay_support or another kl_estimator"),
        ("model: m", ["--chat", "true"], "...Switches take no value: --chat turns one on"),
        ("model: m", ["--batch_size", "2"], "...--batch_size does not exist here. Set prompts_per"),
    )),
    *table(forecast, ("model: run is the folder of a run: pass run/model", {})),
    *table(partial(parse_config, []),
        ("parse_config: expected options of TrainingConfig; got ['modell']", {"modell": "m"})),
]  # fmt: skip
TABLE = [*OF_OPTIONS, *OF_PROBLEMS, *OF_FUNCTIONS, *OF_RUNS, *OF_COMMANDS]
