"""``tokenize``: the same bytes whatever the workers, and a killed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moetrain.data import tokenize_cli
from moetrain.data.indexed import read_indexed
from moetrain.data.tokenize_cli import tokenize
from moetrain.errors import UserError
from tests.support.runs import environment


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(11):
        (folder / f"{i:02d}.txt").write_text(f"document {i} " * (i + 1))
    lines = (json.dumps({"text": f"line {i} " * i}) for i in range(20))
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return str(folder)


def result(prefix):
    return [Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx")]


def stop_before_join(monkeypatch, *arguments, **keywords):
    """A run that is interrupted when its parts are done."""
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_cli, "_join", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tokenize(*arguments, **keywords)


def test_workers_and_parts_change_no_byte(texts, tmp_path):
    tokenize(texts, str(tmp_path / "one"), tokenizer="bytes", workers=1)
    tokenize(texts, str(tmp_path / "two"), tokenizer="bytes", workers=2, part_bytes=300)
    tokenize(texts, str(tmp_path / "three"), tokenizer="bytes", workers=1, part_bytes=1)
    assert result(tmp_path / "one") == result(tmp_path / "two") == result(tmp_path / "three")
    tokens, ends = read_indexed(tmp_path / "one")
    assert len(ends) == 31 and (tokens[ends - 1] == 256).all()
    assert bytes(tokens[ends[-2] : ends[-1] - 1].astype("u1")) == b"line 19 " * 19
    assert sorted(os.listdir(tmp_path)) == sorted(
        [f"{n}.{e}" for n in ("one", "two", "three") for e in ("bin", "idx")] + ["texts"]
    )


def test_parts_that_are_whole_are_used_again_and_only_those(texts, tmp_path, monkeypatch):
    tokenize(texts, str(tmp_path / "one"), tokenizer="bytes", workers=1)
    stop_before_join(monkeypatch, texts, str(tmp_path / "two"), tokenizer="bytes", workers=1, part_bytes=300)
    parts = tmp_path / "two.parts"
    assert not (tmp_path / "two.bin").exists() and len(list(parts.glob("*.idx"))) >= 4
    (parts / "000001.bin").write_bytes(b"cut off")
    (parts / "000002.idx").unlink()
    made = []
    part = tokenize_cli._part
    monkeypatch.setattr(tokenize_cli, "_part", lambda *job: made.append(job[2].name) or part(*job))
    tokenize(texts, str(tmp_path / "two"), tokenizer="bytes", workers=1, part_bytes=300)
    assert made == ["000001", "000002"]
    assert result(tmp_path / "one") == result(tmp_path / "two")


@pytest.mark.parametrize("change", ["text", "tokenizer", "part_bytes"])
def test_parts_of_another_job_are_not_used(texts, tmp_path, monkeypatch, change):
    out, how = str(tmp_path / "out"), {"tokenizer": "bytes", "workers": 1, "part_bytes": 300}
    stop_before_join(monkeypatch, texts, out, **how)
    if change == "text":
        path = Path(texts) / "lines.jsonl"
        path.write_text(path.read_text().replace("line 7", "LINE 7"))  # as long as before
    elif change == "tokenizer":
        from tests.unit.test_data import small_tokenizer

        how["tokenizer"] = str(small_tokenizer(tmp_path))
    else:
        how["part_bytes"] = 500
    tokenize(texts, out, **how)
    tokenize(texts, str(tmp_path / "fresh"), **how)
    assert result(tmp_path / "out") == result(tmp_path / "fresh")


def idx_count(parts: Path) -> int:
    return len(list(parts.glob("??????.idx")))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_run_leaves_no_process_and_goes_on_to_the_same_bytes(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"text": f"{i} " * 50}) + "\n" for i in range(600)))
    script = tmp_path / "run.py"
    script.write_text(
        "from moetrain.data.tokenize_cli import tokenize\n"
        f"if __name__ == '__main__':\n    tokenize({str(source)!r}, {str(out)!r}, tokenizer='bytes', workers=2, "
        "part_bytes=1)\n"
    )
    parts = tmp_path / "out.parts"
    process = subprocess.Popen([sys.executable, str(script)], env=environment(), start_new_session=True)
    while process.poll() is None and idx_count(parts) < 5:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    # its workers notice and go: nobody is left in its session
    for _ in range(100):
        if process.pid not in {os.getsid(int(p)) for p in os.listdir("/proc") if p.isdigit() and alive(int(p))}:
            break
        time.sleep(0.05)
    else:
        pytest.fail("workers outlived their parent")
    done = idx_count(parts)
    assert 5 <= done < 600 and not out.with_suffix(".idx").exists()

    subprocess.run([sys.executable, str(script)], env=environment(), check=True)
    tokenize(str(source), str(tmp_path / "one"), tokenizer="bytes", workers=1)
    assert result(out) == result(tmp_path / "one")


def alive(pid: int) -> bool:
    try:
        os.getsid(pid)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_terminal_progress_is_plain_lines(texts, tmp_path, capsys):
    tokenize(texts, str(tmp_path / "out"), tokenizer="bytes", workers=1, part_bytes=300)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tokenize: ") and " parts  " in lines[0] and lines[0].endswith(" tok/s")
    assert lines[-1].endswith("31 documents, 2,243 tokens (bytes)")


# mistakes


def test_a_missing_source_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        tokenize(str(tmp_path / "nowhere"), str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert os.listdir(tmp_path) == []


def test_an_out_that_is_no_prefix_is_one_sentence(texts):
    with pytest.raises(UserError, match=r"--out '.' is no prefix"):
        tokenize(texts, ".", tokenizer="bytes", workers=1)


def test_an_out_that_cannot_be_written_is_one_sentence(texts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*give another --out"):
        tokenize(texts, str(tmp_path / "file" / "out"), tokenizer="bytes", workers=1)


def test_a_folder_of_somebody_else_is_never_emptied(texts, tmp_path):
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"out.parts is in the way"):
        tokenize(texts, str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert (tmp_path / "out.parts" / "thesis.txt").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_document_ends_the_run_in_one_sentence_and_the_rest_is_kept(texts, tmp_path, workers):
    path = Path(texts) / "lines.jsonl"
    path.write_text(path.read_text() + "\n{broken line}\n")
    with pytest.raises(UserError, match=r"lines.jsonl line 21 is no JSON object"):
        tokenize(texts, str(tmp_path / "out"), tokenizer="bytes", workers=workers, part_bytes=300)
    assert idx_count(tmp_path / "out.parts") >= 4 and not (tmp_path / "out.bin").exists()
