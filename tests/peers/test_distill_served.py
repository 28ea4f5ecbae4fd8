"""The example whose teacher is served: its numbers, its requests, and what it refuses."""

import io
import json
import math
from http.client import BadStatusLine, IncompleteRead
from itertools import chain

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM

from tests.helpers.batches import relative_error
from tests.helpers.examples import check_runs, check_scores, example
from tests.helpers.fake_server import Teacher, decoded, encoded, serving
from tests.helpers.tiny_models import make_model, make_tokenizer, perturbed

FAST = ("--steps", "12", "--learning-rate", "2e-3")
pytestmark = pytest.mark.usefixtures("real_memory")
V, DIRECTIONS = 211, ("forward", "reverse")
# Of `vllm serve` 0.32 with SmolLM2-135M, asked for the likeliest two ids. The last token of the
# first prompt is not among them, that of the second one is.
COMPLETIONS = (
    '{"id":"cmpl-83e271345129ec0c","object":"text_completion","created":1795952897,"model":'
    '"smollm2-135m","choices":[{"index":0,"text":"\'s","logprobs":null,"finish_reason":"length",'
    '"stop_reason":null,"token_ids":null,"prompt_logprobs":[null,{"3":{"logprob":'
    '-22.355409622192383,"rank":47693,"decoded_token":"<repo_name>"},"29":{"logprob":'
    '-0.9861063361167908,"rank":1,"decoded_token":"-"},"28":{"logprob":-2.058457851409912,"rank":2,'
    '"decoded_token":","}}],"prompt_token_ids":null,"routed_experts":null},{"index":1,"text":" is",'
    '"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
    '"prompt_logprobs":[null,{"3575":{"logprob":-11.539271354675293,"rank":2923,"decoded_token":'
    '" capital"},"29":{"logprob":-0.8654772639274597,"rank":1,"decoded_token":"-"},"28":{"logprob":'
    '-2.653231382369995,"rank":2,"decoded_token":","}},{"282":{"logprob":-0.337594211101532,"rank":'
    '1,"decoded_token":" of"},"2240":{"logprob":-2.3195316791534424,"rank":2,"decoded_token":'
    '" city"}}],"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,'
    '"system_fingerprint":"vllm-0.32.0-4a271d6e","usage":{"prompt_tokens":5,"total_tokens":7,'
    '"completion_tokens":2},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
)
# Of [[1, 2], [3]], the second row of which vLLM pads.
SCORES = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnPGY0JywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDIpLCB9"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoddKzAmA/OwI7z"
    "qcAAAID/"
)


@pytest.fixture
def run():
    """The functions of the example, to whose teacher the student's prompt is shown."""
    return example("distill_served", SHOWN="", BATCH=6)


@pytest.fixture
def teacher(tiny_model):
    return Teacher(tiny_model)


@pytest.fixture
def address(teacher):
    with serving(teacher) as address:
        yield address


# Values and gradients


def heads(sharp=3.0, rows=7):
    """States and a head of a student, and the log-probs of a teacher."""
    g = torch.Generator().manual_seed(0)
    states, head = torch.randn(rows, 24, generator=g), torch.randn(V, 24, generator=g) / 5
    teacher = (states.double() @ head.double().T + torch.randn(rows, V, generator=g)) * sharp
    return (sharp * states).requires_grad_(), head.requires_grad_(), teacher.log_softmax(-1)


def by_hand(states, head, teacher, ids, direction):
    """The mean KL of the ids and the rest of the vocabulary, from float64."""
    kls = []
    for logits, t, row in zip(states @ head.T, teacher, ids, strict=True):
        others = [i for i in range(V) if i not in row]
        s, t = (
            torch.cat([x[row], x[others].logsumexp(0, keepdim=True)])
            for x in (logits.log_softmax(0), t)
        )
        a, b = (t, s) if direction == "forward" else (s, t)
        kls.append((a.exp() * (a - b)).sum())
    return torch.stack(kls).mean()


