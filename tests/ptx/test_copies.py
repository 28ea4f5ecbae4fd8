"""`cp.async` alone: what is copied, who may read it when, and what is reported."""

import numpy as np
import pytest

from tests.ptx.test_operations import N, executed, values

LANES = np.tile(np.arange(32), N // 32)
# Per thread: 16 bytes of shared memory at %rd60, 16 of the warp's 128 input bytes at %rd61.
PLACES = ["shl.b32 %r60, %r90, 4;", "cvt.u64.u32 %rd60, %r60;",
          "and.b64 %rd61, %rd80, -128;", "and.b32 %r61, %r60, 112;", "cvt.u64.u32 %rd62, %r61;",
          "add.s64 %rd61, %rd61, %rd62;",
          "setp.gt.u32 %p3, %r90, 99;", "setp.lt.u32 %p4, %r90, 4;"]  # fmt: skip
COPY = "cp.async.cg.shared.global [%rd60], [%rd61], 0x10, 0x10;"
COMMIT, WAIT = "cp.async.commit_group;", "cp.async.wait_group 0;"
READ, WRITE = "ld.shared.b32 %r9, [%rd60];", "st.shared.b32 [%rd60], %r0;"
NOTHING = "mov.b32 %r9, 0;"


def run(*lines):
    x = values("b32", 5)
    out, machine = executed("", ["b32"], [x], "b32", body=[*PLACES, *lines])
    return x, out, {finding.kind for finding in machine.findings.values()}


def rows(x):
    """Returns the four words that each thread copies, `[N, 4]`."""
    by_warp = x.reshape(-1, 8, 4)  # 16 bytes each
    return by_warp[np.arange(N) // 32, LANES % 8]


@pytest.mark.parametrize("size", (4, 8, 16))
@pytest.mark.parametrize("read", (0, 4, 8, 12, 16))
@pytest.mark.parametrize("word", (0, 1, 3))
def test_what_is_not_read_is_zero(size, read, word):
    if read > size or 4 * word >= size:
        return
    lines = [f"cp.async.ca.shared.global [%rd60], [%rd61], {size}, {read};", "cp.async.wait_all;",
             f"ld.shared.b32 %r9, [%rd60+{4 * word}];"]  # fmt: skip
    x, out, findings = run(*lines)
    expected = rows(x)[:, word] if 4 * word < read else 0
    assert not findings and (out == expected).all()


def test_a_copy_without_a_size_of_its_source():
    x, out, findings = run("cp.async.cg.shared.global [%rd60], [%rd61], 16;", COMMIT, WAIT, READ)
    assert not findings and (out == rows(x)[:, 0]).all()


def test_nothing_is_read_where_the_size_is_0():
    copy = "cp.async.cg.shared.global [%rd60], [%rd61 + 65536], 16, 0;"
    _, out, findings = run(copy, COMMIT, WAIT, READ)
    assert not findings and not out.any()


UNWAITED = "a copy that was not waited for"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ((COPY, COMMIT, WAIT, READ), None),
        ((COPY, "cp.async.wait_all;", READ), None),
        ((COPY, COMMIT, COMMIT, "cp.async.wait_group 1;", READ), None),
        ((COPY, COMMIT, READ), f"read of {UNWAITED}"),
        ((COPY, COMMIT, "bar.sync 0;", READ), f"read of {UNWAITED}"),
        ((COPY, WAIT, READ), f"read of {UNWAITED}"),  # of no group
        ((COPY, COMMIT, "cp.async.wait_group 1;", READ), f"read of {UNWAITED}"),
        ((WRITE, COPY, COMMIT, READ), f"read of {UNWAITED}"),  # it holds what was there before
        ((COPY, COMMIT, WRITE, NOTHING), f"write over {UNWAITED}"),
        ((COPY, COMMIT, COPY, NOTHING), f"write over {UNWAITED}"),
        ((COPY, COMMIT, WAIT, COPY, COMMIT, WAIT, READ), None),
        (("@%p3 " + COPY, COMMIT, WAIT, READ), "uninitialised shared memory"),
        ((COPY.replace("%rd60]", "%rd60+16]"), NOTHING), None),
        ((COPY.replace("%rd60]", "%rd60+528]"), NOTHING),
         "shared memory: out of bounds or misaligned"),
        ((COPY.replace("%rd60]", "%rd60+4]"), NOTHING),
         "shared memory: out of bounds or misaligned"),
        ((COPY.replace("%rd61]", "%rd61+512]"), NOTHING), "out of bounds"),
        (("@%p4 " + COPY.replace("%rd61]", "%rd61+4]"), NOTHING), "misaligned"),
        ((COPY.replace("0x10, 0x10", "0x10, 0x14"), NOTHING), "copy of more than it writes"),
        (("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%rd60];",),
         "uninitialised shared memory"),
        ((COPY, COMMIT, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%rd60];"),
         f"read of {UNWAITED}"),
        ((COPY, COMMIT, WAIT, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%rd60];"), None),
        ((COPY, COMMIT, WAIT, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%rd60+4];"),
         "misaligned"),
        ((COPY, COMMIT, WAIT, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%rd60+1024];"),
         "shared memory: out of bounds or misaligned"),
    ],
)  # fmt: skip
def test_findings(lines, kind):
    x, out, findings = run(*lines)
    assert findings == ({kind} if kind else set())
    if kind is None and lines[-1] == READ:
        assert (out == rows(x)[:, 0]).all()


@pytest.mark.parametrize(
    "copy",
    ("cp.async.cg.shared.global [%rd60], [%rd61], 8, 8;",
     "cp.async.ca.shared.global [%rd60], [%rd61], 12, 12;",
     "cp.async.ca.shared.global [%rd60], [%rd61], 16, 6;",
     "cp.async.ca.shared.global [%rd60], [%rd61], 16, 16, %rd1;",
     "cp.async.bulk.shared::cluster.global [%rd60], [%rd61], 16, [%rd1];",
     "cp.async.mbarrier.arrive.shared.b64 [%rd60];"),
)  # fmt: skip
def test_other_copies_are_refused(copy):
    with pytest.raises(NotImplementedError, match=r"cp\.async"):
        run(copy, NOTHING)
