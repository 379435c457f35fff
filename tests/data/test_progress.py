"""What a long pass shows in a log; the bar on a terminal is left to rich."""

from ssm_trn.data import progress as progress_module
from ssm_trn.data.progress import PassProgress


def test_a_line_a_minute(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    with PassProgress("Tokenizing", "tokens", 30_000) as progress:
        for _ in range(10):
            now[0] += 24
            progress.add(1200)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"Tokenizing: {done:,} of 30,000 tokens, 50 a second" for done in (3600, 7200, 10800)]


def test_a_short_pass_says_nothing(capsys):
    with PassProgress("Reading", "documents") as progress:
        progress.add(5)
    assert capsys.readouterr().err == ""