def value_and_gradients(loss, *tensors):
    return loss.item(), torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_kl_in_float64(run, direction):
    """With a row that has fewer ids: those that fill it have no part and no gradient."""
    states, head, teacher = heads()
    ids = [row.topk(5).indices.tolist() for row in teacher]
    ids[2], ids[4] = ids[2][:1], ids[4][:3]
    scores = [{i: float(t[i]) for i in row} for t, row in zip(teacher, ids, strict=True)]
    kl = run["kl_of"](states, head, *run["as_tensors"]([scores[:3], scores[3:]]), direction).mean()
    value, gradients = value_and_gradients(kl, states, head)
    exact = [x.detach().double().requires_grad_() for x in (states, head)]
    truth, exact_gradients = value_and_gradients(by_hand(*exact, teacher, ids, direction), *exact)
    assert truth > 0.1 and value == pytest.approx(truth, rel=1e-5)
    for actual, expected in zip(gradients, exact_gradients, strict=True):
        assert expected.norm() > 0.01 and relative_error(actual, expected) < 1e-5


def test_the_mass_of_the_ids_does_not_shrink(run):
    """A student that is its teacher has no gradient.

    The sum over the ids alone, which is not a divergence, would lower all their probabilities.
    """
    states, head, _ = heads(sharp=1.0)
    of_teacher, ids = (states @ head.T).detach().log_softmax(-1).topk(5)
    (ours,) = torch.autograd.grad(
        run["kl_of"](states, head, ids, of_teacher, "reverse").mean(), states
    )
    s = (states @ head.T).log_softmax(-1).gather(1, ids)
    (theirs,) = torch.autograd.grad((s.exp() * (s - of_teacher)).sum(-1).mean(), states)
    after = ((states - theirs) @ head.T).log_softmax(-1).gather(1, ids)
    assert theirs.norm() > 0.01 and (after.logsumexp(1) < s.logsumexp(1)).all()
    assert ours.norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("excess", (0.0, 3e-7, -3e-7))
def test_a_teacher_that_is_sure(run, direction, excess):
    """All of its probability is on the ids, or a little more, as float32 adds up."""
    states, head, _ = heads()
    ids = (states @ head.T).topk(3).indices
    of_teacher = torch.tensor([[0.0, -20.0, -9999.0], [-0.7, -0.8, -3.4]] * 3 + [[0.0, -1e3, -1e4]])
    of_teacher = (of_teacher.double().log_softmax(-1) + excess).float()
    kl = run["kl_of"](states, head, ids, of_teacher, direction)
    gradients = torch.autograd.grad(kl.mean(), (states, head))
    assert kl.isfinite().all() and (kl > -1e-5).all()
    assert all(x.isfinite().all() and 0.01 < x.norm() < 1e4 for x in gradients)


def test_a_batch_is_its_rows(run, tiny_model):
    """Padding changes no state and has no gradient."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model).double().eval()
    prompts, completions = [[5, 9, 7], [8], [4] * 9], [[3], [2, 6, 7, 9, 11], [5, 1]]
    states = run["states_of"](model, prompts, completions)
    weights = torch.linspace(-1, 1, states.numel(), dtype=torch.double).reshape(states.shape)
    rows = [run["states_of"](model, [a], [b]) for a, b in zip(prompts, completions, strict=True)]
    assert [*map(len, rows)] == [1, 5, 2]
    torch.testing.assert_close(states, torch.cat(rows))
    batch, alone = (
        torch.autograd.grad((x * weights).sum(), [*model.base_model.parameters()])
        for x in (states, torch.cat(rows))
    )
    for actual, expected in zip(batch, alone, strict=True):
        torch.testing.assert_close(actual, expected)
    logps = model(torch.tensor([prompts[1] + completions[1]])).logits.log_softmax(-1)[0, :-1]
    ours = (states[1:6] @ model.get_output_embeddings().weight.T).log_softmax(-1)
    torch.testing.assert_close(ours, logps)


# The wire


def with_answer(run, answer):
    run["main"].__globals__["ask"] = lambda *_, **body: answer


def test_a_recorded_answer_of_completions(run):
    with_answer(run, json.loads(COMPLETIONS))
    scores = run["likeliest_of_teacher"]("", 2, [[28120], [504]], [[3], [3575, 282]])
    assert [[*map(list, x)] for x in scores] == [[[3, 29, 28]], [[3575, 29, 28], [282, 2240]]]
    ids, logps = run["as_tensors"](scores)
    assert ids.tolist() == [[3, 29, 28], [3575, 29, 28], [282, 2240, 0]]
    assert logps[2].tolist() == pytest.approx([-0.3375942, -2.3195317, -torch.inf])
    assert logps[0, 0].item() == pytest.approx(-22.35541)


def test_a_recorded_answer_of_generate(run):
    assert encoded(decoded(SCORES)) == SCORES
    with_answer(run, {"prompt_token_id_logprobs": SCORES})
    logps = run["teacher_at"]("", [[5, 6]], [[7, 8]], torch.tensor([[1, 2], [3, -1]]))
    assert logps.dtype == torch.float32 and logps[1, 1] == -torch.inf
    assert logps[:, 0].tolist() == pytest.approx([-5.389174, -5.311], abs=1e-3)


def test_both_questions_have_the_teachers_log_probs(run, teacher, address):
    """Also at the address that clients of OpenAI's API are given."""
    prompts, completions = [[5, 9, 7], [8]], [[3], [2, 6, 7]]
    check_scores(run, address + "/v1/", teacher, prompts, completions, 1e-5)
    (_, first), (_, second), _ = teacher.asked
    assert first["max_tokens"] == second["sampling_params"]["max_tokens"] == 1
    assert "temperature" not in {*first, *second["sampling_params"]}  # vLLM would ignore it here


