"""The benchmark of support replay times what it has found to be right."""

import json

from benchmarks import support_replay
from benchmarks.gpu_costs import DEVICES


def test_replay_is_timed_if_its_gradients_are_right(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(support_replay, "device_of", lambda _: DEVICES["H200"])
    path = tmp_path / "replay.json"
    small = ["--device", "cpu", "--shape", "36,150,16", "--entries", "5", "--json", str(path)]
    support_replay.main(small)
    rows = json.loads(path.read_text())["rows"]
    assert [row["what"] for row in rows] == ["forward", "dh", "dW", "all", "exact"]
    assert all(min(row["seconds"]) > 0 < row["predicted_seconds"] for row in rows)
    assert rows[0]["error"] <= 1e-4 and 3 < rows[0]["entries"] <= 6
    masked = support_replay.masked
    monkeypatch.setattr(support_replay, "masked", lambda *given: [-x for x in masked(*given)])
    support_replay.main(small)
    rows = json.loads(path.read_text())["rows"]
    assert rows[0]["status"].startswith("wrong: gradients off by 2.0") and "seconds" not in rows[0]
    assert [row["what"] for row in rows] == ["all", "exact"]
    assert "x model" in capsys.readouterr().out
