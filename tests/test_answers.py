"""Answers: what is marked as one, numbers, and expressions compared by math-verify."""

import contextlib
import os
import signal
import threading
from fractions import Fraction

import pytest

from grpo_kernels.training.problems import answers, expressions
from grpo_kernels.training.problems.expressions import MathVerify


@pytest.mark.parametrize(
    ("text", "marked"),
    (
        ("so <answer>\n 12 \n</answer> it is", "12"),
        ("<answer></answer>", ""),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer><answer>2", None),
        ("</answer>12<answer>", None),
        ("12</answer>", None),
        # Tags count before other marks, also where they mark nothing.
        ("<answer>7</answer> #### 8", "7"),
        ("<answer>7 #### 7", None),
        ("so #### 7\nand more", "7"),
        ("#### 7\n#### 8", "8"),
        ("#### Then\n" + r"\boxed{4} or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{7", None),
        (r"\boxed{" + "1" * 200 + "}", "1" * 200),
        ("7", None),
    ),
)
def test_the_last_marked_answer_is_extracted(text, marked):
    assert answers.extract_answer(text) == marked


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("12", 12), ("-3", -3), ("\u22123", -3), ("+4", 4), ("$1,234.50", Fraction("1234.5")),
        ("-$5", -5), ("$-5", -5), ("-$-5", None), ("50%", 50), ("1/2", Fraction(1, 2)),
        ("-1/2", Fraction(-1, 2)), ("3.", 3), (".5", Fraction(1, 2)), (" 7 ", 7),
        ("1,000,000", 10**6), ("1/0", None), ("1/2/3", None), ("1,23", None), ("12,", None),
        ("", None), (".", None), ("-", None), ("nan", None), ("12 apples", None),
        ("1 2", None), ("\u0663", None), ("\u00b2", None), ("0x10", None), ("1_000", None),
        ("1e9", 10**9), ("1.5e-3", Fraction(3, 2000)), ("-2.5E+2", -250), ("1e3/4", 250),
        ("e3", None), ("1e", None), ("1e1.5", None), ("1e9999", None), ("9" * 1001, None),
    ),
)  # fmt: skip
def test_number_of(text, expected):
    assert answers.number_of(text) == expected


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    (
        ("12", "12", True), ("12.0", "12", True), ("12", 12, True), ("13", 12, False),
        ("1,450", "1450", True), ("1450", "$1,450", True), ("\u22123", "-3", True),
        ("3", "-3", False), ("0.50", "1/2", True), ("50%", "50", True), ("50", "50%", True),
        ("50%", "0.5", True), ("0.5", "50%", True), ("50%", "0.5%", False), ("5%", "0.5", False),
        # Numbers are the same fraction, or differ.
        ("9007199254740993", "9007199254740992", False), ("9007199254740992.0", 2**53, True),
        ("1" + "0" * 30, "1" + "0" * 29 + "1", False), ("0.0000001", "0.0000002", False),
        ("3.1415926", "3.1415927", False), ("0.0000004", "0.0", False), ("1/3", "0.333333", False),
        # No answer is never right.
        ("", "", False), (" ", "0", False), (None, "0", False), ("x", " ", False),
        ("0.0015", "1.5e-3", True), ("1e3", "1,000", True), ("1e3", "1001", False),
        ("1" + "0" * 200, "1e200", True), ("1e200", "1" + "0" * 199 + "1", False),
        # A number of things is the number; another number or other things are not.
        ("5 apples", "5", True), ("5", "5 apples", True), ("5 apples", "5 pears", False),
        ("3/4 cup", "0.75", True), ("60 miles/hour", "60", True), (r"5\text{ feet}", "5", True),
        ("$18 each", "18", True), ("5 million", "5", False), ("5", "50 percent", False),
        ("7 apples and 8", "7", False), ("-7 apples", "7", False), ("5 cm", "5 m", False),
        ("50 percent", "50%", True), ("5 degrees", "5\xb0", True),
        # Letters of words are no factors.
        ("olleh", "hello", False), ("a*c*t", "cat", False), ("(silent)", "listen", False),
        ("[on, in]", "[no, in]", False), ("dog, cat", "cat, dog", False),
        (r"\text{on}", r"\text{no}", False), ("\u4e1c\u4eac", "\u4eac\u4e1c", False),
        ("walk(felt)", "walk(left)", False), ("Paris", "paris", False),
        # Codes, times, ratios and dates are no expressions.
        ("BA-12", "AB-12", False), ("4e", "e4", False), ("6:4", "3:2", False),
        ("1.5", "3:2", False), ("2021", "2024-01-02", False), ("1/2/2024", "2/1/2024", False),
        ("3 p.m.", "3 a.m.", False), ("3pm", "3pm", True),
        # Spellings change nothing.
        (r"\text{Paris}", "Paris", True), ("Paris.", "Paris", True), ("$x$", "x", True),
        ("cat,dog", "cat, dog", True), ("10 : 30", "10:30", True), ("1{,}450", "1450", True),
        (r"50\%", "0.5", True), ("e\u2011mail", "e-mail", True), ("x" * 2000, "y", False),
    ),
)  # fmt: skip
def test_numbers_and_texts_are_compared_exactly(answer, right, same, monkeypatch):
    monkeypatch.setattr(answers, "same_expression", None)  # is not called
    assert answers.same_answer(answer, right) is same