# What is refused


def rows(change):
    """A change of the rows of each choice."""
    return lambda x: {"choices": [
        {**one, "prompt_logprobs": change(one["prompt_logprobs"])} for one in x["choices"]
    ]}  # fmt: skip


ALL_IDS = {str(i): {"logprob": -9.0} for i in range(257)}
UNSCORED = "has not scored the tokens"
REFUSED = {
    "no prompt_logprobs": ("teacher", lambda x: {**x, "choices": [{"index": i} for i in range(6)]},
                           UNSCORED),
    "a choice too few": ("teacher", lambda x: {"choices": x["choices"][1:]}, UNSCORED),
    "other tokens": ("teacher", rows(lambda x: [{"0": {"logprob": -1.0}}] * len(x)), UNSCORED),
    "a row too many": ("teacher", rows(lambda x: [None, *[ALL_IDS] * len(x)]), UNSCORED),
    "a row too few": ("teacher", rows(lambda x: [None, *[ALL_IDS] * (len(x) - 2)]), UNSCORED),
    "logits": ("teacher", rows(lambda x: [None, *({i: {"logprob": 3.0} for i in row}
                                                  for row in x[1:])]), "add up to .*raw_logits"),
    "a sum above 1": ("student", lambda x: {"prompt_token_id_logprobs": encoded(
        decoded(x["prompt_token_id_logprobs"]) * 0 + np.float32(math.log(1.01 / 16))
    )}, "add up to 1.01:"),
    "no token ids": ("student", lambda x: {**x, "prompt_token_id_logprobs": None},
                     "ignores prompt_logprob_token_ids.*0.32.*--enable-scale-out"),
    "scores of other ids": ("student", lambda x: {"prompt_token_id_logprobs": SCORES},
                            "ignores prompt_logprob_token_ids"),
    "NaN": ("student", lambda x: {"prompt_token_id_logprobs": encoded(
        decoded(x["prompt_token_id_logprobs"]) * float("nan")
    )}, "add up to nan"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_answer_without_scores(case, run, teacher, address, tiny_model):
    ids, change, message = REFUSED[case]
    teacher.change = lambda x: x if "tokens" in x else change(x)
    options = ["--model", str(tiny_model), "--server", address, "--ids", ids, "--steps", "1"]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run["main"](options)


def test_what_the_server_refuses_is_said(run, teacher, address, tiny_model):
    options = ["--model", str(tiny_model), "--server", address, "--steps", "1"]
    teacher.change = lambda x: x if "tokens" in x else {"error": "greater than max allowed: 20"}
    teacher.status = 400
    with pytest.raises(
        ConnectionError, match=rf"(?s){address}/tokenize: .*400.*vllm serve TEACHER"
    ):
        run["main"](options)
    with pytest.raises(
        ConnectionError, match=r"(?s)completions: .*400.*allowed: 20.*--max-logprobs K"
    ):
        run["likeliest_of_teacher"](address, 64, [[5]], [[6]])
    teacher.status, teacher.change = 200, lambda x: {"tokens": [1, 2]}
    with pytest.raises(ValueError, match="another tokenizer"):
        run["main"](options)


def test_no_server(run, teacher, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(teacher) as address:
        pass
    with pytest.raises(ConnectionError, match=rf"(?s){address}/tokenize: .*vllm serve TEACHER"):
        run["ask"](address, "/tokenize")
    with pytest.raises(ConnectionError, match="unknown url type"):
        run["ask"]("127.0.0.1:8000", "/tokenize")


NOT_VLLM = {"SSH": BadStatusLine("SSH-2.0-"), "a page": b"<html>", "half": IncompleteRead(b"{")}


@pytest.mark.parametrize("case", NOT_VLLM)
def test_another_server(case, run):
    def urlopen(*_, **__):
        if isinstance(NOT_VLLM[case], bytes):
            return io.BytesIO(NOT_VLLM[case])
        raise NOT_VLLM[case]

    run["main"].__globals__["urlopen"] = urlopen
    with pytest.raises(ConnectionError, match=r"(?s)http://a/tokenize: .*vllm serve TEACHER"):
        run["ask"]("http://a", "/tokenize")


@pytest.mark.parametrize("wrong", (V, -1))
def test_an_id_outside_of_the_vocabulary(run, wrong):
    states, head, _ = heads(rows=1)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 211\)"):
        run["kl_of"](states, head, torch.tensor([[3, wrong]]), torch.full((1, 2), -2.0), "forward")


# Columns of a dataset


def line(prompts, completions, scores):
    return json.dumps({
        "prompt_ids": prompts, "completion_ids": completions,
        "teacher_ids": [[*row] for row in scores], "teacher_logps": [[*x.values()] for x in scores],
    })  # fmt: skip


def test_columns_are_what_the_server_says(run, address, tiny_model, tmp_path, capsys):
    prompts, completions = [[5, 9, 7], [8]], [[3], [2, 6, 7]]
    scores = run["likeliest_of_teacher"](address, 4, prompts, completions)
    rows = [*zip(prompts, completions, scores, strict=True)]
    path = tmp_path / "teacher.jsonl"
    path.write_text("".join(line(*row) + "\n" for row in rows))
    assert run["read_columns"](str(path)) == rows
    capsys.readouterr()
    options, student = ["--columns", str(path)], perturbed(tiny_model, tmp_path / "student", 0.6)
    check_runs(run, options, tiny_model, student, *FAST, to=0.6)
    assert "accuracy" not in capsys.readouterr().out  # of sums, which the file is not about
    with pytest.raises(SystemExit):
        run["main"]([*options, "--ids", "student"])
    assert "--ids: not allowed with argument --columns" in capsys.readouterr().err


GOOD = {"prompt_ids": [5], "completion_ids": [6, 7], "teacher_ids": [[1, 2], [3, 4]],
        "teacher_logps": [[-1.0, -2.0], [-3.0, -1.0]]}  # fmt: skip
WRONG = {
    **{f"no {name}": ({k: v for k, v in GOOD.items() if k != name}, name) for name in GOOD},
    **{f"null {name}": ({**GOOD, name: None}, "") for name in GOOD},
    "no row": (5, "no attribute"),
    "no ids of a token": (
        {**GOOD, "teacher_ids": [[1, 2], []], "teacher_logps": [[-1.0, -2.0], []]},
        "an empty list",
    ),
    "an empty prompt": ({**GOOD, "prompt_ids": []}, "an empty list"),
    "an empty completion": (
        {**GOOD, **{k: [] for k in GOOD if k != "prompt_ids"}},
        "an empty list",
    ),
    "no number": ({**GOOD, "teacher_logps": [[None, -2.0], [-3.0, -1.0]]}, "NoneType"),
    "ids of one token": ({**GOOD, "teacher_ids": [[1, 2]]}, "shorter"),
    "an id too many": ({**GOOD, "teacher_ids": [[1, 2, 3], [3, 4]]}, "shorter"),
    "a token too many": ({**GOOD, "completion_ids": [6, 7, 8]}, "shorter"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_column_that_is_dropped(case, run, tmp_path):
    """An error that names the line, never a loss without the teacher."""
    row, message = WRONG[case]
    path = tmp_path / "teacher.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"line 2: .*{message}.*expected the columns"):
        run["read_columns"](str(path))


def test_lines_of_columns(run, tmp_path):
    """A text column may hold the ends of lines that JSON does not escape; no line is an error."""
    path = tmp_path / "teacher.jsonl"
    path.write_text(json.dumps({**GOOD, "text": "é\u2028\x85"}, ensure_ascii=False), "utf-8")
    assert run["read_columns"](str(path)) == [
        ([5], [6, 7], [{1: -1.0, 2: -2.0}, {3: -3.0, 4: -1.0}])
    ]
    path.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        run["read_columns"](str(path))


# Runs


@pytest.mark.parametrize("ids", ("teacher", "student"))
def test_the_kl_falls(ids, run, address, tiny_model, tmp_path):
    student = perturbed(tiny_model, tmp_path / "student", 0.6)
    check_runs(run, ["--server", address, "--ids", ids], tiny_model, student, *FAST, to=0.7)


@pytest.mark.parametrize("ids", ("teacher", "student"))
@pytest.mark.parametrize("family", ("gemma2", "cohere"))
def test_a_head_with_a_softcap_or_a_scale(family, ids, run, tmp_path):
    # The tiny model's logits are far below its cap of 30.
    more = {"final_logit_softcapping": 1.0} if family == "gemma2" else {}
    make_model(family, **more).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--steps", "1", "--ids", ids]
    with serving(Teacher(tmp_path)) as address:
        (start,) = run["main"]([*options, "--server", address])
    assert abs(start) < 1e-6


@pytest.mark.parametrize("ids", ("teacher", "student"))
def test_a_step(ids, run, teacher, address, tiny_model, tmp_path):
    """Samples, requests, the mean and the clipped gradient."""
    names, batches, samples, losses, norms = run["main"].__globals__, [], [], [], []
    sampler, kl_of = run["completions_of"], run["kl_of"]

    def completions_of(model, tokenizer, batch, sample):
        assert not model.training
        tokens, mask = sampler(model, tokenizer, batch, sample)
        mask[:, 3:] = False
        if sample:
            batches.append(batch)
            samples.append([x[kept].tolist() for x, kept in zip(tokens, mask, strict=True)])
        return tokens, mask

    def spied_kl_of(*args):
        states, head, of_batch, *_ = args
        likeliest = (states @ head.weight.T).topk(8).indices
        assert torch.equal(of_batch, likeliest) == (ids == "student")
        losses.append((args[-1], 100 * kl_of(*args)))  # of gradients that are clipped
        return losses[-1][1]

    def before_step(optimizer, *_):
        (group,) = optimizer.param_groups
        norms.append(torch.cat([p.grad.flatten() for p in group["params"]]).norm())

    names.update(SHOWN="1+1=2\n", completions_of=completions_of, kl_of=spied_kl_of)
    options = ["--model", perturbed(tiny_model, tmp_path / "student", 0.6), "--server", address]
    hook = register_optimizer_step_pre_hook(before_step)
    try:
        history = run["main"]([*options, "--steps", "2", "--ids", ids, "--top", "8"])
    finally:
        hook.remove()
    assert {direction for direction, _ in losses} == {"forward" if ids == "teacher" else "reverse"}
    assert history == [kl.mean().item() for _, kl in losses]
    assert norms == pytest.approx([1.0, 1.0], rel=1e-4)
    assert not {*chain(*batches)} & {*names["HELD_OUT"]}
    expected = [
        teacher.tokenizer(names["SHOWN"] + names["SUM"].format(*one)).input_ids + completion
        for batch, sample in zip(batches, samples, strict=True)
        for one, completion in zip(batch, sample, strict=True)
    ]
    asked = [body for path, body in teacher.asked if path != "/tokenize"]
    if ids == "teacher":
        assert [body["prompt_logprobs"] for body in asked] == [8, 8]
        assert [*chain(*(body["prompt"] for body in asked))] == expected
    else:
        assert sorted(body["token_ids"] for body in asked) == sorted(expected)
        rows = chain(*(body["sampling_params"]["prompt_logprob_token_ids"] for body in asked))
        assert {*map(len, rows)} == {8}