MATRIX = (
    r"\begin{pmatrix} \frac{1}{6} & -\frac{1}{3} & \frac{1}{6} \\ -\frac{1}{3} & \frac{2}{3} & "
    r"-\frac{1}{3} \\ \frac{1}{6} & -\frac{1}{3} & \frac{1}{6} \end{pmatrix}"
)


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    (
        ("x+1", "1+x", True), ("x+1", "x-1", False), (r"\frac{3}{4}", "3/4", True),
        (r"\sqrt{2}/2", r"\frac{\sqrt{2}}{2}", True), (r"\$18", "18", True), ("3 + 2 = 5", 5, True),
        ("3 + 2 = 6", 5, False), (r"\sqrt{", "2", False), ("x=5", "5", True), ("12 cm", "12", True),
        ("1+2yx", "2xy+1", True), ("2 x y", "2xy", True), ("2xy", "2", False), ("A", "(A)", True),
        ("(4,3)", "(3,4)", False), ("4,3", "3,4", True), (r"\{2,1\}", "{1,2}", True),
        ("[1, 2)", "[1,2)", True), ("(1,2)", "[1,2]", False), ("x\u22121", "x-1", True),
        ("2.5 + 3", "5.5", True), ("10^3", "1e3", True), (r"1.5 \times 10^{-3}", "1.5e-3", True),
        ("x=1 and x=2", "x=1, x=2", True), (r"90^\circ", "90", True), ("5!", "120", True),
        # As code has them.
        ("2pi", r"2\pi", True), ("2*sqrt(3)", r"2\sqrt{3}", True), ("x**2", "x^2", True),
        ("10^-3", "0.001", True), ("10^-3", "10", False),
        (MATRIX.replace(r"\frac", r"\dfrac").replace(" & ", "&"), MATRIX, True),
        (MATRIX.replace("-", ""), MATRIX, False), ("+".join("1" * 90), "90", True),
    ),
)  # fmt: skip
def test_expressions_are_math_verify_s(answer, right, same):
    assert answers.same_answer(answer, right) is same
    assert answers.is_correct(f"<answer>{answer}</answer>", right) is same


# The process of math-verify

HARD = r"\binom{10^9}{5\cdot 10^8}"


@pytest.fixture
def worker():
    worker = MathVerify(0.3)
    yield worker
    worker.close()


def test_a_comparison_without_an_end_is_counted(worker):
    """Also in a thread."""

    def work():
        pairs = ((r"\frac{3}{4}", r"\dfrac{6}{8}"), (HARD, "7"), ("2x", "x+x"))
        replies.append([worker.equal(*pair) for pair in pairs])

    # The second one is known to have no end, and counts all the same.
    for count in (1, 2):
        replies = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert replies == [[True, False, True]] and worker.timed_out == count


def test_signals_of_the_caller_change_nothing(worker):
    """The worker's timer ends it, also where its parent ignores or blocks the signal."""
    handler = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
        assert worker.equal("x+1", "1+x") and not worker.equal(HARD, "7")
        assert worker.timed_out == 1 and signal.getsignal(signal.SIGPROF) == signal.SIG_IGN
        assert signal.setitimer(signal.ITIMER_REAL, 0)[0] > 500
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGPROF, handler)


def test_a_worker_that_was_interrupted_or_killed_is_replaced(worker, monkeypatch):
    """A caller that was interrupted gets no reply of before; the worker ends with its parent."""
    assert worker.equal("x+1", "1+x")
    exchange = expressions._exchange

    def interrupted(process, line=""):
        if not line:
            return exchange(process)
        process.stdin.write(line + "\n")
        process.stdin.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(expressions, "_exchange", interrupted)
        worker.equal("x+2", "2+x")
    assert not worker.equal("x", "y") and worker.equal("2x", "x+x") and worker.timed_out == 0
    os.kill(worker._process.pid, signal.SIGKILL)
    assert not worker.equal("x+2", "2+x") and worker.timed_out == 1
    assert worker.equal("x+2", "2+x")
    process, worker._process = worker._process, None
    process.stdin.close()  # as the end of a process closes it
    assert process.wait(timeout=10) == 0
    process.stdout.close()


# The worker's file on a system that has no timers of a process and no limits of its memory.
WINDOWS = """
import runpy, signal, sys
sys.modules["resource"] = None
del signal.setitimer, signal.SIGPROF, signal.pthread_sigmask
runpy.run_path({!r}, run_name="__main__")
"""


def test_where_a_process_has_no_timer_its_parent_ends_it(monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WINDOWS.format(expressions.__file__))
    monkeypatch.setattr(expressions, "__file__", str(script))
    monkeypatch.delattr(signal, "setitimer")
    worker = MathVerify(600.0)
    try:
        assert worker.equal("x+1", "1+x")
        worker.seconds = 0.3
        assert not worker.equal(HARD, "7") and worker.timed_out == 1
        worker.seconds = 600.0
        assert worker.equal("2x", "x+x") and worker.timed_out == 1
    finally:
        worker.close()


def test_a_forked_process_asks_a_worker_of_its_own():
    assert expressions.same_expression("x+1", "1+x")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            mine = expressions._math_verify()
            os.write(writer, b"yes" if mine._process is None and mine.equal("2x", "x+x") else b"no")
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 9) == b"yes"
    os.waitpid(child, 0)
    assert expressions._math_verify().equal("2y", "y+y")


def test_without_math_verify_numbers_are_compared(monkeypatch, tmp_path, worker):
    (script := tmp_path / "worker.py").write_text("import no_such_module")
    monkeypatch.setattr(expressions, "__file__", str(script))
    with pytest.raises(ImportError, match=r"expressions need math-verify: pip install"):
        worker.equal("x+1", "1+x")
    assert answers.same_answer("12.0", "12")
